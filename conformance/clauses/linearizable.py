"""Histories of tasks, handles and processes are linearizable."""

from __future__ import annotations

import asyncio
import time
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
from cpkit import ErasesThreads, MovesThreads

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


async def check_keys(cp: Store, keys: list[str], history: list[Op]) -> list[Op]:
    """Read the final state, claim, and check that one order explains every answer.

    Return its own operations: they belong to the history that a later check is given.
    """
    last = Recorder(cp, "final read")

    for n, key in enumerate(keys):
        await last.find_completed(key)

        if last.keeps_receipts:
            await last.find_call(key)

        # A claim looks at the holder in a way of its own.
        await last.record_issued(f"last of {keys[0]}", f"final read.{n}", key)

    check_linearizable(KEY, [*history, *last.history])
    return last.history


async def _threads(case: Case, cps: list[Store], *, deletes: bool = False) -> None:
    threads = [case.id() for _ in range(2)]
    recorders = [Recorder(cps[n], f"task {n}") for n in range(CLIENTS)]
    await asyncio.gather(
        *(
            use_threads(
                recorder,
                Random(case.random.random()),
                threads,
                OPERATIONS,
                deletes=deletes,
            )
            for recorder in recorders
        )
    )
    await check_threads(case.cp, threads, [op for r in recorders for op in r.history])


async def _keys(case: Case, cps: list[Store], *, deletes: bool = False) -> None:
    keys = [case.id("key") for _ in range(3)]
    recorders = [Recorder(cps[n], f"task {n}") for n in range(CLIENTS)]
    threads = {recorder.client: case.id() for recorder in recorders}
    await asyncio.gather(
        *(
            use_keys(
                recorder,
                Random(case.random.random()),
                threads,
                keys,
                OPERATIONS,
                deletes=deletes,
            )
            for recorder in recorders
        )
    )
    await check_keys(case.cp, keys, [op for r in recorders for op in r.history])


@clause("linearizable.threads-in-tasks", level=CONCURRENT, deadline=50)
async def threads_in_tasks(case: Case) -> None:
    """Appends, merges, loads and ranges of concurrent tasks are linearizable."""
    for _ in range(case.times(4)):
        await _threads(case, [case.cp] * CLIENTS)


@clause("linearizable.threads-in-handles", "handles", level=CONCURRENT, deadline=50)
async def threads_in_handles(case: Case) -> None:
    """Appends, merges, loads and ranges of concurrent handles are linearizable."""
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


@clause("linearizable.deleted-threads", ErasesThreads, level=CONCURRENT, deadline=50)
async def deleted_threads(case: Case) -> None:
    """Deletions, fenced ones too, restores, dumps and writes are linearizable."""
    async with handles(case) as cps:
        for _ in range(case.times(6)):
            await _threads(case, [cps[n % 3] for n in range(CLIENTS)], deletes=True)
            await _threads(case, [case.cp] * CLIENTS, deletes=True)

        if isinstance(case.cp, MovesThreads):
            for _ in range(case.times(12)):
                await _restored_beside_deletions(case, cps)


async def _restored_beside_deletions(case: Case, cps: list[Store]) -> None:
    """Restore an absent thread again and again while others delete it."""
    thread = case.id()
    recorders = [Recorder(cps[n % 3], f"task {n}") for n in range(6)]
    left = 2

    async def restore(recorder: Recorder) -> None:
        nonlocal left

        try:
            for n in range(3):
                token = f"{recorder.client}.{n}"
                await recorder.restore_thread(thread, [token], {"a": token})
        finally:
            left -= 1

    async def delete(recorder: Recorder) -> None:
        for _ in range(40):
            await recorder.delete_thread(thread)

            if not left:
                break

    await asyncio.gather(*map(delete, recorders[2:]), *map(restore, recorders[:2]))
    await check_threads(case.cp, [thread], [op for r in recorders for op in r.history])


@clause("linearizable.deleted-calls", ErasesThreads, level=CONCURRENT, deadline=50)
async def deleted_calls(case: Case) -> None:
    """Deletions of threads are linearizable with the claims and results in them."""
    async with handles(case) as cps:
        for _ in range(case.times(6)):
            await _keys(case, [cps[n % 3] for n in range(CLIENTS)], deletes=True)
            await _keys(case, [case.cp] * CLIENTS, deletes=True)

        for n in range(case.times(16)):
            await _deleted_beside_its_calls(case, cps, forget_keys=n % 2 == 0)


async def _deleted_beside_its_calls(
    case: Case, cps: list[Store], *, forget_keys: bool
) -> None:
    """Delete a thread while its calls are resolved, and their keys claimed again."""
    keys = [case.id("key") for _ in range(4)]
    threads = {f"task {n}": case.id() for n in range(3)}
    recorders = [Recorder(cps[n], client) for n, client in enumerate(threads)]
    deleting, resolving, claiming = recorders
    mine = threads["task 0"]

    for key in keys:
        await deleting.record_issued(mine, f"task 0.{key}.0", key)

    async def resolve(key: str) -> None:
        call_id = f"task 0.{key}.0"
        await resolving.record_result(mine, call_id, key, f"{key}.r", success=False)
        await claiming.record_issued(mine, f"task 0.{key}.1", key)
        await claiming.find_call(key)

    await asyncio.gather(
        deleting.delete_calls(mine, "task 0", keys, forget_keys=forget_keys),
        *(resolve(key) for key in keys),
    )

    for key in keys:
        await resolving.record_result(
            mine, f"task 0.{key}.0", key, f"{key}.late", success=True
        )

    await check_keys(case.cp, keys, [op for r in recorders for op in r.history])


PROCESSES = ["process 1", "process 2", "process 3"]


PACE = 0.002
"""Seconds between operations: a fast store would end one process before the next."""


async def in_processes(case: Case, does: str, **options: Any) -> list[Op]:
    """Run a client in each process, and return their history."""
    jobs = [
        {
            "does": does,
            "with": options,
            "clients": [client],
            "seed": case.random.random(),
        }
        for client in PROCESSES
    ]

    async with workers(case.harness, jobs) as started:
        printed = await asyncio.gather(*(worker.finished() for worker in started))

    return merged([values for lines in printed for values in lines])


@clause("linearizable.threads-in-processes", "processes", level=CONCURRENT, deadline=50)
async def threads_in_processes(case: Case) -> None:
    """Appends, merges, loads and ranges of concurrent processes are linearizable."""
    threads = [case.id() for _ in range(2)]
    history = await in_processes(case, "threads", threads=threads, count=case.times(25))
    await check_threads(case.cp, threads, history)


@clause("linearizable.keys-in-processes", "processes", level=CONCURRENT, deadline=50)
async def keys_in_processes(case: Case) -> None:
    """Claims and results of concurrent processes are linearizable."""
    keys = [case.id("key") for _ in range(4)]
    threads = {client: case.id() for client in PROCESSES}
    history = await in_processes(
        case, "keys", threads=threads, keys=keys, count=case.times(25), pace=PACE
    )
    await check_keys(case.cp, keys, history)


MEETINGS = 72
"""Threads or keys at which the processes meet."""

SHORTEST, LONGEST = 0.0006, 0.004
"""Seconds: bounds for the usual duration of an operation."""


async def _meeting(case: Case) -> dict[str, Any]:
    """Return what all clients of a meeting must know."""
    thread = case.id()
    start = time.perf_counter()

    for n in range(8):
        await case.cp.append(thread, [{"n": n}])

    usual = (time.perf_counter() - start) / 8
    return {
        "thread": thread,
        "seed": case.random.randrange(2**32),
        "usual": min(max(usual, SHORTEST), LONGEST),
        "count": case.times(MEETINGS),
    }


@clause(
    "linearizable.threads-at-one-instant", "processes", level=CONCURRENT, deadline=50
)
async def threads_at_one_instant(case: Case) -> None:
    """Operations that processes begin on a thread at one instant are linearizable."""
    meeting = await _meeting(case)
    deletes = isinstance(case.cp, ErasesThreads)
    history = await in_processes(case, "meet at threads", **meeting, deletes=deletes)
    threads = list(dict.fromkeys(op.subject for op in history))
    await check_threads(case.cp, threads, history)


@clause("linearizable.keys-at-one-instant", "processes", level=CONCURRENT, deadline=50)
async def keys_at_one_instant(case: Case) -> None:
    """Claims that processes begin on a key at one instant are linearizable."""
    history = await in_processes(case, "meet at keys", **await _meeting(case))
    keys = list(dict.fromkeys(op.subject for op in history))
    await check_keys(case.cp, keys, history)
