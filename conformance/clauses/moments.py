"""A load is of one moment: messages, extra and pending calls fit each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.concurrent import handles
from conformance.history.moments import check_moment, write_moments
from conformance.history.recorder import Recorder
from conformance.workers import workers

CONCURRENT = Level.CONCURRENT

LONG = 800
"""Messages that the thread begins with: a load must take longer than a write."""


async def _begun(case: Case) -> str:
    """Return a new thread with the messages before those of the writers."""
    thread = case.id()
    await case.cp.append(thread, [{"by": None, "n": 0}] * LONG)
    return thread


@asynccontextmanager
async def _readers(
    cps: list[Store], thread: str, writers: list[str]
) -> AsyncIterator[None]:
    """Load and check the thread of `_begun` with each handle until the block ends."""
    done = asyncio.Event()

    async def read(cp: Store) -> None:
        version = LONG

        while not done.is_set():
            loaded = await cp.load(thread)
            assert loaded is not None
            assert loaded.version >= version, "a later load of the same handle"
            version = loaded.version
            check_moment(loaded, writers, LONG)
            await asyncio.sleep(0)  # an in-memory store never yields to the event loop

    readers = [asyncio.create_task(read(cp)) for cp in cps]

    try:
        yield
    finally:
        done.set()
        await asyncio.gather(*readers)


@clause("concurrent.loads-are-of-one-moment", level=CONCURRENT, deadline=40)
async def loads_are_of_one_moment(case: Case) -> None:
    """The messages, extra and pending calls of a load are of one moment."""
    thread, writers = await _begun(case), ["writer 1", "writer 2"]

    async with handles(case) as cps, _readers(cps, thread, writers):
        await asyncio.gather(
            *(
                write_moments(
                    Recorder(cp, writer),
                    Random(case.random.random()),
                    thread,
                    case.times(15),
                )
                for cp, writer in zip(cps[1:], writers, strict=True)
            )
        )


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
