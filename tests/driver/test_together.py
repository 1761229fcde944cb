"""Reads of one turn of the event loop share a trip."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cpkit import ToolCall, open_checkpointer
from cpkit.driver import StoreFailure
from cpkit.driver.together import Together
from tests.stores import fresh_url


class Reads:
    """Doubles numbers; fails where it is asked for a negative one."""

    def __init__(self) -> None:
        self.together = Together[int, int]()
        self.trips: list[list[int]] = []
        self.left = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def many(self, items: list[int]) -> list[int]:
        self.trips.append(items)
        self.left.set()
        await self.gate.wait()

        if min(items) < 0:
            raise StoreFailure("rejected", "negative")

        return [2 * item for item in items]

    def begin(self, *items: int) -> list[asyncio.Task[int]]:
        return [
            asyncio.create_task(self.together.read(item, self.many)) for item in items
        ]


async def test_reads_of_one_turn_share_a_trip() -> None:
    """Each gets its own answer, also for the same item; a later read has a new trip."""
    reads = Reads()
    assert await asyncio.gather(*reads.begin(1, 2, 1)) == [2, 4, 2]
    assert await asyncio.gather(*reads.begin(3)) == [6]
    assert reads.trips == [[1, 2, 1], [3]]


async def test_a_read_that_begins_during_a_trip_is_not_answered_by_it() -> None:
    """It must see what was written before it began."""
    reads = Reads()
    reads.gate.clear()
    first = reads.begin(1)
    await reads.left.wait()
    later = reads.begin(1)
    reads.gate.set()
    assert await asyncio.gather(*first, *later) == [2, 2]
    assert reads.trips == [[1], [1]]


async def test_a_failure_is_that_of_one_read() -> None:
    """The others are read again, each alone."""
    reads = Reads()
    found = await asyncio.gather(*reads.begin(1, -1, 2), return_exceptions=True)
    assert [found[0], found[2]] == [2, 4]
    assert isinstance(found[1], StoreFailure)

    with pytest.raises(StoreFailure):
        await reads.together.read(-2, reads.many)

    assert reads.trips[-1] == [-2]
    assert reads.trips.count([-2]) == 1


@pytest.mark.parametrize("cancelled", [0, 1])
@pytest.mark.parametrize("has_left", [False, True])
async def test_a_cancelled_read_disturbs_no_other(
    cancelled: int, has_left: bool
) -> None:
    """Neither the one that reads for all, nor one that waits; before or on the trip."""
    reads = Reads()
    reads.gate.clear()
    begun = reads.begin(1, 2, 3)
    await asyncio.sleep(0)

    if has_left:
        await reads.left.wait()

    begun[cancelled].cancel()
    await asyncio.sleep(0)
    reads.gate.set()
    found = await asyncio.gather(*begun, return_exceptions=True)
    assert isinstance(found.pop(cancelled), asyncio.CancelledError)
    assert found == [2 * n for n in (1, 2, 3) if n != cancelled + 1]
    assert await asyncio.gather(*reads.begin(4)) == [8]


TRIPS = {
    "sqlite": "_reader.call",
    "postgres": "_connections.fetch",
    "redis": "_server.ask",
}


@pytest.mark.parametrize("kind", TRIPS)
async def test_threads_without_messages_are_read_in_one_trip(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what a read of each alone gives."""
    async with open_checkpointer(fresh_url(kind, tmp_path)) as opened:
        cp: Any = opened
        ids = [f"t{n}" for n in range(20)]

        for n, thread_id in enumerate(ids[1:]):
            await cp.append(thread_id, [{"n": n}] * (n % 3 + 1), extra={"n": [n, "ü"]})

        await cp.append("t1", [], extra={"other": None})
        await cp.record_issued("t2", ToolCall("c", "tool", {"a": 1}, "key"))
        await cp.trim("t3", 2)
        await cp.append("t4", [{}], extra={})
        alone = [await cp.load_range(one, 0, 0) for one in ids]
        trips = 0
        owner, name = TRIPS[kind].split(".")
        make_trip = getattr(getattr(cp.store, owner), name)

        def count(*args: Any) -> Any:
            nonlocal trips
            trips += 1
            return make_trip(*args)

        monkeypatch.setattr(getattr(cp.store, owner), name, count)
        found = await asyncio.gather(*(cp.load_range(one, 0, 0) for one in ids))
        assert trips == 1

    assert found == alone
    assert found[0] is None
    assert found[2].pending[0].call.call_id == "c"
    assert (found[3].first, found[3].version) == (2, 3)
