"""``cpkit prune``: whole threads that nobody has touched for long."""

from __future__ import annotations

from typing import Any

import pytest

from cpkit.cli.prune import duration
from cpkit.cli.stores import Store
from tests.cli.command import call, cpkit, in_store, invoke
from tests.cli.stocked import stock


async def ids(cp: Store) -> list[str]:
    return [one.thread_id for one in await cp.list_threads()]


async def paid(cp: Store) -> Any:
    found = await cp.find_completed("paid")
    return found and found.erased


def test_old_threads_are_deleted_and_paid_stays_paid(url: str) -> None:
    """A dry run only counts; keys are kept; what waits is kept; then all is done."""

    async def fill(cp: Store) -> None:
        await cp.append("old", [{"n": 1}, {"n": 2}])
        await call(cp, "old", "c", "paid", success=True)
        await call(cp, "waits", "c", "open")
        await cp.append("cpkit:ours", [{"n": 1}])

    in_store(url, fill)
    everybody = ["cpkit:ours", "old", "waits"]
    young = cpkit("prune", url, "--older-than", "1d", "--yes")
    assert young.out == "deleted 0 threads with 0 messages\n"

    dry = invoke("prune", url, "--older-than", "0s", "--dry-run", "--json").json
    assert (dry["threads"], dry["messages"], dry["pending"]) == (1, 2, ["waits"])
    assert in_store(url, ids) == everybody

    unsure = cpkit("prune", url, "--older-than", "0s")
    assert unsure.code == 2
    assert "say --yes" in unsure.err
    assert in_store(url, ids) == everybody

    ended = cpkit("prune", url, "--older-than", "0s", "--yes")
    assert ended.code == 0
    assert "deleted 1 threads with 2 messages\nkept 1 with pending calls" in ended.out
    assert in_store(url, ids) == ["cpkit:ours", "waits"]
    assert in_store(url, paid) is True

    words = ["prune", url, "--older-than", "0s", "--yes"]
    assert invoke(*words, "--with-pending", "--prefix", "w").code == 0
    assert invoke(*words, "--prefix", "cpkit:").code == 0
    assert in_store(url, ids) == []


def test_keys_are_forgotten_on_request(sqlite_url: str) -> None:
    """What was paid can be paid again."""
    in_store(sqlite_url, stock)
    words = ["prune", sqlite_url, "--older-than", "0s", "--yes", "--with-pending"]
    assert invoke(*words, "--forget-keys").code == 0
    assert in_store(sqlite_url, paid) is None


async def test_what_is_touched_meanwhile_is_kept() -> None:
    """A thread is looked at again right before it is deleted."""
    from datetime import UTC, datetime, timedelta

    from cpkit import open_checkpointer
    from cpkit.cli.prune import _walk

    async with open_checkpointer("memory://") as opened:
        cp: Any = opened
        await cp.append("a", [{"n": 1}])
        await cp.append("b", [{"n": 1}])
        lists = cp.list_calls

        async def meanwhile(thread_id: str) -> Any:
            if thread_id == "a":
                await cp.append("a", [{"n": 2}])

            return await lists(thread_id)

        cp.list_calls = meanwhile
        before = datetime.now(UTC) + timedelta(days=1)
        pruned = await _walk(cp, "", before, False, False)
        assert (pruned.threads, pruned.touched) == (1, ["a"])
        assert await ids(cp) == ["a"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30d", 2_592_000), ("12h", 43_200), ("5 min", 300), ("2W", 1_209_600), ("0s", 0)],
)
def test_times_are_read(text: str, seconds: int) -> None:
    """A number and a unit."""
    assert duration(text).total_seconds() == seconds
