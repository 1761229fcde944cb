"""``cpkit prune``: delete threads that were not written to for some time."""

from __future__ import annotations

from typing import Any

import pytest

from cpkit.cli.prune import duration
from cpkit.cli.stores import Store
from cpkit.effects import EffectLedger, EffectTimeout
from tests.cli.command import call, in_store, invoke, run_main
from tests.cli.stocked import stock


async def ids(cp: Store) -> list[str]:
    return [one.thread_id for one in await cp.list_threads()]


async def paid(cp: Store) -> Any:
    found = await cp.find_completed("paid")
    return found and found.erased


def test_old_threads_are_deleted_and_their_keys_are_kept(url: str) -> None:
    """A dry run only counts; threads with pending calls are kept."""

    async def fill(cp: Store) -> None:
        await cp.append("old", [{"n": 1}, {"n": 2}])
        await call(cp, "old", "c", "paid", success=True)
        await call(cp, "waits", "c", "open")
        await cp.append("cpkit:internal", [{"n": 1}])

    in_store(url, fill)
    every_id = ["cpkit:internal", "old", "waits"]
    young = invoke("prune", url, "--older-than", "1d", "--yes")
    assert young.out == "deleted 0 threads with 0 messages\n"

    dry = invoke("prune", url, "--older-than", "0s", "--dry-run", "--json").json
    assert (dry["threads"], dry["messages"], dry["pending"]) == (1, 2, ["waits"])
    said = invoke("prune", url, "--older-than", "0s", "--dry-run").out
    assert said.startswith("would delete 1 thread with 2 messages (14 bytes of JSON)\n")
    assert in_store(url, ids) == every_id

    unsure = invoke("prune", url, "--older-than", "0s")
    assert unsure.code == 2
    assert "add --yes" in unsure.err
    assert in_store(url, ids) == every_id

    ended = invoke("prune", url, "--older-than", "0s", "--yes")
    assert ended.code == 0
    assert "deleted 1 thread with 2 messages\nkept 1 with pending calls" in ended.out
    assert in_store(url, ids) == ["cpkit:internal", "waits"]
    assert in_store(url, paid) is True

    words = ["prune", url, "--older-than", "0s", "--yes"]
    assert invoke(*words, "--with-pending", "--prefix", "w").code == 0
    assert invoke(*words, "--prefix", "cpkit:").code == 0
    assert in_store(url, ids) == []


def test_keys_are_forgotten_on_request(sqlite_url: str) -> None:
    """The key of a completed call is free again."""
    in_store(sqlite_url, stock)
    words = ["prune", sqlite_url, "--older-than", "0s", "--yes", "--with-pending"]
    assert invoke(*words, "--forget-keys").code == 0
    assert in_store(sqlite_url, paid) is None


def test_a_thread_whose_approval_waits_for_a_worker_is_kept(sqlite_url: str) -> None:
    """It has no pending call; its run is open, and the list of runs has it."""

    async def approve(cp: Store) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)

        with pytest.raises(EffectTimeout):
            await ledger.run("t", "wire", {"amount": 1}, lambda _: None)

        (request,) = await ledger.requests()
        assert await ledger.approve(request.key)

    in_store(sqlite_url, approve)
    words = ["prune", sqlite_url, "--older-than", "0s", "--yes"]
    assert "kept 1" in invoke(*words).out
    assert "t" in in_store(sqlite_url, ids)


def test_a_long_conversation_is_cut(url: str) -> None:
    """The last messages stay, from the begin of a turn on; the calls stay."""

    async def fill(cp: Store) -> None:
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        await cp.append("t", turn * 5)
        await call(cp, "t", "c", "open")

    in_store(url, fill)
    words = ["prune", url, "--keep-last", "3"]
    dry = invoke(*words, "--dry-run").out
    assert dry == "would delete the first 6 messages of 1 thread (189 bytes of JSON)\n"
    assert invoke(*words, "--yes").out == "deleted the first 6 messages of 1 thread\n"
    data = in_store(url, lambda cp: cp.load("t"))
    assert data is not None
    assert (data.first, data.version, len(data.pending)) == (6, 10, 1)
    assert invoke(*words, "--yes").out == "deleted 0 threads with 0 messages\n"


def test_a_policy_is_needed(sqlite_url: str) -> None:
    """Without one, nothing goes."""
    in_store(sqlite_url, stock)
    ended = run_main("prune", sqlite_url, "--yes")
    assert ended.code == 2
    assert "say what may go: --older-than, --keep-last" in ended.err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30d", 2_592_000), ("12h", 43_200), ("5 min", 300), ("2W", 1_209_600), ("0s", 0)],
)
def test_a_duration_is_parsed(text: str, seconds: int) -> None:
    """A duration is a number and a unit."""
    assert duration(text).total_seconds() == seconds


def test_a_damaged_thread_is_kept_and_does_not_hide_the_others(
    damaged_url: str,
) -> None:
    """Its pending calls are unknown. The command names it, and exits with 1."""
    in_store(damaged_url, lambda cp: cp.append("last", [{}]))
    ended = invoke("prune", damaged_url, "--older-than", "0s", "--yes", "--json")
    assert ended.code == 1
    assert ended.err.startswith("kept: thread 'broken' is corrupt at call")
    assert ended.json["threads"] == 1
    assert ended.json["pending"] == ["a", "c"]

    # A person who deletes pending calls too deletes the damage with them.
    both = invoke(
        "prune", damaged_url, "--older-than", "0s", "--with-pending", "-y", "--json"
    )
    assert (both.code, both.json["threads"]) == (0, 3)
