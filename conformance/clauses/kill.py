"""SIGKILL of writing processes: acknowledged writes survive, and none is torn."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.late import append_at_loaded_version
from conformance.clauses.linearizable import check_keys, check_threads
from conformance.difference import check_equal, shown
from conformance.failure import Failure
from conformance.history.op import Op, merged
from conformance.operations import (
    Place,
    Write,
    state,
    tell_outcome,
    writes_of,
)
from conformance.workers import Worker, workers
from cpkit import (
    CheckpointData,
    ErasesThreads,
    KeepsReceipts,
    MovesThreads,
    ToolCall,
)

DURABLE = Level.DURABLE

PROCESSES = ["process 1", "process 2"]
TASKS = ["a", "b"]
"""Clients in each process, so that some operations share a commit."""

LATE_WRITES = len(PROCESSES) * len(TASKS)
"""Writes that a store may still apply after the kill: one unanswered by each client."""


async def killed(case: Case, does: str, **options: Any) -> list[Op]:
    """Start writing processes, kill each at a random moment, and return the history.

    Each printed line is an acknowledgement, even if it was still in the pipe when the
    process was killed.
    """
    jobs = [
        {
            "does": does,
            "with": {**options, "count": 10_000},
            "clients": [f"{process}{task}" for task in TASKS],
            "seed": case.random.random(),
        }
        for process in PROCESSES
    ]

    async def one(worker: Worker) -> list[Any]:
        printed = [await worker.line() for _ in range(case.random.randint(0, 25))]
        await asyncio.sleep(case.random.random() * 0.004)
        worker.kill()
        printed += await worker.lines()
        return [line for line in printed if line is not None]

    async with workers(case.harness, jobs) as started:
        printed = await asyncio.gather(*(one(worker) for worker in started))

    return merged([values for lines in printed for values in lines])


@clause("kill.writes-survive", "processes", level=DURABLE, deadline=50)
async def writes_survive(case: Case) -> None:
    """After SIGKILL every acknowledged append and merge is stored whole."""
    for _ in range(case.times(4)):
        threads = [case.id() for _ in range(2)]
        history = await killed(case, "threads", threads=threads)

        async with case.open() as reopened:
            await check_threads(reopened, threads, history)
            await _check_handles_agree(case.cp, reopened, threads)


async def _check_handles_agree(one: Store, two: Store, threads: list[str]) -> None:
    """Load with two handles; only a late write between the loads may change one."""
    for _ in range(LATE_WRITES + 1):
        loaded = [await one.load(thread) for thread in threads]
        again = [await two.load(thread) for thread in threads]

        if loaded == again:
            return

    raise Failure(shown(loaded), shown(again), "the loads of two handles")


@clause("kill.claims-survive", "processes", level=DURABLE, deadline=50)
async def claims_survive(case: Case) -> None:
    """After SIGKILL all acknowledged claims and results are stored."""
    for _ in range(case.times(4)):
        keys = [case.id("key") for _ in range(4)]
        clients = [f"{process}{task}" for process in PROCESSES for task in TASKS]
        threads = {client: case.id() for client in clients}
        history = await killed(case, "keys", threads=threads, keys=keys)

        async with case.open() as reopened:
            await check_keys(reopened, keys, history)


SHARES = (0.15, 0.35, 0.55, 0.75)
"""When processes are killed, as a part of the time that all writes at once take."""


@clause("kill.every-write-is-whole", "processes", level=DURABLE, deadline=60)
async def every_write_is_whole(case: Case) -> None:
    """After SIGKILL amid every kind of write each is whole, and blocks no other."""
    writes = writes_of(case.cp)

    for _ in range(case.times(1)):
        # The last two end where only a write is open that takes longer than others.
        kills: list[dict[str, Any]] = [
            *({"share": share + case.random.random() * 0.2} for share in SHARES),
            {"last": len(writes) - 3},
            {"last": len(writes) - 2},
        ]
        tokens = [case.id("p") for _ in kills]
        jobs = [
            {
                "does": "every write",
                "with": {"token": token, **kill},
                "clients": ["a"],
                "seed": 1,
            }
            for token, kill in zip(tokens, kills, strict=True)
        ]
        done: list[list[Any]] = []

        # One after another: a write that waits for another process takes longer.
        async with workers(case.harness, jobs, together=False) as started:
            for worker in started:
                worker.go()
                done.append(await worker.lines())

        async with case.open() as reopened:
            for token, finished in zip(tokens, done, strict=True):
                await asyncio.gather(
                    *(
                        _check_after_kill(
                            [case.cp, reopened],
                            write,
                            Place(f"{token}.{n:02}"),
                            n in finished,
                        )
                        for n, write in enumerate(writes)
                    )
                )


async def _check_after_kill(
    cps: list[Store], write: Write, place: Place, acknowledged: bool
) -> None:
    """Check that a write is whole for all handles; then do the next writes."""
    where = "its process was killed"
    first, second = [await state(cp, place, write.at) for cp in cps]

    if first != second:  # a late write of the killed process may come between
        first, second = [await state(cp, place, write.at) for cp in cps]

    check_equal(second, first, f"{write.name}, two handles after {where}")
    written = await tell_outcome(write, first, where)
    assert written or not acknowledged, f"{write.name}, acknowledged before {where}"

    for cp in cps:
        await _write_next(cp, getattr(place, write.at), place)


async def _write_next(cp: Store, thread: str, place: Place) -> None:
    """Use the thread and each key that the killed process used."""
    await append_at_loaded_version(cp, thread, late=1)
    await cp.save_extra(thread, {"next": 1})

    for n, key in enumerate(place.keys):
        found = await cp.find_call(key) if isinstance(cp, KeepsReceipts) else None
        again = ToolCall(f"{uuid4().hex}", "pay", {}, key)
        holder = await cp.record_issued(thread, again)
        where = f"a claim of {place.keys[n]!r} after the kill"
        assert found is None or holder == found, where

        if holder is None:
            await cp.record_result(thread, again.call_id, "no", success=False)

    if isinstance(cp, ErasesThreads):
        await cp.delete_thread(thread)

        if isinstance(cp, MovesThreads):
            dump = await cp.dump_thread(thread)
            await cp.delete_thread(thread, forget_keys=True)

            if dump is not None:
                await cp.restore_thread(dump)


@clause("kill.earlier-stays", "processes", level=DURABLE, deadline=50)
async def earlier_stays(case: Case) -> None:
    """SIGKILL of writers changes nothing that was written before they started."""
    threads = [case.id() for _ in range(2)]
    before: list[CheckpointData[Any]] = []

    for n, thread in enumerate(threads):
        await case.cp.append(thread, [{"token": f"early.{n}.{i}"} for i in range(20)])
        await case.cp.save_extra(thread, {"kept": n})
        call = case.call()
        await case.cp.record_issued(thread, call)
        loaded = await case.cp.load(thread)
        assert loaded is not None
        before.append(loaded)

    for _ in range(case.times(2)):
        await killed(case, "threads", threads=threads)

    async with case.open() as reopened:
        for thread, early in zip(threads, before, strict=True):
            loaded = await reopened.load(thread)
            assert loaded is not None
            assert loaded.messages[: early.version] == early.messages
            assert loaded.extra["kept"] == early.extra["kept"]
            assert loaded.pending == early.pending


@clause("kill.while-opening", "processes", level=DURABLE, deadline=50)
def while_opening(case: Case) -> None:
    """After SIGKILL of processes that open the store, the store still opens."""

    job = {
        "does": "threads",
        "with": {"threads": [case.id()], "count": 1},
        "clients": ["a"],
        "seed": 1,
    }

    async def use() -> float:
        start = time.perf_counter()

        async with case.open() as cp:
            usual = time.perf_counter() - start
            version = await cp.append(case.id(), [{"n": 1}])
            assert version == 1
            return usual

    async def open_and_die(worker: Worker, usual: float) -> None:
        await worker.reaches("opening")
        await asyncio.sleep(case.random.random() * usual * 1.2)
        worker.kill()

    async def run() -> None:
        usual = 0.01  # a guess for the first round, which may create the store

        for _ in range(case.times(4)):
            started = [Worker(case.harness, job) for _ in range(2)]

            try:
                await asyncio.gather(*(open_and_die(w, usual) for w in started))
            finally:
                for worker in started:
                    worker.close()

            usual = await use()

    asyncio.run(run())


@clause("kill.exit-loses-nothing", "processes", level=DURABLE, deadline=40)
async def exit_loses_nothing(case: Case) -> None:
    """After a process exited normally, every other process sees its writes."""
    threads = [case.id()]
    job = {
        "does": "threads",
        "with": {"threads": threads, "count": 20},
        "clients": ["process 1"],
        "seed": 1,
    }

    async with workers(case.harness, [job]) as started:
        printed = await started[0].finished()

    await check_threads(case.cp, threads, merged(printed))
