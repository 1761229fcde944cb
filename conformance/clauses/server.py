"""SIGKILL of the store's server: typed errors, and acknowledged writes survive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any

from conformance.case import Case, Store, raises
from conformance.clause import Level, clause
from conformance.clauses.every_write import places
from conformance.clauses.linearizable import check_keys, check_threads
from conformance.history.client import use_keys, use_threads
from conformance.history.op import Op
from conformance.history.recorder import Recorder
from conformance.operations import Place, Write, prepare, reads_of, writes_of
from cpkit import BackendUnavailable, StatesDurability, Survives

DURABLE = Level.DURABLE

CLIENTS = ["task 1", "task 2", "task 3"]

OPERATIONS, PACE = 60, 0.002
"""Operations of each client, and seconds between them. Some run after the kill."""


@asynccontextmanager
async def _down(case: Case) -> AsyncIterator[None]:
    """Kill the server, and start it again when the block ends."""
    await case.harness.kill()

    try:
        yield
    finally:
        await case.harness.start()


def operations(
    cp: Store, place: Place, made: list[tuple[Write, Place]]
) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return every read of a prepared place, and every write at its own."""
    found: dict[str, Callable[[], Awaitable[object]]] = {}

    for read in reads_of(cp):
        one = place.keys[1] if read.of_key else place.thread
        found[read.name] = partial(read.run, cp, one)

    for write, at in made:
        found[write.name] = partial(write.do, cp, at)

    return found


def _promises(case: Case) -> None:
    """Skip if the store does not promise to survive a kill of the server."""
    cp: object = case.cp

    if isinstance(cp, StatesDurability) and cp.durability.survives is Survives.NONE:
        case.skip(f"the store promises no durability: {cp.durability.words}")


async def _killed_under(
    case: Case, recorders: list[Recorder], work: list[Coroutine[Any, Any, None]]
) -> list[Op]:
    """Kill the server while clients work, start it again, and return the history.

    A client stops at its first error. The other clients work until they are done.
    """
    clients = [asyncio.create_task(one) for one in work]
    await asyncio.sleep(0.02 + case.random.random() * 0.15)

    async with _down(case):
        await asyncio.sleep(case.random.random() * 0.1)

    await asyncio.sleep(0.1)

    for client in clients:
        client.cancel()

    for answer in await asyncio.gather(*clients, return_exceptions=True):
        ended = (BackendUnavailable, asyncio.CancelledError, type(None))
        assert isinstance(answer, ended)

    return [op for recorder in recorders for op in recorder.history]


@clause("server.writes-survive", "server", level=DURABLE, deadline=50)
async def writes_survive(case: Case) -> None:
    """After SIGKILL of the server acknowledged appends and merges are stored whole."""
    _promises(case)

    for _ in range(case.times(2)):
        threads = [case.id() for _ in range(2)]
        recorders = [Recorder(case.cp, client) for client in CLIENTS]
        work = [
            use_threads(
                recorder, Random(case.random.random()), threads, OPERATIONS, PACE
            )
            for recorder in recorders
        ]
        history = await _killed_under(case, recorders, work)
        await check_threads(case.cp, threads, history)


@clause("server.claims-survive", "server", level=DURABLE, deadline=50)
async def claims_survive(case: Case) -> None:
    """After SIGKILL of the server acknowledged claims and results are stored."""
    _promises(case)

    for _ in range(case.times(2)):
        keys = [case.id("key") for _ in range(4)]
        threads = {client: case.id() for client in CLIENTS}
        recorders = [Recorder(case.cp, client) for client in CLIENTS]
        work = [
            use_keys(
                recorder, Random(case.random.random()), threads, keys, OPERATIONS, PACE
            )
            for recorder in recorders
        ]
        history = await _killed_under(case, recorders, work)
        await check_keys(case.cp, keys, history)


@clause("server.down-is-unavailable", "server", level=DURABLE, deadline=50)
async def down_is_unavailable(case: Case) -> None:
    """While the server is down every method, and opening, raises BackendUnavailable."""
    cp = case.cp
    made = await places(case, writes_of(cp))
    place = await prepare(cp, Place(case.id("p")))

    async def opening() -> str:
        async with case.open():
            return "an open handle"

    async with _down(case):
        uses: dict[str, Callable[[], Awaitable[object]]] = {
            **operations(cp, place, made),
            "opening a handle": opening,
        }

        # Concurrently, because a store may retry for some time before it raises.
        answers = await asyncio.gather(
            *(use() for use in uses.values()), return_exceptions=True
        )

    for name, answer in zip(uses, answers, strict=True):
        assert isinstance(answer, BackendUnavailable), name


@clause("server.handle-comes-back", "server", level=DURABLE, deadline=50)
async def handle_comes_back(case: Case) -> None:
    """A handle that lost its server works again when the server runs again."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}])

    async with _down(case):
        with raises(BackendUnavailable):
            await case.cp.load(thread)

    # Not expected to be 1: server.writes-survive checks durability.
    version = await case.cp.append(thread, [])
    written = await case.cp.append(thread, [{"n": 2}])
    assert written == version + 1
