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
from conformance.difference import check_equal
from conformance.failure import Failure
from conformance.history.interrupt import cancelled_after, cancelled_at
from conformance.leftovers import Leftovers
from conformance.operations import (
    Place,
    Read,
    Write,
    prepare,
    reads_of,
    state,
    writes_of,
)
from cpkit import ErasesThreads, KeyTaken, UnknownCall, VersionConflict

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


@clause("cancel.reads-do-no-harm", level=CONCURRENT)
async def reads_do_no_harm(case: Case) -> None:
    """After any cancelled read the handle works and returns what is stored."""
    place = await prepare(case.cp, Place(case.id("p")))
    expected = await state(case.cp, place)

    for read in reads_of(case.cp):
        one = place.keys[1] if read.of_key else place.thread

        async def look(read: Read = read, one: str = one) -> None:
            await read.run(case.cp, one)

        for cancel in (await _moments(case, look))[
            :: 1 if read.method == "load" else 4
        ]:
            await cancel(look())
            await look()

        check_equal(await state(case.cp, place), expected, f"after {read.name}")


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


@clause("cancel.blocks-nobody", level=CONCURRENT, deadline=40)
async def blocks_no_writer(case: Case) -> None:
    """After a cancelled write of any kind every handle can write its thread and key."""

    async def next_writes(cp: Store, thread: str, key: str) -> None:
        await cp.append(thread, [{"n": 5}])
        await cp.save_extra(thread, {"next": 1})
        await cp.record_issued(thread, case.call(key))

        if isinstance(cp, ErasesThreads):
            await cp.delete_thread(thread)

    async with handles(case) as cps:
        for write in writes_of(case.cp):
            for n in range(case.times(8)):
                place = await prepare(cps[0], Place(case.id("p")), write)
                await cancelled_at(_do(cps[0], write, place), (1, 2, 1, 3)[n % 4])
                key = place.keys[
                    3 if write.at != "thread" or "claim" in write.name else 2
                ]

                for cp in cps:
                    await next_writes(cp, getattr(place, write.at), key)


EACH, AT_ONCE = 250, 4
"""Cancellations of each method, and how many happen at the same time.

No more than a small pool has connections: who waits for one takes none away.
"""


async def _cancel_many(case: Case, cp: Store, each: int) -> None:
    """Cancel each method so many times, at different awaits, in all of its ways."""
    place = await prepare(cp, Place(case.id("p")))
    ways: dict[str, list[Callable[[int], Work]]] = {}

    for read in reads_of(cp):
        ways.setdefault(read.method, []).append(partial(_read, cp, read, place))

    # Last, because its writes make a thread that takes longer to read.
    ways["append"] = ways.pop("append")

    for write in writes_of(cp):
        ways.setdefault(write.method, []).append(partial(_write, cp, write, place))

    async def cancel(uses: list[Callable[[int], Work]], n: int) -> None:
        use = uses[n // 3 % len(uses)]
        await cancelled_at(use(n), (1, 1, 2, 1, 1, 3)[n % 6])

    for uses in ways.values():
        for start in range(0, each, AT_ONCE):
            numbers = range(start, start + AT_ONCE)
            await asyncio.gather(*(cancel(uses, n) for n in numbers))


async def _read(cp: Store, read: Read, place: Place, _: int) -> None:
    await read.run(cp, place.keys[1] if read.of_key else place.thread)


async def _write(cp: Store, write: Write, place: Place, n: int) -> None:
    """Do a write; others may have done it or have deleted its thread."""
    with suppress(VersionConflict, UnknownCall, KeyTaken):
        await write.do(cp, Place(f"{place.token}.{n}") if n % 2 else place)


@clause("cancel.hundreds-on-one-handle", level=CONCURRENT, deadline=60)
async def hundreds_on_one_handle(case: Case) -> None:
    """After hundreds of cancellations of each operation a handle works as before."""
    await _cancel_many(case, case.cp, case.times(4 * EACH))
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
        # What a module keeps of its first use, and an engine until it is used again.
        await _cancel_many(case, first, case.times(EACH))

    # An engine may keep one more for the next handle; a leak grows with each of them.
    for is_last in (False, True):
        leftovers = Leftovers(case.harness)
        await leftovers.start()

        async with case.open() as cp:
            await _cancel_many(case, cp, case.times(EACH))

        try:
            await leftovers.check()
            return
        except Failure:
            if is_last:
                raise


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


@clause("cancel.is-not-swallowed", level=CONCURRENT, deadline=40)
async def is_not_swallowed(case: Case) -> None:
    """Every operation that is cancelled while it waits raises CancelledError."""
    cp, tries = case.cp, 10
    made = [Place(case.id("p")) for _ in range(tries)]
    await asyncio.gather(*(prepare(cp, place) for place in made))
    works: list[tuple[str, list[Callable[[], Work]]]] = [
        (read.name, [partial(_read, cp, read, at, 0) for at in made])
        for read in reads_of(cp)
    ]

    for write in writes_of(cp):
        begun = [Place(case.id("p")) for _ in range(tries)]
        await asyncio.gather(*(prepare(cp, place, write) for place in begun))
        works.append((write.name, [partial(_do, cp, write, at) for at in begun]))

    for name, (sample, *uses) in works:
        start = time.perf_counter()
        await sample()
        usual = time.perf_counter() - start

        for by_time in (False, True):
            waited = swallowed = 0

            for use in uses[by_time::2]:
                task = asyncio.create_task(use())
                await asyncio.sleep(usual * case.random.random() * 0.7 * by_time)

                if not task.done():
                    waited += task.cancel()
                    await asyncio.wait([task])
                    swallowed += not task.cancelled()

            # The answer may arrive in the same loop turn as the cancellation.
            assert waited < 3 or swallowed <= waited // 2, name


async def _do(cp: Store, write: Write, place: Place) -> None:
    await write.do(cp, place)


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
