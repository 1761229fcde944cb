"""Sizes that real threads reach: large values, many calls, long threads."""

from __future__ import annotations

import asyncio
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.concurrent import handles
from conformance.history.interrupt import cancelled_at
from cpkit import KeepsReceipts, ReadsRanges, VersionConflict

CONCURRENT = Level.CONCURRENT

LARGE = 2**16 + 1
"""Just over the 64 KiB where some column types and buffers end."""

CALLS = 130

LONG, CHUNK = 11_000, 1_000
"""Messages of the long thread, and of each append that builds it."""

APPENDS, THREADS = 650, 13

BATCH = 260


def _text(length: int) -> str:
    """Return a text in which no part is equal to another one, so that a cut is seen."""
    return "".join(f"{n}," for n in range(length // 4))[:length]


@clause("sizes.large-values", deadline=40)
async def large_values(case: Case) -> None:
    """Messages, extra, args and results of more than 64 KiB come back whole."""
    thread = case.id()

    for length in (LARGE, 5 * LARGE):
        text = _text(length)
        call = case.call(args={"text": text})
        version = await case.cp.append(thread, [{"text": text}], extra={"text": text})
        await case.cp.record_issued(thread, call)
        loaded = await case.cp.load(thread)
        assert loaded is not None
        assert loaded.messages[version - 1] == {"text": text}
        assert loaded.extra == {"text": text}
        assert loaded.pending[0].call == call

        done = await case.cp.record_result(thread, call.call_id, {"text": text})
        found = await case.cp.find_completed(call.idempotency_key)
        assert done.result == {"text": text}
        assert found == done

    await case.cp.append(thread, [{"text": text}] * 4)
    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert loaded.version == 6
    cp: Any = case.cp

    if isinstance(cp, ReadsRanges):
        assert await cp.read(thread) == loaded.messages, "read of over a megabyte"
        assert await cp.load_range(thread) == loaded, "a range of over a megabyte"


@clause("sizes.many-calls", deadline=40)
async def many_calls(case: Case) -> None:
    """A thread keeps more than a hundred pending calls, in the order of claims."""
    thread = case.id()
    calls = [case.call(args={"n": n}) for n in range(CALLS)]

    for call in calls:
        assert await case.cp.record_issued(thread, call) is None

    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert [record.call for record in loaded.pending] == calls

    for call in calls[::2]:
        await case.cp.record_result(thread, call.call_id, "done")

    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert [record.call for record in loaded.pending] == calls[1::2]


@clause("sizes.many-receipts", KeepsReceipts, deadline=40)
async def many_receipts(case: Case) -> None:
    """list_calls returns more than a hundred calls, in the order of claims."""
    thread = case.id()
    calls = [case.call(args={"n": n}) for n in range(CALLS)]

    for call in calls:
        await case.cp.record_issued(thread, call)

    for call in calls[::3]:
        await case.cp.record_result(thread, call.call_id, "done")

    listed = await case.cp.list_calls(thread)
    assert [record.call for record in listed] == calls


@clause("sizes.long-thread", deadline=60)
async def long_thread(case: Case) -> None:
    """A thread of more than ten thousand messages loads whole and in order."""
    thread = case.id()

    for first in range(0, LONG, CHUNK):
        batch = [{"n": n} for n in range(first, first + CHUNK)]
        assert await case.cp.append(thread, batch) == first + CHUNK

    loaded = await case.cp.load(thread)
    assert loaded is not None
    numbers = [message["n"] for message in loaded.messages]
    assert len(numbers) == LONG
    assert numbers == list(range(LONG))
    assert await case.cp.append(thread, [{"n": LONG}], expected_version=LONG) > LONG

    cp: Any = case.cp

    if isinstance(cp, ReadsRanges):
        for start, stop in (
            (0, 3),
            (9_990, 10_010),
            (LONG - 2, None),
            (-3, None),
            (1, 5_000),
            (0, None),
        ):
            read = [message["n"] for message in await cp.read(thread, start, stop)]
            part: Any = await cp.load_range(thread, start, stop)
            assert read == list(range(LONG + 1))[start:stop]
            assert [message["n"] for message in part.messages] == read
            assert (part.first, part.version) == (read[0], LONG + 1)


@clause("sizes.many-appends", level=CONCURRENT, deadline=60)
async def many_appends(case: Case) -> None:
    """Of many hundred appends and merges by one handle none is lost."""
    threads = [case.id() for _ in range(THREADS)]
    count = case.times(APPENDS) // THREADS

    async def use(thread: str) -> None:
        for n in range(count):
            version = await case.cp.append(thread, [{"n": n}], extra={f"key-{n}": n})
            assert version == n + 1

    await asyncio.gather(*map(use, threads))

    for thread in threads:
        loaded = await case.cp.load(thread)
        assert loaded is not None
        assert loaded.messages == [{"n": n} for n in range(count)]
        assert loaded.extra == {f"key-{n}": n for n in range(count)}


@clause("sizes.large-batch-is-one", level=CONCURRENT, deadline=60)
async def large_batch_is_one(case: Case) -> None:
    """An append of hundreds of messages is whole for a reader and after a cancel."""
    batch = [{"n": n} for n in range(BATCH)]
    extra = {"size": BATCH}

    async def is_whole(cp: Store, thread: str) -> int:
        loaded = await cp.load(thread)
        version = loaded.version if loaded else 0
        assert version in (0, BATCH)
        assert loaded is None or loaded.extra == extra
        return version

    async def watch(cp: Store, thread: str) -> None:
        while not await is_whole(cp, thread):
            pass

    async with handles(case) as cps:
        for n in range(case.times(6)):
            thread = case.id()
            readers = [asyncio.create_task(watch(cp, thread)) for cp in cps]
            await cps[n % 3].append(thread, batch, extra=extra)
            await asyncio.gather(*readers)

            try:
                await cps[0].append(thread, batch, expected_version=BATCH - 1)
            except VersionConflict:
                await is_whole(cps[1], thread)

        for suspension in range(1, 7):
            thread = case.id()
            work = case.cp.append(thread, batch, extra=extra)
            await cancelled_at(_awaited(work), suspension)
            await is_whole(case.cp, thread)
            await is_whole(cps[1], thread)


async def _awaited(work: Any) -> None:
    await work
