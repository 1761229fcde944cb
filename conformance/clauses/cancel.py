"""Cancellation: a cancelled operation is applied wholly or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.concurrent import handles
from conformance.history.interrupt import cancelled_after, cancelled_at
from conformance.history.linear import check_linearizable
from conformance.history.models import KEY, THREAD
from conformance.history.recorder import Recorder
from conformance.leftovers import Leftovers
from conformance.sample_dumps import made_call, made_dump
from cpkit import MovesThreads, ThreadDump, VersionConflict

CONCURRENT = Level.CONCURRENT

Work = Coroutine[Any, Any, Any]


async def _moments(
    case: Case, sample: Callable[[], Work]
) -> list[Callable[[Work], Awaitable[bool]]]:
    """Return ways to cancel an operation: at its n-th await, or after some time."""
    start = time.perf_counter()
    await sample()
    usual = time.perf_counter() - start
    awaits = range(1, case.times(5) + 1)
    times = [usual * 1.5 * case.random.random() for _ in range(case.times(12))]
    return [
        *(partial(cancelled_at, suspension=n) for n in awaits),
        *(partial(cancelled_after, seconds=seconds) for seconds in times),
    ]


@clause("cancel.append-is-whole", level=CONCURRENT)
async def append_is_whole(case: Case) -> None:
    """A cancelled append adds all of its messages or none; the next append works."""
    thread = case.id()
    mine, calm = Recorder(case.cp, "cancelled"), Recorder(case.cp, "next")

    async def sample() -> None:
        await calm.append(thread, ["sample.1", "sample.2"])

    for n, cancel in enumerate(await _moments(case, sample), 1):
        tokens = [f"batch.{n}.{i}" for i in range(4)]
        await cancel(mine.append(thread, tokens))
        await calm.append(thread, [f"next.{n}"])
        await calm.load(thread)

    await calm.load(thread)
    check_linearizable(THREAD, [*mine.history, *calm.history])


@clause("cancel.append-with-extra-is-whole", level=CONCURRENT)
async def append_with_extra_is_whole(case: Case) -> None:
    """A cancelled append writes both its messages and its extra, or neither."""
    thread = case.id()
    mine, calm = Recorder(case.cp, "cancelled"), Recorder(case.cp, "next")

    async def sample() -> None:
        await calm.append(thread, ["sample.1"], extra={"a": "sample.1"})

    for n, cancel in enumerate(await _moments(case, sample), 1):
        extra = dict.fromkeys("ab", f"batch.{n}")
        await cancel(mine.append(thread, [f"batch.{n}.1", f"batch.{n}.2"], extra=extra))
        await calm.load(thread)
        await calm.append(thread, [f"next.{n}"], extra={"b": f"next.{n}"})
        await calm.load(thread)

    check_linearizable(THREAD, [*mine.history, *calm.history])


@clause("cancel.merge-is-whole", level=CONCURRENT)
async def merge_is_whole(case: Case) -> None:
    """A cancelled merge writes all of its keys or none; the next merge works."""
    thread = case.id()
    mine, calm = Recorder(case.cp, "cancelled"), Recorder(case.cp, "next")

    async def sample() -> None:
        await calm.save_extra(thread, {"a": "sample.0"})

    for n, cancel in enumerate(await _moments(case, sample), 1):
        extra = dict.fromkeys("abcd", f"merge.{n}")
        await cancel(mine.save_extra(thread, extra))
        await calm.load(thread)
        await calm.save_extra(thread, {"e": f"next.{n}"})

    await calm.load(thread)
    check_linearizable(THREAD, [*mine.history, *calm.history])


@clause("cancel.claim-is-whole", level=CONCURRENT)
async def claim_is_whole(case: Case) -> None:
    """A cancelled claim either holds its key or not, and every caller sees the same."""
    thread = case.id()
    mine, calm = Recorder(case.cp, "cancelled"), Recorder(case.cp, "next")

    async def sample() -> None:
        await calm.record_issued(thread, "sample.0", case.id("key"))

    for n, cancel in enumerate(await _moments(case, sample), 1):
        key, call_id = case.id("key"), f"call.{n}"
        await cancel(mine.record_issued(thread, call_id, key))
        await calm.record_issued(thread, f"other.{n}", key)
        await calm.record_issued(thread, call_id, key)
        await calm.record_result(thread, call_id, key, f"result.{n}", success=True)
        await calm.find_completed(key)

    check_linearizable(KEY, [*mine.history, *calm.history])


@clause("cancel.result-is-whole", level=CONCURRENT)
async def result_is_whole(case: Case) -> None:
    """A cancelled result is stored or not; the next result gets the stored record."""
    thread = case.id()
    mine, calm = Recorder(case.cp, "cancelled"), Recorder(case.cp, "next")

    async def sample() -> None:
        key = case.id("key")
        await calm.record_issued(thread, "call.0", key)
        await calm.record_result(thread, "call.0", key, "result.0", success=True)

    for n, cancel in enumerate(await _moments(case, sample), 1):
        key, call_id = case.id("key"), f"call.{n}"
        await calm.record_issued(thread, call_id, key)
        await cancel(
            mine.record_result(thread, call_id, key, f"mine.{n}", success=n % 2 == 0)
        )
        await calm.record_result(thread, call_id, key, f"next.{n}", success=True)
        await calm.record_issued(thread, f"other.{n}", key)
        await calm.find_completed(key)

    check_linearizable(KEY, [*mine.history, *calm.history])


@clause("cancel.restore-is-whole", MovesThreads, level=CONCURRENT)
async def restore_is_whole(case: Case) -> None:
    """A cancelled restore creates the whole thread or nothing."""

    def dump() -> ThreadDump:
        thread = case.id()
        calls = [made_call(thread, "completed", result=n) for n in range(5)]
        return made_dump(thread, *calls)

    for cancel in await _moments(case, lambda: case.cp.restore_thread(dump())):
        given = dump()
        await cancel(case.cp.restore_thread(given))
        stored = await case.cp.dump_thread(given.thread_id)
        found = await case.cp.find_completed(given.calls[-1].call.idempotency_key)
        assert stored in (None, given)
        assert (found is None) == (stored is None)

        if stored is None:
            await case.cp.restore_thread(given)
            assert await case.cp.dump_thread(given.thread_id) == given


@clause("cancel.reads-do-no-harm", level=CONCURRENT)
async def reads_do_no_harm(case: Case) -> None:
    """After a cancelled read the handle works and returns the stored thread."""
    thread, key = case.id(), case.id("key")
    await case.cp.append(thread, [{"n": n} for n in range(50)])
    expected = await case.cp.load(thread)

    async def sample() -> None:
        await case.cp.load(thread)

    for cancel in await _moments(case, sample):
        await cancel(case.cp.load(thread))
        await cancel(case.cp.find_completed(key))
        loaded = await case.cp.load(thread)
        assert loaded == expected


@clause("cancel.retry-cannot-duplicate", level=CONCURRENT)
async def retry_cannot_duplicate(case: Case) -> None:
    """Repeating a cancelled append with the same expected version writes it once."""
    thread = case.id()

    async def sample() -> None:
        await case.cp.append(thread, [{"n": 0}])

    for n, cancel in enumerate(await _moments(case, sample), 1):
        message = {"n": n}
        await cancel(case.cp.append(thread, [message], expected_version=n))

        with suppress(VersionConflict):
            await case.cp.append(thread, [message], expected_version=n)

        loaded = await case.cp.load(thread)
        assert loaded is not None
        assert [m["n"] for m in loaded.messages] == list(range(n + 1))


@clause("cancel.blocks-nobody", level=CONCURRENT)
async def blocks_no_writer(case: Case) -> None:
    """After a cancelled write every handle can write that thread and key at once."""
    thread, key = case.id(), case.id("key")

    async def write(cp: Store, n: int) -> None:
        await cp.append(thread, [{"n": n}])
        await cp.save_extra(thread, {"n": n})
        await cp.record_issued(thread, case.call(key))

    async def sample() -> None:
        await write(case.cp, 0)

    async with handles(case) as cps:
        for cancel in await _moments(case, sample):
            await cancel(write(cps[0], 1))

            for cp in cps:
                await write(cp, 2)


CANCELS, AT_ONCE = 300, 12


async def _cancel_many(case: Case, cp: Store) -> None:
    """Cancel hundreds of operations at different awaits, several at a time."""
    thread = case.id()
    await cp.append(thread, [{"n": 0}] * 20)

    def operation(n: int) -> Work:
        return (
            lambda: cp.append(thread, [{"n": n}]),
            lambda: cp.save_extra(thread, {"n": n}),
            lambda: cp.record_issued(thread, case.call()),
            lambda: cp.load(thread),
            lambda: cp.find_completed(case.id("key")),
        )[n % 5]()

    for start in range(0, case.times(CANCELS), AT_ONCE):
        await asyncio.gather(
            *(
                cancelled_at(operation(n), 1 + n // 5 % 3)
                for n in range(start, start + AT_ONCE)
            )
        )


@clause("cancel.hundreds-on-one-handle", level=CONCURRENT, deadline=40)
async def hundreds_on_one_handle(case: Case) -> None:
    """After hundreds of cancelled operations a handle works as before."""
    await _cancel_many(case, case.cp)
    threads = [case.id() for _ in range(60)]
    versions = await asyncio.gather(
        *(case.cp.append(thread, [{"n": 1}]) for thread in threads)
    )
    loaded = await asyncio.gather(*(case.cp.load(thread) for thread in threads))
    assert versions == [1] * 60
    assert all(one is not None and one.messages == [{"n": 1}] for one in loaded)


@clause("cancel.leaves-nothing-open", level=CONCURRENT, deadline=60)
async def leaves_nothing_open(case: Case) -> None:
    """A closed handle leaves no task, thread, file, socket or server connection."""
    async with case.open() as first:
        await _cancel_many(case, first)  # what the first use of a module keeps

    leftovers = Leftovers(case.harness)
    await leftovers.start()

    async with case.open() as cp:
        await _cancel_many(case, cp)

    await leftovers.check()


@clause("cancel.some-of-many", level=CONCURRENT)
async def some_of_many(case: Case) -> None:
    """When some concurrent appends are cancelled, the others are stored as returned."""
    thread = case.id()
    batches = [[{"n": n, "i": i} for i in range(3)] for n in range(60)]
    tasks = [asyncio.create_task(case.cp.append(thread, batch)) for batch in batches]

    for task in case.random.sample(tasks, 30):
        for _ in range(case.random.randint(0, 3)):
            await asyncio.sleep(0)

        task.cancel()

    answers = await asyncio.gather(*tasks, return_exceptions=True)
    loaded = await case.cp.load(thread)
    messages = [] if loaded is None else loaded.messages

    for answer, batch in zip(answers, batches, strict=True):
        if isinstance(answer, int):
            assert messages[answer - 3 : answer] == batch, "an acknowledged append"
        else:
            assert isinstance(answer, asyncio.CancelledError)

    stored = [messages[i : i + 3] for i in range(0, len(messages), 3)]
    assert all(stored.count(batch) <= 1 for batch in batches)
    assert all(batch in batches for batch in stored)


@clause("cancel.is-not-swallowed", level=CONCURRENT)
async def is_not_swallowed(case: Case) -> None:
    """An operation that is cancelled while it waits raises CancelledError."""
    thread = case.id()
    swallowed = 0

    for n in range(20):
        waited = False

        async def work(n: int = n) -> None:
            await case.cp.append(thread, [{"n": n}])

        task = asyncio.create_task(work())
        await asyncio.sleep(0)

        if not task.done():
            waited = task.cancel()

        await asyncio.wait([task])
        swallowed += waited and not task.cancelled()

    # The answer may arrive in the same loop turn as the cancellation.
    assert swallowed < 10


@clause("cancel.while-closing", level=CONCURRENT)
async def while_closing(case: Case) -> None:
    """A close that is cancelled still closes the handle and leaves no task behind."""
    before = asyncio.all_tasks()

    async def use() -> None:
        async with case.open() as cp:
            await cp.append(case.id(), [{"n": 0}])

    for cancel in await _moments(case, use):
        await cancel(use())

    left = asyncio.all_tasks() - before

    if left:
        _, left = await asyncio.wait(left, timeout=5)

    assert not left


@clause("cancel.while-opening", level=CONCURRENT)
async def while_opening(case: Case) -> None:
    """After a cancelled open the store opens and works."""
    thread = case.id()

    async def use() -> None:
        async with case.open() as cp:
            await cp.append(thread, [{"n": 0}])

    for n, cancel in enumerate(await _moments(case, use), 1):
        await cancel(use())
        version = await case.cp.append(thread, [{"n": n}])
        assert version >= n

    async with case.open() as cp:
        await cp.append(thread, [{"n": 0}])
