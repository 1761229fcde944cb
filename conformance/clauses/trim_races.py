"""Trims beside everything else that happens to a thread, and trims that are killed."""

from __future__ import annotations

import asyncio
from random import Random

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.concurrent import handles
from conformance.clauses.kill import killed
from conformance.clauses.linearizable import (
    CLIENTS,
    OPERATIONS,
    check_threads,
    in_processes,
)
from conformance.history.client import use_threads
from conformance.history.recorder import Recorder
from cpkit import ErasesThreads, MovesThreads, TrimsThreads

WRITERS = 6
"""Tasks that append, each `APPENDS` times."""

APPENDS = 12


@clause("concurrent.trims-count-once", TrimsThreads, level=Level.CONCURRENT)
async def trims_count_once(case: Case) -> None:
    """Concurrent trims remove each message once, and no load shows a gap."""
    async with handles(case) as cps:
        for _ in range(case.times(3)):
            await _count_once(case, cps)


async def _count_once(case: Case, cps: list[Store]) -> None:
    thread, left, removed = case.id(), WRITERS, 0
    newest = 0

    async def write(cp: Store, by: int) -> None:
        nonlocal left, newest

        for n in range(APPENDS):
            body = [{"by": by, "n": n, "i": i} for i in range(n % 3 + 1)]
            version = await cp.append(thread, body)
            newest = max(newest, version)

        left -= 1

    async def trim(cp: Store) -> None:
        nonlocal removed

        while left:
            count = await cp.trim(thread, max(0, newest - 4))
            removed += count

    async def look(cp: Store) -> None:
        first = version = 0

        while left:
            loaded = await cp.load(thread)

            if loaded is not None:
                assert first <= loaded.first, "what was trimmed stays away"
                assert version <= loaded.version
                first, version = loaded.first, loaded.version
                assert version == first + len(loaded.messages)

            if isinstance(cp, MovesThreads) and (dump := await cp.dump_thread(thread)):
                assert first <= dump.first
                version = dump.first + len(dump.messages)
                first = dump.first

    await asyncio.gather(
        *(write(cps[n % 3], n) for n in range(WRITERS)),
        *(trim(cps[n % 3]) for n in range(3)),
        *(look(cps[n % 3]) for n in range(2)),
    )
    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert loaded.first == removed, "all trims together removed what is gone"
    assert loaded.version == newest == WRITERS * APPENDS * 2
    assert loaded.version == loaded.first + len(loaded.messages)


@clause(
    "linearizable.trimmed-threads", TrimsThreads, level=Level.CONCURRENT, deadline=50
)
async def trimmed_threads(case: Case) -> None:
    """Trims, fenced ones too, are linearizable with every other use of a thread."""
    async with handles(case) as cps:
        for n in range(case.times(6)):
            deletes = isinstance(case.cp, ErasesThreads) and n % 2 == 1
            await _threads(case, [cps[n % 3] for n in range(CLIENTS)], deletes)
            await _threads(case, [case.cp] * CLIENTS, deletes)


async def _threads(case: Case, cps: list[Store], deletes: bool) -> None:
    threads = [case.id()]
    recorders = [Recorder(cps[n], f"task {n}") for n in range(CLIENTS)]
    await asyncio.gather(
        *(
            use_threads(
                recorder,
                Random(case.random.random()),
                threads,
                OPERATIONS,
                deletes=deletes,
                trims=True,
            )
            for recorder in recorders
        )
    )
    await check_threads(case.cp, threads, [op for r in recorders for op in r.history])


@clause(
    "linearizable.trimmed-in-processes",
    TrimsThreads,
    "processes",
    level=Level.CONCURRENT,
    deadline=50,
)
async def trimmed_in_processes(case: Case) -> None:
    """Trims of concurrent processes are linearizable with every use of a thread."""
    threads = [case.id() for _ in range(2)]
    options = {"threads": threads, "count": case.times(25), "trims": True}
    history = await in_processes(case, "threads", **options)
    await check_threads(case.cp, threads, history)


@clause(
    "kill.trims-survive", TrimsThreads, "processes", level=Level.DURABLE, deadline=50
)
async def trims_survive(case: Case) -> None:
    """After SIGKILL a trim is done or not done, and an acknowledged one is done."""
    for _ in range(case.times(4)):
        threads = [case.id()]
        history = await killed(case, "threads", threads=threads, trims=True)

        async with case.open() as reopened:
            await check_threads(reopened, threads, history)
