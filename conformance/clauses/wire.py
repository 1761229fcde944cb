"""A proxy loses one request or one answer: the error is true, nothing runs twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.late import append_at_loaded_version
from conformance.difference import check_equal
from conformance.explain import explain
from conformance.failure import Failure, Skip
from conformance.harness import Harness
from conformance.operations import (
    Place,
    Write,
    prepare,
    reads_of,
    state,
    tell_outcome,
    writes_of,
)
from conformance.proxy import FAULTS, Fault, Proxy
from conformance.slowdown import slowdown
from cpkit import BackendUnavailable

DURABLE = Level.DURABLE

TIMEOUT = 1.0
"""Seconds: the option ``timeout`` on a quiet machine, where the harness takes it."""

PATIENCE = 15.0
"""Seconds that an operation with ``timeout=1`` may take, with much to spare."""

CALLERS = 64
"""Operations at once: more than a handle has connections."""

TRIPS = 4
"""Round trips of an operation at which a fault is tried."""

AT_ONCE = 10
"""Handles that are open at the same time."""

COMMON = ["append", "save_extra", "claim", "result"]
"""Writes that are tried with every fault; the others with two of them."""

FEWER = [Fault("request", "half"), Fault("answer", "cut")]


@dataclass
class _Lost:
    """One write beside a fault, and its outcome."""

    write: Write
    fault: Fault
    trip: int
    answer: Any = None
    applied: bool = False

    def __str__(self) -> str:
        return f"{self.write.name}, with {self.fault} at its round trip {self.trip}"


def short_timeout(harness: Harness) -> dict[str, float]:
    """Return the option ``timeout``, longer on a busy machine; empty if not taken."""
    return {"timeout": TIMEOUT * slowdown()} if "timeout" in harness.options else {}


async def _written(case: Case, write: Write, fault: Fault) -> list[_Lost]:
    """Do a write once for each of its round trips, with the fault at that trip."""
    place = case.harness.server_address()
    assert place is not None
    found: list[_Lost] = []

    for trip in range(1, TRIPS + 1):
        async with Proxy(*place) as proxy:
            through = case.harness.through("127.0.0.1", proxy.port)
            options = short_timeout(through)

            try:
                handle: Any = through.open(**options)
                cp: Store = await handle.__aenter__()
            except BackendUnavailable as exc:
                raise Skip(f"the store does not open through a proxy: {exc}") from exc

            try:
                lost = _Lost(write, fault, trip)
                await _do(case, cp, lost, proxy)
            finally:
                proxy.stop()
                await handle.aclose()

            if not proxy.lost:
                return found

            found.append(lost)

    return found


async def _prepared(case: Case, cp: Store, write: Write) -> Place:
    """Do a write once, so that connections and statements are prepared for the next.

    A write beside it that a fault has stopped can hold a lock that this one needs,
    until its own time is over.
    """
    for turns_left in reversed(range(TRIPS)):
        first, place = Place(case.id("p")), Place(case.id("p"))

        try:
            await write.do(cp, await prepare(cp, first, write))
            return await prepare(cp, place, write)
        except BackendUnavailable:
            if not turns_left:
                raise

    raise AssertionError("the last turn returns or raises")


async def _do(case: Case, cp: Store, lost: _Lost, proxy: Proxy) -> None:
    """Do the write beside the fault, and look in the store its outcome."""
    write = lost.write
    place = await _prepared(case, cp, write)
    proxy.lose(lost.fault, lost.trip)

    try:
        lost.answer = await write.do(cp, place)
    except Exception as exc:
        lost.answer = exc

    proxy.stop()

    try:
        found: dict[str, Any] = {}

        # The server may apply it late, between two of the reads.
        while found != (again := await state(case.cp, place, write.at)):
            found = again

        lost.applied = await tell_outcome(write, found, f"{lost}")

        # The handle works as before, whatever the fault has left behind.
        await append_at_loaded_version(cp, getattr(place, write.at), late=1)
    except Exception as exc:
        told = explain(exc, _do)
        where = f"after {lost}\n{told.where}"
        raise Failure(told.expected, told.seen, where) from exc


@clause("wire.lost-answers-are-told", "proxy", level=DURABLE, deadline=90)
async def lost_answers_are_told(case: Case) -> None:
    """A write whose answer is lost is sent once; maybe_applied=False is always true."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(write: Write, fault: Fault) -> list[_Lost]:
        async with slots:
            return await _written(case, write, fault)

    pairs = [
        (write, fault)
        for write in writes_of(case.cp)
        for fault in (FAULTS if write.name in COMMON else FEWER)
    ]
    found = await asyncio.gather(*(one(*pair) for pair in pairs))
    every = [lost for some in found for lost in some]

    if not every:
        case.skip("no operation goes through the proxy")

    for lost in every:
        _check_told(lost)

    for fault in FEWER:
        await _check_reads(case, fault)


async def _check_reads(case: Case, fault: Fault) -> None:
    """Lose a part of each read: its answer is the right one, or an error."""
    address = case.harness.server_address()
    assert address is not None
    place = await prepare(case.cp, Place(case.id("p")))

    async with Proxy(*address) as proxy:
        through = case.harness.through("127.0.0.1", proxy.port)
        handle: Any = through.open(**short_timeout(through))
        cp: Store = await handle.__aenter__()

        try:
            for read in reads_of(cp):
                one = place.keys[1] if read.of_key else place.thread
                expected = await read.run(case.cp, one)

                with suppress(BackendUnavailable):
                    await read.run(cp, one)  # connects, and prepares statements

                where = f"{read.name}, with {fault} at its round trip 1"
                proxy.lose(fault)

                with suppress(BackendUnavailable):
                    seen = await read.run(cp, one)
                    check_equal(seen, expected, where)

                proxy.stop()
        finally:
            proxy.stop()
            await handle.aclose()


def _check_told(lost: _Lost) -> None:
    answer = lost.answer
    told = f"{type(answer).__name__}: {answer}"

    if isinstance(answer, BackendUnavailable):
        if lost.applied and not answer.maybe_applied:
            expected = "maybe_applied=True, because the write is in the store"
            raise Failure(expected, told, str(lost))
    elif isinstance(answer, Exception):
        raise Failure("BackendUnavailable, or the answer of one write", told, str(lost))
    elif not lost.applied:
        raise Failure("a write that is applied", "an answer without it", str(lost))
    elif lost.write.method == "record_issued" and answer is not None:
        raise Failure(
            "None from the claim, or BackendUnavailable",
            f"{answer!r}: the store has sent the claim twice",
            str(lost),
        )


@asynccontextmanager
async def _relayed(case: Case) -> AsyncIterator[tuple[Proxy, Store]]:
    """Open a handle through a proxy, with a short timeout."""
    place = case.harness.server_address()
    assert place is not None

    async with Proxy(*place) as proxy:
        through = case.harness.through("127.0.0.1", proxy.port)

        if "timeout" not in through.options:
            case.skip("the harness opens stores without timeout=")

        handle: Any = through.open(**short_timeout(through))

        try:
            cp: Store = await handle.__aenter__()
        except BackendUnavailable as exc:
            raise Skip(f"the store does not open through a proxy: {exc}") from exc

        try:
            yield proxy, cp
        finally:
            proxy.stalls = proxy.stalls_requests = False
            await handle.aclose()


async def _in_time(uses: list[Awaitable[object]], where: str) -> list[object]:
    """Return what the uses answer or raise, or fail if one takes too long."""
    tasks = [asyncio.ensure_future(use) for use in uses]
    _, late = await asyncio.wait(tasks, timeout=PATIENCE * slowdown())

    for task in late:
        task.cancel()

    answers = await asyncio.gather(*tasks, return_exceptions=True)

    if late:
        raise Failure(
            f"BackendUnavailable after timeout={TIMEOUT * slowdown():g}",
            f"{len(late)} of {len(tasks)} operations still wait",
            where,
        )

    return list(answers)


@clause("wire.one-way-is-unavailable", "proxy", level=DURABLE, deadline=120)
async def one_way_is_unavailable(case: Case) -> None:
    """While the link passes one direction only, everything raises in time."""
    async with _relayed(case) as (proxy, cp):
        for cut in ("answers", "requests"):
            made = [(write, Place(case.id("p"))) for write in writes_of(cp)]
            place = await prepare(cp, Place(case.id("p")))
            await asyncio.gather(*(prepare(cp, at, write) for write, at in made))
            proxy.stalls, proxy.stalls_requests = cut == "answers", cut == "requests"
            uses: list[Awaitable[object]] = [
                read.run(cp, place.keys[1] if read.of_key else place.thread)
                for read in reads_of(cp)
            ]
            uses += [write.do(cp, at) for write, at in made]
            answers = await _in_time(uses, f"the link loses {cut}")
            proxy.stalls = proxy.stalls_requests = False

            for answer in answers:
                assert isinstance(answer, BackendUnavailable), f"the link loses {cut}"

            await append_at_loaded_version(cp, place.thread, late=1)


async def _load(cp: Store, thread: str) -> Any:
    """Load a thread; the handle connects again first, which may take several tries."""
    for _ in range(10):
        with suppress(BackendUnavailable):
            return await cp.load(thread)

    return await cp.load(thread)


@clause("wire.exhausted-is-unavailable", "proxy", level=DURABLE, deadline=120)
async def exhausted_is_unavailable(case: Case) -> None:
    """Operations that wait for a connection of a stalled link raise in time."""
    threads = [case.id() for _ in range(CALLERS)]

    async with _relayed(case) as (proxy, cp):
        await asyncio.gather(*(cp.append(one, [{"n": 1}]) for one in threads))
        proxy.stalls = True
        uses: list[Awaitable[object]] = [cp.load(one) for one in threads]
        uses += [cp.save_extra(one, {"k": 1}) for one in threads]
        answers = await _in_time(uses, f"{len(uses)} operations on a stalled link")
        proxy.stalls = False

        for answer in answers:
            assert isinstance(answer, BackendUnavailable)

        # No connection is lost: as many operations as before run again.
        loaded = await asyncio.gather(*(_load(cp, one) for one in threads))

        for found, written in zip(loaded, answers[CALLERS:], strict=True):
            assert found is not None
            assert isinstance(written, BackendUnavailable)
            assert written.maybe_applied or not found.extra
