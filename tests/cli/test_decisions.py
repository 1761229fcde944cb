"""``pending``, ``approve`` and ``deny``, with an agent in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cpkit.cli.stores import Store
from cpkit.effects import EffectLedger, EffectTimeout
from tests.cli.command import call, cpkit, environment, in_store, invoke, table
from tests.stores import quick_on


@contextmanager
def agent(url: str, thread: str, amount: int) -> Iterator[subprocess.Popen[str]]:
    """Run an agent in another process, and kill it afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.agent", url, thread, str(amount)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )

    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
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
    with agent(url, "t", 7) as process:
        key = line(process).removeprefix("asked ")
        listed = cpkit("pending", url)
        assert table(listed.out)[0][:4] == ["t", key[:12], "approval", "wire"]
        assert '"amount": 7' in listed.out

        ended = cpkit("approve", url, key[:8], "--by", "anna")
        assert (ended.code, ended.err) == (0, "")
        assert ended.out == f"approved (by anna): wire {key}\n"
        assert line(process) == "ran 7"

    again = invoke("approve", url, key, "--by", "bob", "--json")
    assert (again.code, again.json["by"]) == (0, "anna")
    late = invoke("deny", url, key)
    assert late.code == 1
    assert late.err == "the request was already approved by anna\n"
    assert invoke("pending", url).err == "nothing is pending\n"


@pytest.mark.parametrize("url", quick_on("sqlite"), indirect=True)
def test_a_denied_effect_never_runs(url: str) -> None:
    """The agent receives the reason, and a later approval is refused."""
    with agent(url, "t", 7) as process:
        key = line(process).removeprefix("asked ")
        ended = cpkit("deny", url, "t", key, "--reason", "too much", "--json")
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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_decision_that_cannot_be_printed_is_stored(sqlite_url: str) -> None:
    """Standard error says so, and a second command decides nothing new."""
    in_store(sqlite_url, lambda cp: ask(cp, 1))
    (waiting,) = invoke("pending", sqlite_url, "--json").json["pending"]

    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cpkit", "approve", sqlite_url, waiting["key"]],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )

    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        b"approved: the decision is stored",
        b"standard output: No space left on device",
    ]
    assert invoke("deny", sqlite_url, waiting["key"]).code == 1
