"""A proxy loses one request or one answer: the error is true, nothing runs twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.failure import Failure, Skip
from conformance.proxy import FAULTS, Fault, Proxy
from cpkit import BackendUnavailable

DURABLE = Level.DURABLE

TIMEOUT = 1.0
"""Seconds: the option ``timeout``, where the harness takes it."""

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


async def _written(case: Case, name: str, fault: Fault) -> list[_Write]:
    """Do a write once for each of its round trips, with the fault at that trip."""
    place = case.harness.server_address()
    assert place is not None
    found: list[_Write] = []

    for trip in range(1, TRIPS + 1):
        async with Proxy(*place) as proxy:
            through = case.harness.through("127.0.0.1", proxy.port)
            options = {"timeout": TIMEOUT} if "timeout" in through.options else {}

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
    assert await cp.append(thread, [{"n": 2}]) == loaded.version + 1


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
