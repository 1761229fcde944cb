"""Histories of tasks, handles and processes are linearizable."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.concurrent import handles
from conformance.history.client import use_keys, use_threads
from conformance.history.linear import check_linearizable
from conformance.history.models import KEY, THREAD
from conformance.history.op import Op, merged
from conformance.history.recorder import Recorder
from conformance.workers import workers

CONCURRENT = Level.CONCURRENT

CLIENTS = 4
"""Concurrent clients of one thread or key. More would make the search too slow."""

OPERATIONS = 15
"""Operations of each client, without the reads after all clients are done."""


async def check_threads(cp: Store, threads: list[str], history: list[Op]) -> None:
    """Read the final state, and check that one order explains every answer."""
    last = Recorder(cp, "final read")

    for thread in threads:
        await last.load(thread)

    check_linearizable(THREAD, [*history, *last.history])


async def check_keys(cp: Store, keys: list[str], history: list[Op]) -> None:
    """Read the final state, and check that one order explains every answer."""
    last = Recorder(cp, "final read")

    for key in keys:
        await last.find_completed(key)

        if last.keeps_receipts:
            await last.find_call(key)

    check_linearizable(KEY, [*history, *last.history])


async def _threads(case: Case, cps: list[Store]) -> None:
    threads = [case.id() for _ in range(2)]
    recorders = [Recorder(cps[n], f"task {n}") for n in range(CLIENTS)]
    await asyncio.gather(
        *(
            use_threads(recorder, Random(case.random.random()), threads, OPERATIONS)
            for recorder in recorders
        )
    )
    await check_threads(case.cp, threads, [op for r in recorders for op in r.history])


async def _keys(case: Case, cps: list[Store]) -> None:
    keys = [case.id("key") for _ in range(3)]
    recorders = [Recorder(cps[n], f"task {n}") for n in range(CLIENTS)]
    threads = {recorder.client: case.id() for recorder in recorders}
    await asyncio.gather(
        *(
            use_keys(recorder, Random(case.random.random()), threads, keys, OPERATIONS)
            for recorder in recorders
        )
    )
    await check_keys(case.cp, keys, [op for r in recorders for op in r.history])


@clause("linearizable.threads-in-tasks", level=CONCURRENT, deadline=50)
async def threads_in_tasks(case: Case) -> None:
    """Appends, merges and loads of concurrent tasks are linearizable."""
    for _ in range(case.times(4)):
        await _threads(case, [case.cp] * CLIENTS)


@clause("linearizable.threads-in-handles", "handles", level=CONCURRENT, deadline=50)
async def threads_in_handles(case: Case) -> None:
    """Appends, merges and loads of concurrent handles are linearizable."""
    async with handles(case) as cps:
        for _ in range(case.times(4)):
            await _threads(case, [cps[n % 3] for n in range(CLIENTS)])


@clause("linearizable.keys-in-tasks", level=CONCURRENT, deadline=50)
async def keys_in_tasks(case: Case) -> None:
    """Claims and results of concurrent tasks are linearizable."""
    for _ in range(case.times(4)):
        await _keys(case, [case.cp] * CLIENTS)


@clause("linearizable.keys-in-handles", "handles", level=CONCURRENT, deadline=50)
async def keys_in_handles(case: Case) -> None:
    """Claims and results of concurrent handles are linearizable."""
    async with handles(case) as cps:
        for _ in range(case.times(4)):
            await _keys(case, [cps[n % 3] for n in range(CLIENTS)])


async def _in_processes(
    case: Case, job: dict[str, Any], clients: list[str]
) -> list[Op]:
    """Run each client in its own process, and return their history."""
    jobs = [
        {**job, "clients": [client], "seed": case.random.random()} for client in clients
    ]

    async with workers(case.harness, jobs) as started:
        printed = await asyncio.gather(*(worker.finished() for worker in started))

    return merged([values for lines in printed for values in lines])


@clause("linearizable.threads-in-processes", "processes", level=CONCURRENT, deadline=50)
async def threads_in_processes(case: Case) -> None:
    """Appends, merges and loads of concurrent processes are linearizable."""
    threads = [case.id() for _ in range(2)]
    job = {"threads": threads, "count": case.times(25)}
    history = await _in_processes(case, job, ["process 1", "process 2", "process 3"])
    await check_threads(case.cp, threads, history)


@clause("linearizable.keys-in-processes", "processes", level=CONCURRENT, deadline=50)
async def keys_in_processes(case: Case) -> None:
    """Claims and results of concurrent processes are linearizable."""
    clients = ["process 1", "process 2", "process 3"]
    keys = [case.id("key") for _ in range(4)]
    threads = {client: case.id() for client in clients}
    job = {"threads": threads, "keys": keys, "count": case.times(25)}
    history = await _in_processes(case, job, clients)
    await check_keys(case.cp, keys, history)
