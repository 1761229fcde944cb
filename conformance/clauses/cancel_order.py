"""Cancellation: a cancelled write is whole, and decided before later operations.

Writes of every kind are cancelled at their first awaits, and after a part of the time
that such a write takes. After each the caller looks with the same handle, and remembers
what it saw. If a write takes effect later, the same look gives another answer at the
end.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.difference import check_equal
from conformance.history.interrupt import cancelled_after, cancelled_at
from conformance.operations import (
    Place,
    Write,
    prepare,
    state,
    tell_outcome,
    writes_of,
)

CONCURRENT = Level.CONCURRENT

AT_ONCE = 8
"""Writes that are cancelled at the same time, so that they queue and share commits."""

AWAITS = (1, 1, 2, 2, 3, 5)
"""The await at which a write is cancelled. It often waits once: for its place."""

LATE = 0.6
"""Seconds between the two looks, in which nothing may change any more."""


async def _do(cp: Store, write: Write, place: Place) -> None:
    await write.do(cp, place)


async def _usual(case: Case, cp: Store, write: Write) -> float:
    """Return the seconds that a write of this kind takes."""
    place = await prepare(cp, Place(case.id("p")), write)
    start = time.perf_counter()
    await write.do(cp, place)
    return time.perf_counter() - start


async def _ways(case: Case, cp: Store) -> list[tuple[Write, int, float]]:
    """Return for each kind of write the awaits and the times to cancel it, mixed."""
    found: list[tuple[Write, int, float]] = []

    for write in writes_of(cp):
        usual = await _usual(case, cp, write)
        awaits = AWAITS * case.times(1) if case.rounds >= 1 else sorted({*AWAITS})
        found += [(write, suspension, 0.0) for suspension in awaits]
        found += [
            (write, 0, usual * 1.3 * case.random.random())
            for _ in range(case.times(len(AWAITS)))
        ]

    case.random.shuffle(found)
    return found


async def _cancel(cp: Store, way: tuple[Write, int, float], place: Place) -> None:
    write, suspension, seconds = way

    if suspension:
        await cancelled_at(_do(cp, write, place), suspension)
    else:
        await cancelled_after(_do(cp, write, place), seconds)


class _Look(NamedTuple):
    """What a look at the place of a cancelled write has found, and when."""

    write: Write
    place: Place
    found: dict[str, Any]
    at: float


async def _check_later(cp: Store, looks: list[_Look]) -> None:
    """Look again, each time after `LATE`: nothing has changed since the first look."""
    for start in range(0, len(looks), AT_ONCE):
        some = looks[start : start + AT_ONCE]
        await asyncio.sleep(some[-1].at + LATE - time.monotonic())
        found = await asyncio.gather(
            *(state(cp, look.place, look.write.at) for look in some)
        )

        for later, look in zip(found, some, strict=True):
            where = f"{look.write.name}, some time after it was cancelled"
            check_equal(later, look.found, where)


@clause("cancel.write-is-decided", level=CONCURRENT, deadline=60)
async def write_is_decided(case: Case) -> None:
    """A cancelled write is whole, and every later look of its handle sees its end."""
    cp = case.cp
    looks: list[_Look] = []

    async def one(way: tuple[Write, int, float]) -> None:
        write = way[0]
        place = await prepare(cp, Place(case.id("p")), write)
        await _cancel(cp, way, place)
        found = await state(cp, place, write.at, case.random)
        await tell_outcome(write, found, "cancelled")
        looks.append(_Look(write, place, found, time.monotonic()))

    ways = await _ways(case, cp)

    for start in range(0, len(ways), AT_ONCE):
        await asyncio.gather(*map(one, ways[start : start + AT_ONCE]))

    await _check_later(cp, looks)


@clause("cancel.close-waits", "handles", level=CONCURRENT, deadline=60)
async def close_waits(case: Case) -> None:
    """When a handle is closed, every write that was cancelled on it is decided."""
    looks: list[_Look] = []
    ways = await _ways(case, case.cp)

    for start in range(0, len(ways), AT_ONCE):
        some = ways[start : start + AT_ONCE]
        places = [Place(case.id("p")) for _ in some]
        await asyncio.gather(
            *(
                prepare(case.cp, at, way[0])
                for way, at in zip(some, places, strict=True)
            )
        )

        async with case.open() as cp:
            await asyncio.gather(
                *(_cancel(cp, way, at) for way, at in zip(some, places, strict=True))
            )

        found = await asyncio.gather(
            *(
                state(case.cp, at, way[0].at)
                for way, at in zip(some, places, strict=True)
            )
        )

        looked = time.monotonic()

        for (write, _, _), place, first in zip(some, places, found, strict=True):
            await tell_outcome(write, first, "cancelled before the close")
            looks.append(_Look(write, place, first, looked))

    await _check_later(case.cp, looks)
