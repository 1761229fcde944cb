"""A store that one process may hold: other processes are refused, and harm nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.clock import MOST, PATIENCE, WAIT
from conformance.difference import check_equal
from conformance.failure import Failure
from conformance.operations import MORE, Place, prepare, state
from conformance.slowdown import slowdown
from conformance.workers import Worker
from cpkit import BackendUnavailable, StatesDurability
from cpkit.records import Survives

TWICE = 2
"""A process that is refused may take the lock away with it: the next one shows it."""


@clause("kill.one-process-at-a-time", "one process", level=Level.DURABLE, deadline=150)
def one_process_at_a_time(case: Case) -> None:
    """While a process has the store open, no other opens or harms it; later one can."""
    asyncio.run(_take_turns(case))


async def _take_turns(case: Case) -> None:
    place, other = Place(case.id("p")), Place(case.id("p"))
    options = case.harness.short_waits(WAIT * slowdown())
    limit = PATIENCE * slowdown() if options else MOST

    async with case.open() as cp:
        _needs_files(case, cp)
        await prepare(cp, place)

        async with case.open():
            pass  # closing it releases nothing that the first handle needs

        for _ in range(TWICE):
            before = await state(cp, place)

            async with _opening(case, limit, options) as (_, answer):
                _check_refused(answer)

            seen = await state(cp, place)
            check_equal(seen, before, "after another process was refused")
            await cp.append(place.thread, MORE)

        before = await state(cp, place)

    async with _opening(case, limit) as (worker, answer):
        _check_opened(answer, "another process, after the first one closed the store")
        worker.go()
        looked = {"token": place.token, "look": "thread"}
        where = "in another process, after the first one closed the store"
        check_equal(await worker.ask(looked), before, where)
        await worker.ask({"token": other.token, "write": "append"})

        for _ in range(TWICE):
            _check_refused(await _answer(case, limit, options))

        where = "in a process that holds the store, after another one was refused"
        check_equal(await worker.ask(looked), before, where)
        await worker.ask({"token": other.token, "write": "append"})

    where = "after SIGKILL of the process that held the store"
    _check_opened(await _answer(case, limit, {}), f"this process, {where}")

    async with case.open() as cp:
        check_equal(await state(cp, place), before, where)
        loaded = await cp.load(other.thread)
        assert loaded is not None, where
        check_equal(loaded.messages, [*MORE, *MORE], where)


def _needs_files(case: Case, cp: Store) -> None:
    """Skip where the state ends with the process: each one has a store of its own."""
    states: object = cp

    if not isinstance(states, StatesDurability):
        case.skip("the store does not state its durability")
    elif states.durability.survives is Survives.NONE:
        case.skip("the state ends with its process, so no other one can open it")


@asynccontextmanager
async def _opening(
    case: Case, limit: float, options: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Worker, Any]]:
    """Let another process open the store, and yield its answer; kill it at the end."""
    job = {"does": "mirror", "options": options or {}, "clients": [], "seed": 1}
    worker = Worker(case.harness, job)

    try:
        await worker.reaches("opening")

        try:
            async with asyncio.timeout(limit):
                answer = await worker.line()
        except TimeoutError:
            expected = "another process that opens the store, or is refused"
            raise Failure(f"{expected}, within {limit:g} s", "it waits") from None

        if answer is None:  # it crashed
            answer = worker.errors()

        yield worker, answer
    finally:
        worker.close()


async def _answer(case: Case, limit: float, options: dict[str, Any]) -> Any:
    """Open the store in this process, and return what a worker would answer."""
    try:
        async with asyncio.timeout(limit), case.open(**options):
            return "ready"
    except BackendUnavailable as exc:
        return {"refused": type(exc).__name__, "reason": str(exc)}


def _check_opened(answer: Any, who: str) -> None:
    """Raise `Failure` unless the store was opened."""
    if answer != "ready":
        raise Failure(f"an open store in {who}", _told(answer))


def _check_refused(answer: Any) -> None:
    """Raise `Failure` unless the opening raised BackendUnavailable."""
    if not _told(answer).startswith(BackendUnavailable.__name__):
        expected = "BackendUnavailable, while another process has the store open"
        seen = "it has opened the store" if answer == "ready" else _told(answer)
        raise Failure(expected, seen)


def _told(answer: Any) -> str:
    """Return an answer as text: a process that crashed has printed a traceback."""
    if isinstance(answer, dict):
        return f"{answer['refused']}: {answer['reason']}"

    return f"{answer}".strip().rpartition("\n")[2]
