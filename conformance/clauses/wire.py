"""A proxy loses one request or one answer: the error is true, nothing runs twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.late import append_at_loaded_version
from conformance.failure import Failure, Skip
from conformance.harness import Harness
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

AT_ONCE = 6
"""Handles that are open at the same time."""

WRITES = ["append", "save_extra", "record_issued", "record_result"]


@dataclass
class _Write:
    """One write beside a fault, and its outcome."""

    name: str
    fault: Fault
    trip: int
    answer: Any = None
    applied: int = 0
    """How often it was applied, counted in the store."""

    @property
    def said_nothing_written(self) -> bool:
        unavailable = isinstance(self.answer, BackendUnavailable)
        return unavailable and not self.answer.maybe_applied

    def __str__(self) -> str:
        return f"{self.name}, with {self.fault} at its round trip {self.trip}"


def short_timeout(harness: Harness) -> dict[str, float]:
    """Return the option ``timeout``, longer on a busy machine; empty if not taken."""
    return {"timeout": TIMEOUT * slowdown()} if "timeout" in harness.options else {}


async def _written(case: Case, name: str, fault: Fault) -> list[_Write]:
    """Do a write once for each of its round trips, with the fault at that trip."""
    place = case.harness.server_address()
    assert place is not None
    found: list[_Write] = []

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
                write = _Write(name, fault, trip)
                await _do(case, cp, write, proxy)
            finally:
                proxy.stop()
                await handle.aclose()

            if not proxy.lost:
                return found

            found.append(write)

    return found


async def _do(case: Case, cp: Store, write: _Write, proxy: Proxy) -> None:
    """Do the write beside the fault, and count in the store how often it happened."""
    thread, first, call = case.id(), case.call(), case.call()

    # The same once before, so that connections and statements are prepared.
    await cp.append(thread, [{"n": 0}])
    await cp.save_extra(thread, {"before": 0})
    await cp.record_issued(thread, first)
    await cp.record_result(thread, first.call_id, "first")

    if write.name == "record_result":
        await cp.record_issued(thread, call)

    uses: dict[str, Callable[[], Awaitable[Any]]] = {
        "append": lambda: cp.append(thread, [{"n": 1}]),
        "save_extra": lambda: cp.save_extra(thread, {"n": 1}),
        "record_issued": lambda: cp.record_issued(thread, call),
        "record_result": lambda: cp.record_result(thread, call.call_id, "done"),
    }
    proxy.lose(write.fault, write.trip)

    try:
        write.answer = await uses[write.name]()
    except Exception as exc:
        write.answer = exc

    proxy.stop()
    loaded = await case.cp.load(thread)
    assert loaded is not None
    pending = [record.call.call_id for record in loaded.pending]
    done = await case.cp.find_completed(call.idempotency_key)
    write.applied = {
        "append": loaded.version - 1,
        "save_extra": int("n" in loaded.extra),
        "record_issued": int(call.call_id in pending),
        "record_result": int(done is not None),
    }[write.name]

    # The handle works as before, whatever the fault has left behind.
    await append_at_loaded_version(cp, thread, late=1)


async def _all_writes(case: Case) -> list[_Write]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(name: str, fault: Fault) -> list[_Write]:
        async with slots:
            return await _written(case, name, fault)

    found = await asyncio.gather(*(one(n, fault) for n in WRITES for fault in FAULTS))
    writes = [write for some in found for write in some]

    if not writes:
        case.skip("no operation goes through the proxy")

    for write in writes:
        if isinstance(write.answer, Exception) and not isinstance(
            write.answer, BackendUnavailable
        ):
            kind = type(write.answer).__name__
            raise Failure("BackendUnavailable", f"{kind}: {write.answer}", str(write))

    return writes


@clause("wire.nothing-written-is-true", "proxy", level=DURABLE, deadline=60)
async def nothing_written_is_true(case: Case) -> None:
    """Where an answer or a request is lost, maybe_applied=False is always true."""
    for write in await _all_writes(case):
        if write.said_nothing_written and write.applied:
            raise Failure(
                "maybe_applied=True, because the write is in the store",
                f"{type(write.answer).__name__}: {write.answer}",
                str(write),
            )


@clause("wire.no-write-is-repeated", "proxy", level=DURABLE, deadline=60)
async def no_write_is_repeated(case: Case) -> None:
    """A write whose answer was lost is not sent again by the store."""
    for write in await _all_writes(case):
        failed = isinstance(write.answer, Exception)

        if write.applied > 1 or (write.applied == 0 and not failed):
            raise Failure(
                "a write that is applied once",
                f"applied {write.applied} times, answered with {write.answer!r}",
                str(write),
            )

        if write.name == "record_issued" and not failed and write.answer is not None:
            raise Failure(
                "None from the claim, or BackendUnavailable",
                f"{write.answer!r}: the store has sent the claim twice",
                str(write),
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
            thread, call, new = case.id(), case.call(), case.call()
            await cp.append(thread, [{"n": 1}])
            await cp.record_issued(thread, call)
            proxy.stalls, proxy.stalls_requests = cut == "answers", cut == "requests"
            uses: list[Awaitable[object]] = [
                cp.load(thread),
                cp.append(thread, [{"n": 2}], expected_version=1),
                cp.save_extra(thread, {"k": 1}),
                cp.record_issued(thread, new),
                cp.record_result(thread, call.call_id, 1),
                cp.find_completed(call.idempotency_key),
            ]
            answers = await _in_time(uses, f"the link loses {cut}")
            proxy.stalls = proxy.stalls_requests = False

            for answer in answers:
                assert isinstance(answer, BackendUnavailable), f"the link loses {cut}"

            await append_at_loaded_version(cp, thread, late=1)


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
