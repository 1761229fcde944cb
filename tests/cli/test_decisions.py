"""``pending``, ``approve`` and ``deny``, with an agent in another process."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from cpkit.cli.stores import Store
from cpkit.effects import EffectLedger, EffectTimeout
from cpkit.lease import thread_lease
from tests.cli.command import call, forked, in_store, invoke, run_main, table
from tests.effects.shop import claim
from tests.processes import Forked
from tests.stores import quick_on


def agent(url: str) -> Forked:
    """Run an agent in another process."""
    return Forked("tests.cli.agent", url, "t", "7")


def line(process: Forked) -> str:
    return process.stdout.readline().strip()


async def asked_twice(cp: Store) -> None:
    """Request two effects, and a third one twice with different arguments."""
    for amount, fields in ((1, None), (2, None), (3, ["to"]), (4, ["to"])):
        await ask(cp, amount, fields)


async def ask(cp: Store, amount: int, fields: list[str] | None = None) -> None:
    ledger = EffectLedger(cp, requires_approval=lambda _: True)

    with pytest.raises(EffectTimeout):
        await ledger.run(
            "t",
            "wire",
            {"amount": amount, "to": "bob"},
            lambda _: None,
            key_fields=fields,
            approval_timeout=0,
        )


@pytest.mark.parametrize("url", quick_on("sqlite"), indirect=True)
def test_an_approved_effect_runs(url: str) -> None:
    """The start of its key is enough to approve it, and a later denial is refused."""
    with agent(url) as process:
        key = line(process).removeprefix("asked ")
        listed = run_main("pending", url)
        assert table(listed.out)[0][:4] == ["t", key[:12], "approval", "wire"]
        assert '"amount": 7' in listed.out

        ended = run_main("approve", url, key[:8], "--by", "anna")
        assert (ended.code, ended.err) == (0, "")
        assert ended.out == f"approved (by anna): wire {key}\n"
        assert line(process) == "ran 7"

    again = invoke("approve", url, key, "--by", "bob", "--json")
    assert (again.code, again.json["by"]) == (0, "anna")
    for words in ([key], [key[:8]], ["t", key[:8]]):
        late = invoke("deny", url, *words)
        assert late.code == 1
        assert late.err == "the request was already approved by anna\n"

    assert invoke("pending", url).err == "nothing is pending\n"


@pytest.mark.parametrize("url", quick_on("sqlite"), indirect=True)
def test_a_denied_effect_never_runs(url: str) -> None:
    """The agent receives the reason, and a later approval is refused."""
    with agent(url) as process:
        key = line(process).removeprefix("asked ")
        ended = run_main("deny", url, "t", key, "--reason", "too much", "--json")
        assert ended.code == 0
        assert ended.json["decision"] == "denied"
        assert ended.json["reason"] == "too much"
        assert line(process) == "denied: too much"

    late = invoke("approve", url, "t", key, "--json")
    assert (late.code, late.json["ok"]) == (1, False)
    assert late.json["error"] == "the request was already denied"


def test_pending_lists_calls_without_an_outcome(url: str) -> None:
    """The list has the calls of all threads, oldest first, or of one thread."""

    async def leave(cp: Store) -> None:
        await call(cp, "b", "c1", "first")
        await call(cp, "a", "c2", "second")
        await call(cp, "a", "c3", "done", success=True)

    in_store(url, leave)
    found = invoke("pending", url, "--json").json["pending"]
    assert [(one["kind"], one["thread_id"], one["key"]) for one in found] == [
        ("call", "b", "first"),
        ("call", "a", "second"),
    ]
    assert len(invoke("pending", url, "a", "--json").json["pending"]) == 1
    unknown = invoke("pending", url, "missing")
    assert (unknown.code, unknown.out) == (1, "")
    assert "there is no thread 'missing'" in unknown.err


def test_an_unknown_or_ambiguous_request_is_refused(sqlite_url: str) -> None:
    """The error says to give more of the key, or the arguments of the request."""
    in_store(sqlite_url, asked_twice)
    none = invoke("approve", sqlite_url, "t", "nothing")
    assert (none.code, none.out) == (1, "")
    assert none.err == "thread 't' has no approval request under 'nothing'\n"
    assert invoke("deny", sqlite_url, "missing", "x", "--json").json["ok"] is False

    waiting = invoke("pending", sqlite_url, "--json").json["pending"]
    key = next(one["key"] for one in waiting if one["args"]["amount"] == 3)
    unclear = invoke("approve", sqlite_url, "t", key)
    assert unclear.code == 2
    assert "--args" in unclear.err
    assert invoke("approve", sqlite_url, "t", key, "--args", "[]").code == 2
    assert invoke("approve", sqlite_url, "t", key, "--args", "{").code == 2

    chosen = '{"amount": 4, "to": "bob"}'
    assert invoke("approve", sqlite_url, "t", key, "--args", chosen).code == 0
    left = invoke("pending", sqlite_url, "--json").json["pending"]
    assert sorted(one["args"]["amount"] for one in left) == [1, 2, 3]
    other = '{"amount": 5, "to": "bob"}'
    assert invoke("approve", sqlite_url, "t", key, "--args", other).code == 1


def test_the_start_of_a_key_must_be_unique(sqlite_url: str) -> None:
    """The error says how many requests start so; no start at all is refused."""
    in_store(sqlite_url, lambda cp: ask(cp, 0))

    for key in ("", "\udcff"):  # an unset variable, and a byte that is not UTF-8
        for words in ([key], ["t", key]):
            none = invoke("approve", sqlite_url, *words)
            assert (none.code, none.out) == (2, "")
            assert "KEY" in none.err

    async def ask_often(cp: Store) -> None:
        for amount in range(1, 17):  # of 17 keys, two have the same first character
            await ask(cp, amount)

    in_store(sqlite_url, ask_often)
    waiting = invoke("pending", sqlite_url, "--json").json["pending"]
    assert len(waiting) == 17
    first, count = Counter(one["key"][0] for one in waiting).most_common(1)[0]
    several = invoke("approve", sqlite_url, first)
    assert (several.code, several.out) == (2, "")
    assert f"{count} requests start with" in several.err
    assert "more characters of the key" in several.err


def test_a_damaged_thread_does_not_hide_the_others(damaged_url: str) -> None:
    """The command names it, and exits with 1."""
    ended = invoke("pending", damaged_url, "--json")
    assert ended.code == 1
    assert ended.err.startswith("not listed: thread 'broken' is corrupt at call")
    assert [one["thread_id"] for one in ended.json["pending"]] == ["a", "c"]


@pytest.mark.parametrize("command", ["show", "calls", "heal"])
def test_the_exit_code_of_a_damaged_thread(damaged_url: str, command: str) -> None:
    """The store can be read, and what the command asked for cannot: exit code 1."""
    ended = invoke(command, damaged_url, "broken")
    assert (ended.code, "'broken' is corrupt at call" in ended.err) == (1, True)


def test_a_damaged_thread_is_named_when_it_is_asked_for(damaged_url: str) -> None:
    """As in the list of all threads: standard output is still a list, the code 1."""
    ended = invoke("pending", damaged_url, "broken", "--json")
    assert ended.code == 1
    assert ended.err.startswith("not listed: thread 'broken' is corrupt at call")
    assert ended.json == {"pending": []}


def test_a_damaged_request_is_named(sqlite_url: str, tmp_path: Path) -> None:
    """A worker waits for its repair, so a person has to learn of it."""
    in_store(sqlite_url, lambda cp: ask(cp, 1))

    with closing(sqlite3.connect(tmp_path / "store.db")) as raw, raw:
        raw.execute("UPDATE cpkit_calls SET args = '{'")

    ended = invoke("pending", sqlite_url)
    assert ended.code == 1
    assert "not listed: thread 't' is corrupt at call" in ended.err
    (run,) = invoke("runs", sqlite_url, "--json").json["runs"]
    assert (run["state"], run["thread_id"]) == ("waiting", "t")
    assert "is damaged" in run["why"][0]
    assert "'t' is corrupt" in invoke("doctor", sqlite_url, "--json").json["damaged"][0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_decision_that_cannot_be_printed_is_stored(sqlite_url: str) -> None:
    """Standard error says so, and a second command decides nothing new."""
    in_store(sqlite_url, lambda cp: ask(cp, 1))
    (waiting,) = invoke("pending", sqlite_url, "--json").json["pending"]

    with open("/dev/full", "wb") as full:
        words = ("approve", sqlite_url, waiting["key"])
        ended = forked(*words, stdout=full.fileno())

    assert ended.code == 2
    assert ended.err.splitlines() == [
        "approved: the decision is stored",
        "standard output: No space left on device",
    ]
    assert invoke("deny", sqlite_url, waiting["key"]).code == 1


def test_an_approval_has_a_value(sqlite_url: str) -> None:
    """As JSON; a value that the policy forbids is refused."""
    in_store(sqlite_url, lambda cp: ask(cp, 5))
    (request,) = invoke("pending", sqlite_url, "--json").json["pending"]
    wrong = run_main("approve", sqlite_url, request["key"], "--value", "{")
    assert (wrong.code, "--value is not JSON" in wrong.err) == (2, True)
    wrong = invoke("approve", sqlite_url, request["key"], "--value", '{"amount": 1}')
    assert (wrong.code, "'amount'" in wrong.err) == (2, True)
    done = invoke(
        "approve", sqlite_url, request["key"], "--value", '{"limit": 2}', "--json"
    )
    assert (done.code, done.json["value"]) == (0, {"limit": 2})


def test_a_request_is_withdrawn(sqlite_url: str) -> None:
    """It is gone: a second withdrawal changes nothing, and no decision counts."""
    in_store(sqlite_url, lambda cp: ask(cp, 5))
    (request,) = invoke("pending", sqlite_url, "--json").json["pending"]
    done = invoke("withdraw", sqlite_url, request["key"][:10], "--by", "ann", "--json")
    assert (done.code, done.json["decision"], done.json["by"]) == (
        0,
        "withdrawn",
        "ann",
    )
    assert invoke("pending", sqlite_url, "--json").json["pending"] == []

    again = invoke("withdraw", sqlite_url, request["key"])
    assert (again.code, "withdrawn (by ann)" in again.out) == (0, True)
    late = invoke("approve", sqlite_url, request["key"])
    assert (late.code, "already withdrawn by ann" in late.err) == (1, True)


def test_a_restored_request_is_decided_by_its_first_characters(
    sqlite_url: str, tmp_path: Path
) -> None:
    """It is on no list of runs, and is found as ``pending`` finds it."""
    in_store(sqlite_url, lambda cp: ask(cp, 5))
    dump = in_store(sqlite_url, lambda cp: cp.dump_thread("t"))
    assert dump is not None
    other = f"sqlite:///{tmp_path}/other.db"
    assert invoke("doctor", other, "--create").code == 0
    in_store(other, lambda cp: cp.restore_thread(dump))
    (request,) = invoke("pending", other, "--json").json["pending"]
    done = invoke("approve", other, request["key"][:12], "--json")
    assert (done.code, done.json["decision"]) == (0, "approved")


@pytest.mark.parametrize("command", ["landed", "not-landed"])
def test_a_person_says_how_a_call_in_doubt_ended(sqlite_url: str, command: str) -> None:
    """By the first characters of the key that ``pending`` shows."""

    async def leave(cp: Store) -> None:
        key = EffectLedger(cp).key("t", "wire", {"amount": 1})
        await claim(cp, "t", key, {"amount": 1}, "wire")

    in_store(sqlite_url, leave)
    (call_,) = invoke("pending", sqlite_url, "--json").json["pending"]
    options = ["--by", "ann", "--json"]

    if command == "landed":
        options += ["--result", '"w1"']

    done = invoke(command, sqlite_url, call_["key"][:8], *options)
    assert (done.code, done.json["said"], done.json["by"]) == (0, command, "ann")
    (stored,) = in_store(sqlite_url, lambda cp: cp.list_calls("t"))
    assert stored.status == ("completed" if command == "landed" else "failed")
    again = invoke(command, sqlite_url, call_["key"][:8])
    assert (again.code, "no call under" in again.err) == (1, True)


def test_a_final_failure_is_reopened(sqlite_url: str) -> None:
    """With the thread by the first characters, else by the whole key."""

    async def fail(cp: Store) -> None:
        def refuse(_: object) -> None:
            raise ValueError("no funds")

        with pytest.raises(ValueError, match="no funds"):
            await EffectLedger(cp).run("t", "wire", {"amount": 1}, refuse)

    in_store(sqlite_url, fail)
    (stored,) = in_store(sqlite_url, lambda cp: cp.list_calls("t"))
    key = stored.call.idempotency_key
    assert invoke("reopen", sqlite_url, key[:8]).code == 1
    assert invoke("reopen", sqlite_url, "t", key[:8], "--by", "ann").code == 0
    again = invoke("reopen", sqlite_url, key)
    assert (again.code, "no final failure" in again.err) == (1, True)


def test_runs_are_listed_by_state_and_submitted(sqlite_url: str) -> None:
    """Waiting, running with its holder, due, later, and ended badly."""

    async def make(cp: Store) -> None:
        await ask(cp, 5)
        lease = thread_lease(cp, "busy", holder="worker-7")
        await lease._acquire()

        with pytest.raises(ZeroDivisionError):
            async with thread_lease(cp, "bad"):
                raise ZeroDivisionError

    in_store(sqlite_url, make)
    assert invoke("submit", sqlite_url, "due", "--event", '{"n": 1}').code == 0
    assert invoke("submit", sqlite_url, "later", "--after", "2h").code == 0
    listed = invoke("runs", sqlite_url, "--json").json["runs"]
    assert {one["thread_id"]: one["state"] for one in listed} == {
        "bad": "ended",
        "busy": "running",
        "due": "due",
        "later": "later",
        "t": "waiting",
    }
    holders = {one["thread_id"]: one["holder"] for one in listed if one["holder"]}
    assert holders == {"busy": "worker-7"}
    why = {one["thread_id"]: one["why"][0] for one in listed if one["why"]}
    assert why["bad"] == "ended: ZeroDivisionError"
    assert why["t"].startswith("asks for wire ")
    assert "worker-7" in invoke("runs", sqlite_url, "--prefix", "busy").out
    assert (
        invoke("runs", sqlite_url, "--prefix", "none").err.strip() == "no run is open"
    )
