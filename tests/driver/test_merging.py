"""Appends of one batch to one thread reach the store as one, if it asks for that."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from cpkit import BackendUnavailable
from cpkit.driver import Append, Batching, Limits, Merge, StoreFailure, Write
from cpkit.driver.merging import merge_appends
from cpkit.memory import MemoryStore
from tests.driver.gated import GatedStore, handle, run_ready_tasks

MERGES = Batching(merges_appends=True)


def append(thread: str, *bodies: bytes, at: int | None = None, **extra: str) -> Append:
    items = [(b'"%b"' % key.encode(), value.encode()) for key, value in extra.items()]
    return Append(thread, list(bodies), at, items)


async def test_each_caller_gets_the_version_after_its_own_messages() -> None:
    """The store sees one append for each thread; extra's later values count."""
    store = GatedStore(open_gate=False, batching=MERGES)

    async with handle(store) as cp:
        first = asyncio.create_task(cp.append("t", [{"n": 0}]))
        await run_ready_tasks()
        others = [
            cp.append("t", [{"n": 1}, {"n": 2}], extra={"a": 1, "b": 1}),
            cp.append("other", [{}]),
            cp.append("t", []),
            cp.append("t", [{"n": 3}], extra={"b": 2}),
        ]
        tasks = [asyncio.create_task(other) for other in others]
        await run_ready_tasks()
        store.gate.release()
        store.gate.release()
        assert await asyncio.gather(first, *tasks) == [1, 3, 1, 3, 4]
        data = await cp.load("t")

    assert data is not None
    assert data.messages == [{"n": n} for n in range(4)]
    assert data.extra == {"a": 1, "b": 2}
    assert store.sizes() == [1, 2]


@pytest.mark.parametrize(
    ("batch", "places"),
    [
        ([append("t", b"1"), append("t", b"2")], [0, 0]),
        ([append("t", b"1"), append("u", b"2"), append("t", b"3")], [0, 1, 0]),
        ([append("t"), append("t", b"1"), append("t")], [0, 0, 0]),
        # An expected version must be compared with what is stored then.
        ([append("t", b"1"), append("t", b"2", at=1), append("t", b"3")], [0, 1, 2]),
        ([append("t", b"1"), Merge("t", []), append("t", b"2")], [0, 1, 2]),
        ([append("t", b"1"), Merge("u", []), append("t", b"2")], [0, 1, 0]),
        # The store's limit of one append, here 4 bytes, holds for a merged one.
        ([append("t", b"12"), append("t", b"34"), append("t", b"5")], [0, 0, 1]),
        ([append("t", b"12345"), append("t", b"6")], [0, 1]),
    ],
)
def test_only_neighbours_of_one_thread_are_merged(
    batch: list[Write], places: list[int]
) -> None:
    """What the callers gave is not changed: it is needed where a batch is divided."""
    before = [write._replace() for write in batch]
    assert list(merge_appends(batch, 4).places) == places
    assert batch == before


@pytest.mark.parametrize("seed", range(20))
async def test_a_merged_batch_has_the_outcomes_of_its_writes(seed: int) -> None:
    """And the store ends in the same state."""
    chance = random.Random(seed)
    batch: list[Write] = []

    for number in range(40):
        thread = chance.choice("abc")
        bodies = [b'{"n":%d}' % number] * chance.randrange(3)
        at = chance.randrange(8) if chance.random() < 0.2 else None
        extra = {chance.choice("xy"): str(number)} if chance.random() < 0.3 else {}

        if chance.random() < 0.1:
            batch.append(Merge(thread, [(b'"x"', b"%d" % number)]))
        else:
            batch.append(append(thread, *bodies, at=at, **extra))

    one_by_one, merging = MemoryStore(), MemoryStore()
    merged = merge_appends(batch, 100)
    assert len(merged.writes) < len(batch)
    expected = await one_by_one.commit(batch)
    found = merged.split(batch, await merging.commit(merged.writes))
    assert found == expected

    for thread in "abc":
        one, other = await one_by_one.dump(thread), await merging.dump(thread)
        assert one is not None
        assert other is not None
        assert (one.bodies, dict(one.items)) == (other.bodies, dict(other.items))


async def test_one_refused_append_does_not_refuse_those_it_was_merged_with() -> None:
    """The batch is committed again write by write."""

    class Picky(GatedStore):
        limits = Limits()

        async def commit(self, batch: Any) -> Any:
            if any(b'"bad"' in body for write in batch for body in write.bodies):
                raise StoreFailure("rejected", "value is bad")

            return await super().commit(batch)

    store = Picky(batching=MERGES)

    async with handle(store) as cp:
        found = await asyncio.gather(
            *(cp.append("t", [{"x": text}]) for text in ("a", "bad", "b")),
            return_exceptions=True,
        )

    assert found[::2] == [1, 2]
    assert isinstance(found[1], BackendUnavailable)
