"""SIGSTOP of the store's server: its connections stand, and nothing is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random

from conformance.case import Case, raises
from conformance.clause import Level, clause
from conformance.clauses.every_write import places
from conformance.clauses.late import append_at_loaded_version
from conformance.clauses.linearizable import check_keys, check_threads
from conformance.clauses.server import CLIENTS, OPERATIONS, PACE, operations
from conformance.clauses.wire import short_timeout
from conformance.history.client import use_keys, use_threads
from conformance.history.recorder import Recorder
from conformance.operations import Place, prepare, writes_of
from conformance.slowdown import slowdown
from cpkit import BackendUnavailable

DURABLE = Level.DURABLE

PATIENCE = 15.0
"""Seconds that an operation with ``timeout=1`` may take, with much to spare."""

LOOKS = 20
"""Loads after the server goes on: it may apply a received request only then."""


@asynccontextmanager
async def _paused(case: Case) -> AsyncIterator[None]:
    """Pause the server, and resume it when the block ends."""
    await case.harness.pause()

    try:
        yield
    finally:
        await case.harness.resume()


@clause("server.paused-is-unavailable", "pause", level=DURABLE, deadline=120)
async def paused_is_unavailable(case: Case) -> None:
    """While the server is stopped, everything raises BackendUnavailable in time."""
    options = short_timeout(case.harness)

    async def opening() -> str:
        async with case.open(**options):
            return "an open handle"

    async with case.open(**options) as cp:
        made = await places(case, writes_of(cp), cp)
        place = await prepare(cp, Place(case.id("p")))
        uses: dict[str, Callable[[], Awaitable[object]]] = {
            **operations(cp, place, made),
            "opening a handle": opening,
        }

        async with _paused(case):
            tasks = [asyncio.ensure_future(use()) for use in uses.values()]
            limit = PATIENCE * slowdown() if options else None
            _, late = await asyncio.wait(tasks, timeout=limit)
            waits = [
                name for name, task in zip(uses, tasks, strict=True) if task in late
            ]

            for task in late:
                task.cancel()

        answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert waits == [], f"with {options}"

    for name, answer in zip(uses, answers, strict=True):
        assert isinstance(answer, BackendUnavailable), name


@clause("server.paused-handle-closes", "pause", level=DURABLE, deadline=120)
async def paused_handle_closes(case: Case) -> None:
    """While the server is stopped, later operations and closing end in time too."""
    options = short_timeout(case.harness)
    limit = PATIENCE * slowdown() if options else None
    thread = case.id()
    opened = case.open(**options)
    cp = await opened.__aenter__()
    await cp.append(thread, [{"n": 1}])
    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "append": lambda: cp.append(thread, [{"n": 2}], expected_version=1),
        "append again": lambda: cp.append(thread, [{"n": 2}], expected_version=1),
        "load": lambda: cp.load(thread),
        "closing": lambda: opened.__aexit__(None, None, None),
    }
    tasks: dict[str, asyncio.Future[object]] = {}
    waits = []

    async with _paused(case):
        for names in (("append",), ("append again", "load"), ("closing",)):
            begun = {name: asyncio.ensure_future(steps[name]()) for name in names}
            tasks |= begun
            _, late = await asyncio.wait(begun.values(), timeout=limit)
            waits += [name for name, task in begun.items() if task in late]

    answers = await asyncio.gather(*tasks.values(), return_exceptions=True)

    assert waits == [], f"with {options}"

    for name, answer in zip(tasks, answers, strict=True):
        closed = name == "closing" and answer is None
        assert closed or isinstance(answer, BackendUnavailable), name


@clause("server.paused-is-honest", "pause", level=DURABLE, deadline=120)
async def paused_is_honest(case: Case) -> None:
    """A write on a stopped server that says it was not applied is not applied later."""
    async with case.open(**short_timeout(case.harness)) as cp:
        for _ in range(case.times(3)):
            threads = [case.id() for _ in range(2)]
            keys = [case.id("key") for _ in range(4)]
            places = {client: case.id() for client in CLIENTS}
            writers = [Recorder(cp, client) for client in CLIENTS]
            claimers = [Recorder(cp, client) for client in CLIENTS]
            chance = Random(case.random.random())
            clients = [
                *(
                    use_threads(one, chance, threads, OPERATIONS, PACE)
                    for one in writers
                ),
                *(
                    use_keys(one, chance, places, keys, OPERATIONS, PACE)
                    for one in claimers
                ),
            ]
            tasks = [asyncio.create_task(client) for client in clients]
            await asyncio.sleep(0.02 + case.random.random() * 0.1)

            # A client stops at its first error.
            async with _paused(case):
                await asyncio.wait(tasks)

            for answer in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(answer, (BackendUnavailable, type(None)))

            last = Recorder(case.cp, "look")

            for _ in range(LOOKS):
                for thread in threads:
                    await last.load(thread)

            history = [op for recorder in (*writers, last) for op in recorder.history]
            await check_threads(case.cp, threads, history)
            claims = [op for recorder in claimers for op in recorder.history]
            await check_keys(case.cp, keys, claims)


@clause("server.paused-handle-comes-back", "pause", level=DURABLE, deadline=120)
async def paused_handle_comes_back(case: Case) -> None:
    """A handle whose operations timed out works again when the server goes on."""
    threads = [case.id() for _ in range(20)]

    async with case.open(**short_timeout(case.harness)) as cp:
        await asyncio.gather(*(cp.append(one, [{"n": 1}]) for one in threads))

        async with _paused(case):
            answers = await asyncio.gather(
                *(cp.load(one) for one in threads), return_exceptions=True
            )

        assert all(isinstance(answer, BackendUnavailable) for answer in answers)
        versions = await asyncio.gather(
            *(cp.append(one, [{"n": 2}], expected_version=1) for one in threads)
        )
        assert versions == [2] * len(threads)

        async with _paused(case):
            with raises(BackendUnavailable):
                await cp.append(threads[0], [{"n": 3}], expected_version=2)

        await append_at_loaded_version(cp, threads[0], late=1)
        call = case.call()
        await cp.record_issued(threads[0], call)
        done = await cp.record_result(threads[0], call.call_id, "paid")
        assert await cp.find_completed(call.idempotency_key) == done
