"""Optional: watching, so that a waiter does not poll."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

from conformance.case import Case, Store, raises
from conformance.clause import clause
from conformance.clauses.every_write import places
from conformance.failure import Failure
from conformance.operations import QUIET, Place, Write, writes_of
from conformance.sample_ids import invalid_ids, matching_patterns
from conformance.workers import workers
from cpkit import (
    Closed,
    ErasesThreads,
    InvalidId,
    ListsThreads,
    MovesThreads,
    WatchesThreads,
)

PATIENCE = 15.0
"""Seconds for a yield. The poll interval is a second at most; a machine may be busy."""

WATCHERS, WATCHED = 100, 600


def _watching(case: Case, **options: Any) -> AbstractAsyncContextManager[Store]:
    """Return a handle to watch with, which polls often if it can."""
    if "poll" in case.harness.options:
        options["poll"] = 0.05

    return case.open(**options)


async def _next(changes: AsyncIterator[str], change: str) -> str:
    """Return the next id; a `Failure` that names the change if none is yielded."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await anext(changes)
    except TimeoutError:
        raise Failure(
            f"a yield within the poll interval after {change}",
            f"none within {PATIENCE:g} s",
        ) from None


async def _look_until(
    changes: AsyncIterator[str],
    change: str,
    look: Callable[[], Awaitable[bool]],
) -> None:
    """Look after each yield, until the look shows the change."""
    while not await look():
        await _next(changes, change)


def _steps(case: Case, cp: Store, thread: str) -> dict[str, Callable[[], Any]]:
    """Return a change of each kind, in an order in which each one changes something."""
    call, again = case.call(), case.call()
    return {
        "an append": lambda: cp.append(thread, [{"n": 1}]),
        "another append": lambda: cp.append(thread, [{"n": 1}]),
        "save_extra": lambda: cp.save_extra(thread, {"a": 1}),
        "save_extra of a known key": lambda: cp.save_extra(thread, {"a": 2}),
        "an append of extra alone": lambda: cp.append(thread, [], extra={"b": 1}),
        "a claim": lambda: cp.record_issued(thread, call),
        "a failed result": lambda: cp.record_result(
            thread, call.call_id, None, success=False
        ),
        "a second claim": lambda: cp.record_issued(thread, again),
        "a completed result": lambda: cp.record_result(thread, again.call_id, None),
    }


async def _wait_for(changes: AsyncIterator[str], thread: str, change: str) -> None:
    """Step to a thread's id; other clients, and no change at all, may yield others."""
    while await _next(changes, change) != thread:
        pass


@clause("watch.yields-each-change", WatchesThreads, deadline=300)
async def yields_each_change(case: Case) -> None:
    """Each append, change of extra, claim and result is followed by a yield."""
    thread = case.id()

    async with case.cp.watch(thread) as changes:
        for name, step in _steps(case, case.cp, thread).items():
            await step()
            assert await _next(changes, name) == thread

    several = [case.id() for _ in range(3)]

    async with case.cp.watch(*several) as changes:
        for one in several:
            await case.cp.append(one, [{"n": 1}])

        left = {*several}

        while left:
            left.discard(await _next(changes, "each of three appends in a row"))


async def _all_writes(case: Case) -> dict[str, tuple[Write, Place]]:
    """Return every write whose yield is promised, by the thread that it changes."""
    made = [
        one
        for one in await places(case, writes_of(case.cp))
        if one[0].at != "gone" and one[0].method not in QUIET
    ]
    return {getattr(place, write.at): (write, place) for write, place in made}


async def _all_yield(
    case: Case, changes: AsyncIterator[str], made: dict[str, tuple[Write, Place]]
) -> None:
    """Do all of the writes, and wait until each thread was yielded."""
    await asyncio.gather(*(write.do(case.cp, place) for write, place in made.values()))
    left = {thread: write.name for thread, (write, _) in made.items()}

    while left:
        left.pop(await _next(changes, ", ".join(left.values())), None)


@clause("watch.yields-changes-of-others", WatchesThreads, "handles", deadline=300)
async def yields_changes_of_others(case: Case) -> None:
    """Each kind of write by another handle is followed by a yield of its id."""
    made = await _all_writes(case)

    async with _watching(case) as cp, cp.watch(case.id(), *made) as changes:
        await _all_yield(case, changes, made)


@contextmanager
def _clock_set_back() -> Iterator[None]:
    """Set the clock of this process two days back."""
    real, real_ns, back = time.time, time.time_ns, 2 * 24 * 60 * 60
    time.time = lambda: real() - back
    time.time_ns = lambda: real_ns() - back * 1_000_000_000

    try:
        yield
    finally:
        time.time, time.time_ns = real, real_ns


@clause("watch.clock-set-back", WatchesThreads, "handles", "notify", deadline=300)
async def clock_set_back(case: Case) -> None:
    """The poll finds each change where the clock was set back before it."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 0}])

    async with _watching(case, notify=False) as cp, cp.watch(thread) as changes:
        with _clock_set_back():
            for name, step in _steps(case, case.cp, thread).items():
                await step()
                assert await _next(changes, f"{name}, with an earlier time") == thread


@clause("watch.yields-deletions", WatchesThreads, ErasesThreads, deadline=200)
async def yields_deletions(case: Case) -> None:
    """A deletion is followed by a yield, and so is the thread's new beginning."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}])
    await case.cp.record_issued(thread, case.call())

    async with case.cp.watch(thread) as changes:
        for forget_keys in (False, True):
            await case.cp.delete_thread(thread, forget_keys=forget_keys)
            assert await _next(changes, "a deletion") == thread
            await case.cp.append(thread, [{"n": 1}])
            assert await _next(changes, "a new beginning") == thread


@clause("watch.yields-restores", WatchesThreads, MovesThreads, ErasesThreads)
async def yields_restores(case: Case) -> None:
    """A restored thread is yielded."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}])
    dump = await case.cp.dump_thread(thread)
    assert dump is not None
    await case.cp.delete_thread(thread, forget_keys=True)

    async with case.cp.watch(thread) as changes:
        await case.cp.restore_thread(dump)
        assert await _next(changes, "a restore") == thread


@clause("watch.any-thread", WatchesThreads, ListsThreads, "handles", deadline=200)
async def any_thread(case: Case) -> None:
    """Without ids, each change of every thread is yielded, of new ones too."""
    known, new, by_another = case.id(), case.id(), case.id()
    await case.cp.append(known, [{"n": 1}])
    made = await _all_writes(case)

    async with _watching(case) as cp, cp.watch() as changes:
        for one, thread in (
            (cp, known),
            (cp, new),
            (case.cp, by_another),
            (case.cp, by_another),
        ):
            await one.append(thread, [{"n": 1}])
            await _wait_for(changes, thread, "an append to any thread")

        # At once, because a store rests after it has looked at all of its threads.
        await _all_yield(case, changes, made)


@clause("watch.shows-the-last-change", WatchesThreads, "handles", deadline=60)
async def shows_the_last_change(case: Case) -> None:
    """A watcher that looks after each yield sees the last of many changes."""
    thread, count = case.id(), case.times(100)

    async def write(cp: Store) -> None:
        for n in range(count):
            await cp.append(thread, [{"n": n}])
            await asyncio.sleep(0)

    async def is_complete() -> bool:
        data = await case.cp.load(thread)
        return data is not None and data.version == 2 * count

    async with _watching(case) as cp, cp.watch(thread) as changes:
        async with asyncio.TaskGroup() as writers:
            writers.create_task(write(case.cp))
            writers.create_task(write(cp))
            await _look_until(changes, "the last append", is_complete)


@clause("watch.many-watchers", WatchesThreads, "handles", deadline=60)
async def many_watchers(case: Case) -> None:
    """Each of a hundred watchers of one handle, two a thread, gets its change."""
    threads = [case.id() for _ in range(WATCHERS // 2)] * 2
    entered = asyncio.Semaphore(0)

    async def wait_for(thread: str) -> str:
        async with cp.watch(thread) as changes:
            entered.release()
            return await _next(changes, "an append to one of many threads")

    async with _watching(case) as cp:
        tasks = [asyncio.create_task(wait_for(thread)) for thread in threads]

        for _ in tasks:
            await entered.acquire()

        await asyncio.gather(*(case.cp.append(one, [{"n": 1}]) for one in {*threads}))
        assert await asyncio.gather(*tasks) == threads


@clause("watch.hundreds-of-ids", WatchesThreads, deadline=90)
async def hundreds_of_ids(case: Case) -> None:
    """A watch of 600 ids yields each one that changes."""
    watched = {case.id(f"t{n}") for n in range(WATCHED)}

    async with case.cp.watch(*watched) as changes:
        await asyncio.gather(*(case.cp.append(one, [{"n": 1}]) for one in watched))

        while watched:
            watched.discard(await _next(changes, f"a change of {len(watched)} threads"))


@clause("watch.polls", WatchesThreads, "handles", "notify", deadline=300)
async def polls(case: Case) -> None:
    """Where every notification is lost, the id is yielded within the poll interval."""
    made, begun = await _all_writes(case), case.id()
    await case.cp.append(begun, [{"n": 1}])

    async with (
        _watching(case, notify=False) as deaf,
        deaf.watch(*made, begun) as changes,
    ):
        await _all_yield(case, changes, made)

        if isinstance(case.cp, ErasesThreads):
            await case.cp.delete_thread(begun)
            await case.cp.append(begun, [{"n": 2}])
            await _wait_for(changes, begun, "a new beginning at the same version")


@clause("watch.other-processes", WatchesThreads, "processes", deadline=120)
async def other_processes(case: Case) -> None:
    """A change by another process is yielded, by one that is killed after it too."""
    for kills in (False, True):
        thread = case.id()
        options = {"threads": [thread], "count": 9}
        job = {
            "does": "threads",
            "with": options,
            "seed": case.seed,
            "clients": ["a"],
        }

        async def is_written(thread: str = thread) -> bool:
            return await case.cp.load(thread) is not None

        async with case.cp.watch(thread) as changes:
            async with workers(case.harness, [job]) as (worker,):
                if kills:
                    while await worker.line() and not await is_written():
                        pass

                    worker.kill()
                else:
                    await worker.finished()

            assert await _next(changes, "a write by another process") == thread
            await _look_until(changes, "the first write of another", is_written)


@clause("watch.cancelled", WatchesThreads, "handles", deadline=60)
async def cancelled(case: Case) -> None:
    """A cancelled wait loses no change, and the watch goes on."""
    async with _watching(case) as cp:
        for n in range(case.times(20)):
            thread = case.id()

            async with cp.watch(thread) as changes:
                waiting = asyncio.ensure_future(anext(changes))
                await asyncio.sleep(0)
                writing = asyncio.create_task(case.cp.append(thread, [{"n": n}]))

                for _ in range(n % 20):
                    await asyncio.sleep(0)

                waiting.cancel()
                (answer,) = await asyncio.gather(waiting, return_exceptions=True)
                await writing

                if answer != thread:
                    assert isinstance(answer, asyncio.CancelledError)
                    assert await _next(changes, "a cancelled wait") == thread


@clause("watch.ends-with-the-block", WatchesThreads)
async def ends_with_the_block(case: Case) -> None:
    """Behind the block its iterator ends, for a waiting task too, and no other one."""

    async def first(changes: AsyncIterator[str]) -> str | None:
        return await anext(changes, None)

    thread = case.id()

    async with case.cp.watch(thread) as others:
        async with case.cp.watch(thread) as changes:
            waiting = asyncio.create_task(first(changes))
            await asyncio.sleep(0)

        async with asyncio.timeout(PATIENCE):
            assert await waiting is None
            assert await first(changes) is None

        await case.cp.append(thread, [{"n": 1}])
        assert await _next(others, "the end of another watch of the thread") == thread


@clause("watch.close-ends-it", WatchesThreads, deadline=60)
async def close_ends_it(case: Case) -> None:
    """Closing the handle does not wait for watchers; they get Closed."""
    entered = asyncio.Event()

    async def wait(cp: Store) -> str:
        async with cp.watch(case.id()) as changes:
            entered.set()
            return await anext(changes)

    async with case.open() as cp:
        waiting = asyncio.create_task(wait(cp))
        await entered.wait()

    async with asyncio.timeout(PATIENCE):
        with raises(Closed, "a wait of a closed handle"):
            await waiting

    with raises(Closed, "watch of a closed handle"):
        async with cp.watch(case.id()):
            pass


@clause("watch.leaves-nothing", WatchesThreads, deadline=60)
async def leaves_nothing(case: Case) -> None:
    """A closed handle that watched has no task and no thread left."""
    tasks, threads = asyncio.all_tasks(), {*threading.enumerate()}

    async with case.open() as cp:
        thread = case.id()

        # A store that cannot list its threads watches them by id only.
        ids = () if isinstance(cp, ListsThreads) else (case.id(),)

        async with cp.watch(thread) as changes, cp.watch(*ids):
            await cp.append(thread, [{"n": 1}])
            await _next(changes, "an append")

            entering = asyncio.create_task(cp.watch(case.id()).__aenter__())
            await asyncio.sleep(0)
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)

    def left() -> list[Any]:
        found: list[Any] = [*(asyncio.all_tasks() - tasks)]
        # Those of asyncio.to_thread belong to the event loop.
        return found + [
            one
            for one in threading.enumerate()
            if one not in threads and not one.name.startswith("asyncio_")
        ]

    for one in left():
        if isinstance(one, threading.Thread):  # it may have been told to end just now
            await asyncio.to_thread(one.join, PATIENCE)

    assert left() == []


@clause("watch.ids-are-exact", WatchesThreads, "handles", deadline=120)
async def ids_are_exact(case: Case) -> None:
    """A watched id is not a pattern: its own change is yielded, and no other id."""
    ids, patterns = matching_patterns(case.id())

    async with _watching(case) as cp, cp.watch(*patterns) as changes:
        for one in ids:
            await case.cp.append(one, [{"n": 1}])

        for pattern in patterns:
            await case.cp.append(pattern, [{"n": 1}])

            while (one := await _next(changes, f"an append to {pattern!r}")) != pattern:
                assert one in patterns


@clause("watch.invalid-ids", WatchesThreads)
async def checks_ids(case: Case) -> None:
    """An invalid id raises InvalidId, among valid ones too."""
    for name, value in invalid_ids().items():
        with raises(InvalidId, name):
            async with case.cp.watch(case.id(), value):
                pass
