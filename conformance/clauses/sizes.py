"""Sizes that real threads reach: large values, many calls, long threads."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.concurrent import handles
from conformance.difference import check_equal
from conformance.history.interrupt import cancelled_at
from conformance.operations import reads_of
from conformance.sample_dumps import made_call
from cpkit import (
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    MovesThreads,
    ReadsRanges,
    ThreadInfo,
    VersionConflict,
)

CONCURRENT = Level.CONCURRENT

LARGE = 2**16 + 1
"""Just over the 64 KiB where some column types and buffers end."""

CALLS = 130

HUGE = 4_500_000
"""Characters: a batch, an answer and a dump of such values have several times that."""

LONG, MANY = 11_000, 2_000
"""Messages of the long thread, and its calls, and its keys of extra."""

RANGES: list[tuple[int, int | None]] = [
    (0, 3),
    (990, 1_010),
    (9_990, 10_010),
    (-3, None),
    (-1_500, -2),
    (1, 5_000),
    (0, None),
]

THREADS, TOGETHER = 5_000, 500
"""Threads in the store, and how many are written at once."""

APPENDS, WRITTEN = 650, 13

BATCH = 260


def _part(case: Case, size: int) -> int:
    """Return a size, or less of it where the caller wants short rounds."""
    return min(size, case.times(size))


def _text(length: int) -> str:
    """Return a text in which no part is equal to another one, so that a cut is seen."""
    return ",".join(map(str, range(length // 4)))[:length]


@clause("sizes.large-values", deadline=60)
async def large_values(case: Case) -> None:
    """Values of 64 KiB and of several MB come back whole from every read."""
    thread = case.id()
    cp = case.cp
    limits = getattr(cp, "limits", None)
    largest = _part(case, HUGE)

    if limits is not None:
        largest = min(largest, limits.max_value - 100, limits.max_append // 5)

    keys: list[str] = []

    for n, length in enumerate((LARGE, largest)):
        text = _text(length)
        done, issued = (case.call(args={"text": text}) for _ in range(2))
        keys += [done.idempotency_key, issued.idempotency_key]
        version = await cp.append(thread, [{"text": text}], extra={f"{n}": text})
        assert version == n + 1
        await cp.save_extra(thread, {f"merged {n}": text})
        await cp.record_issued(thread, done)
        answer = await cp.record_result(thread, done.call_id, {"text": text})
        check_equal(answer.result, {"text": text}, "the answer of record_result")
        await cp.record_issued(thread, issued)
        held = await cp.record_issued(thread, case.call(issued.idempotency_key))
        assert held is not None
        check_equal(held.call, issued, "the holder that a claim returns")

    texts = [_text(LARGE), text]
    await cp.append(thread, [{"text": text}] * 4)  # a batch of 18 MB
    whole = [{"text": one} for one in [*texts, *[text] * 4]]
    extra = {
        f"{word}{n}": one for n, one in enumerate(texts) for word in ("", "merged ")
    }
    await _check_large(cp, thread, keys, whole, extra)

    optional: object = cp

    if isinstance(optional, MovesThreads) and isinstance(optional, ErasesThreads):
        dump = await cp.dump_thread(thread)
        assert dump is not None
        await cp.delete_thread(thread, forget_keys=True, expected_version=6)
        await cp.restore_thread(dump)
        await _check_large(cp, thread, keys, whole, extra)


async def _check_large(
    cp: Store, thread: str, keys: list[str], messages: list[Any], extra: dict[str, str]
) -> None:
    """Check each read of a thread that has two values of each size in each place."""
    for read in reads_of(cp):
        if read.of_key:
            for n, key in enumerate(keys):
                answer = await read.run(cp, key)
                is_done = n % 2 == 0

                if is_done or read.method == "find_call":
                    text = messages[n // 2]
                    assert answer is not None, read.name
                    check_equal(answer.call.args, text, f"args in {read.name}")
                    check_equal(answer.result, text if is_done else None, read.name)

            continue

        answer = await read.run(cp, thread)

        if read.method == "read":
            check_equal(answer, messages[-len(answer) :], read.name)
            assert len(answer) in (1, 6), read.name
        elif hasattr(answer, "extra"):
            check_equal(
                list(answer.messages),
                messages[getattr(answer, "first", 0) :][: len(answer.messages)],
                read.name,
            )
            check_equal(answer.extra, extra, f"extra in {read.name}")
            calls = getattr(answer, "pending", getattr(answer, "calls", []))
            check_equal(
                [one.call.args for one in calls],
                [one for one in messages[:2] for _ in range(len(calls) // 2)],
                f"calls in {read.name}",
            )
        elif read.method == "list_calls":
            check_equal(
                [one.result for one in answer],
                [messages[0], None, messages[1], None],
                read.name,
            )


@clause("sizes.many-calls", deadline=40)
async def many_calls(case: Case) -> None:
    """A thread keeps more than a hundred calls, in the order of claims."""
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
    cp: object = case.cp

    if isinstance(cp, KeepsReceipts):
        listed = await cp.list_calls(thread)
        assert [record.call for record in listed] == calls


@clause("sizes.long-thread", deadline=90)
async def long_thread(case: Case) -> None:
    """11,000 messages of one append, and 2,000 calls, come back, move and go whole."""
    thread, long, many = case.id(), _part(case, LONG), _part(case, MANY)
    cp = case.cp
    batch = [{"n": n, "text": "x" * 50} for n in range(long)]
    assert await cp.append(thread, batch) == long
    extra: dict[str, Any] = {f"appended {n}": n for n in range(many)}
    merged: dict[str, Any] = {f"merged {n}": {"n": n} for n in range(many)}
    version = await cp.append(thread, [{"n": long}], expected_version=long, extra=extra)
    assert version == long + 1
    await cp.save_extra(thread, merged)
    whole = [*batch, {"n": long}]
    loaded = await cp.load(thread)
    assert loaded is not None
    check_equal(loaded.messages, whole, "load")
    check_equal(loaded.extra, {**extra, **merged}, "extra of a load")

    if isinstance(cp, ReadsRanges):
        for start, stop in RANGES:
            read = await cp.read(thread, start, stop)
            part = await cp.load_range(thread, start, stop)
            assert part is not None
            check_equal(read, whole[start:stop], f"read of [{start}:{stop}]")
            check_equal(part.messages, read, f"load_range of [{start}:{stop}]")
            assert part.version == long + 1
            assert not read or part.first == read[0]["n"]

    if isinstance(cp, MovesThreads):
        await _move_long(case, thread, whole)

    if isinstance(cp, ErasesThreads):
        await cp.delete_thread(thread, expected_version=len(whole))
        assert await cp.load(thread) is None
        assert await cp.append(thread, [{"n": 0}], expected_version=0) == 1


async def _move_long(case: Case, thread: str, whole: list[Any]) -> None:
    """Move a long thread, with calls and extra, and delete it."""
    cp, moved, many = case.cp, case.id(), _part(case, MANY)
    dump = await cp.dump_thread(thread)
    assert dump is not None
    calls = [
        made_call(moved, ("issued", "completed", "failed")[n % 3], result={"n": n})
        for n in range(many)
    ]
    extra: dict[str, Any] = {f"key-{n}": {"n": n} for n in range(many)}
    given = replace(dump, thread_id=moved, calls=calls, extra=extra)
    await cp.restore_thread(given)
    last = case.call()
    assert await cp.record_issued(moved, last) is None
    seen = await cp.dump_thread(moved)
    loaded = await cp.load(moved)
    assert seen is not None
    assert loaded is not None
    check_equal(list(seen.messages), whole, "messages of a dump")
    check_equal(seen.extra, extra, "extra of a dump")
    check_equal(list(seen.calls)[:-1], calls, "calls of a dump")
    pending = [one for one in calls if one.status == "issued"]
    check_equal(loaded.pending[:-1], pending, "pending")
    assert (loaded.pending[-1].call, seen.calls[-1].call) == (last, last)

    if isinstance(cp, KeepsReceipts):
        check_equal((await cp.list_calls(moved))[:-1], calls, "list_calls")

    for n in (0, 1, many // 2, many - 1):
        holder = await cp.record_issued(
            thread, case.call(calls[n].call.idempotency_key)
        )
        free = calls[n].status == "failed"
        assert (holder is None) if free else (holder == calls[n]), f"key {n}"

    if isinstance(cp, ErasesThreads):
        await cp.delete_thread(moved, expected_version=len(whole))
        assert await cp.load(moved) is None
        erased = [
            replace(one, call=replace(one.call, args={}), result=None, erased=True)
            for one in calls
        ]

        if isinstance(cp, KeepsReceipts):
            check_equal((await cp.list_calls(moved))[:-1], erased, "erased calls")

        done = next(one for one in reversed(erased) if one.status == "completed")
        found = await cp.find_completed(done.call.idempotency_key)
        check_equal(found, done, "find_completed of an erased call")
        await cp.delete_thread(moved, forget_keys=True)

        for n in (0, many // 2, many - 1):
            key = calls[n].call.idempotency_key
            assert await cp.find_completed(key) is None, f"key {n}, forgotten"


@clause("sizes.many-threads", ListsThreads, deadline=90)
async def many_threads(case: Case) -> None:
    """Pages see each of 5,000 threads."""
    token, count = case.id("t"), case.times(THREADS)
    threads = sorted(f"{token}-{n:05}" for n in range(count))
    cp = case.cp

    for start in range(0, count, TOGETHER):
        await asyncio.gather(
            *(cp.append(one, [{"n": 1}]) for one in threads[start : start + TOGETHER])
        )

    for limit in (count + 1, count // 3, 100):
        seen: list[str] = []
        page: list[ThreadInfo] = []

        while page or not seen:
            after = seen[-1] if seen else None
            page = await cp.list_threads(prefix=token, after=after, limit=limit)
            seen += [info.thread_id for info in page]
            expected = min(limit, count - len(seen) + len(page))
            assert len(page) == expected, f"a page of {limit} after {after!r}"

        check_equal(seen, threads, f"pages of {limit}")


@clause("sizes.many-appends", level=CONCURRENT, deadline=60)
async def many_appends(case: Case) -> None:
    """Of many hundred appends and merges by one handle none is lost."""
    threads = [case.id() for _ in range(WRITTEN)]
    count = case.times(APPENDS) // WRITTEN

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
