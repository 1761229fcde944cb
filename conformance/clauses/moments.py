"""A load is of one moment: messages, extra and pending calls fit each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import cycle
from random import Random
from typing import Annotated, Any

from pydantic import AfterValidator
from typing_extensions import TypedDict

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.concurrent import handles
from conformance.history.moments import check_moment, write_moments
from conformance.history.recorder import Recorder
from conformance.workers import workers
from cpkit import CheckpointData, ReadsRanges, VersionConflict

CONCURRENT = Level.CONCURRENT

LONG = 800
"""Messages that the thread begins with: a load must take longer than a write."""

PAUSE = 2.0
"""Seconds that the decoding waits for a writer, which the load may hold up."""


async def _begun(case: Case) -> str:
    """Return a new thread with the messages before those of the writers."""
    thread = case.id()
    await case.cp.append(thread, [{"by": None, "n": 0}] * LONG)
    return thread


@asynccontextmanager
async def _readers(
    cps: list[Store], thread: str, writers: list[str], *, by_range: bool = False
) -> AsyncIterator[None]:
    """Load and check the thread of `_begun` with each handle until the block ends.

    ``by_range``: load the newest messages, and no message, by turns.
    """
    done = asyncio.Event()

    async def read(cp: Store) -> None:
        version = LONG
        looks: list[Callable[[str], Awaitable[CheckpointData[Any] | None]]] = [cp.load]

        if by_range:
            looks = [partial(cp.load_range, start=-3), partial(cp.load_range, stop=0)]

        for look in cycle(looks):
            if done.is_set():
                break

            loaded = await look(thread)
            assert loaded is not None
            assert loaded.version >= version, "a later load of the same handle"
            version = loaded.version
            check_moment(loaded, writers, LONG)

    readers = [asyncio.create_task(read(cp)) for cp in cps]

    try:
        yield
    finally:
        done.set()
        await asyncio.gather(*readers)


async def _write(case: Case, cps: list[Store], writers: list[str], thread: str) -> None:
    await asyncio.gather(
        *(
            write_moments(
                Recorder(cp, writer),
                Random(case.random.random()),
                thread,
                case.times(15),
            )
            for cp, writer in zip(cps, writers, strict=True)
        )
    )


@clause("concurrent.loads-are-of-one-moment", level=CONCURRENT, deadline=40)
async def loads_are_of_one_moment(case: Case) -> None:
    """The messages, extra and pending calls of a load are of one moment."""
    thread, writers = await _begun(case), ["writer 1", "writer 2"]

    async with handles(case) as cps, _readers(cps, thread, writers):
        await _write(case, cps[1:], writers, thread)


@clause("concurrent.ranges-are-of-one-moment", ReadsRanges, level=CONCURRENT)
async def ranges_are_of_one_moment(case: Case) -> None:
    """All that load_range returns is of one moment, for no message too."""
    thread, writers = await _begun(case), ["writer 1", "writer 2"]

    async with handles(case) as cps, _readers(cps, thread, writers, by_range=True):
        await _write(case, cps[1:], writers, thread)


NEGATIVE: list[tuple[int, int | None]] = [(-3, None), (-5, -2), (-1, None), (-4, 10**9)]


@clause("concurrent.negative-ranges-are-slices", ReadsRanges, level=CONCURRENT)
async def negative_ranges_are_slices(case: Case) -> None:
    """A range from the end is a slice of one moment while others append."""
    thread, done = case.id(), asyncio.Event()
    await case.cp.append(thread, [{"n": n} for n in range(20)])

    async def write(cp: Store) -> None:
        for _ in range(case.times(60)):
            version = await cp.append(thread, [])

            with suppress(VersionConflict):
                batch = [{"n": version + n} for n in range(2)]
                await cp.append(thread, batch, expected_version=version)

    async def read(cp: Store) -> None:
        for start, stop in cycle(NEGATIVE):
            if done.is_set():
                return

            version = await cp.append(thread, [])
            messages = await cp.read(thread, start, stop)
            loaded = await cp.load_range(thread, start, stop)
            assert loaded is not None
            first = loaded.first
            numbers = [message["n"] for message in loaded.messages]
            whole = range(loaded.version)
            assert loaded.version >= version
            assert numbers == [*whole[start:stop]], f"load_range of [{start}:{stop}]"
            assert first == numbers[0], f"first of [{start}:{stop}]"
            # The version of a read is not told, so only its length and order are.
            size, numbers = len(numbers), [message["n"] for message in messages]
            expected = [numbers[0] + n for n in range(size)]
            assert numbers == expected, f"read of [{start}:{stop}]"

    async with handles(case) as cps:
        readers = [asyncio.create_task(read(cp)) for cp in cps]

        try:
            await asyncio.gather(*(write(cp) for cp in cps[:2]))
        finally:
            done.set()
            await asyncio.gather(*readers)


@clause(
    "concurrent.loads-beside-processes-are-of-one-moment",
    "processes",
    level=CONCURRENT,
    deadline=40,
)
async def loads_beside_processes_are_of_one_moment(case: Case) -> None:
    """A load is of one moment while other processes write to the thread."""
    thread, writers = await _begun(case), ["process 1", "process 2"]
    options = {"thread": thread, "count": case.times(40)}
    jobs = [
        {
            "does": "moments",
            "with": options,
            "clients": [writer],
            "seed": case.random.random(),
        }
        for writer in writers
    ]

    # The readers last: they would only delay the start of the processes.
    async with (
        handles(case) as cps,
        workers(case.harness, jobs) as started,
        _readers(cps, thread, writers),
    ):
        await asyncio.gather(*(worker.finished() for worker in started))


@clause(
    "concurrent.a-slow-load-is-of-one-moment",
    "handles",
    "message_type",
    level=CONCURRENT,
    deadline=40,
)
async def a_slow_load_is_of_one_moment(case: Case) -> None:
    """What is written while a load decodes its messages is in all parts or in none."""
    thread, writer = await _begun(case), "writer"
    writes: list[Future[None]] = []

    async def write() -> None:
        async with case.open() as cp:
            await write_moments(Recorder(cp, writer), Random(0), thread, 3)

    with ThreadPoolExecutor(1) as executor:

        def write_in_the_middle() -> None:
            if is_loading and not writes:
                writes.append(executor.submit(asyncio.run, write()))
                wait(writes, PAUSE)

        is_loading = False

        async with case.open(message_type=_line(write_in_the_middle)) as reader:
            is_loading = True
            loaded = await reader.load(thread)
            is_loading = False

        for one in writes:
            await asyncio.wrap_future(one)

    assert loaded is not None
    assert writes, "a load decodes its messages"
    check_moment(loaded, [writer], LONG)


def _line(decoded: Callable[[], None]) -> Any:
    """Return a type for the messages; it calls ``decoded`` when one is decoded."""

    def checked(n: int) -> int:
        decoded()
        return n

    fields = {"by": str | None, "n": Annotated[int, AfterValidator(checked)]}
    return TypedDict("Line", fields)  # type: ignore[operator]  # a dict of fields
