"""Time passes, in another zone too: what is on record stays as it is.

The clocks of this process are put forward, which a store sees that measures time by
Python's modules. With two rounds or more the suite also waits for a minute.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.claim import is_utc
from conformance.clauses.every_write import ELSEWHERE, places
from conformance.difference import check_equal
from conformance.failure import Failure
from conformance.operations import (
    Place,
    prepare,
    state,
    tell_outcome,
    writes_of,
)
from conformance.slowdown import slowdown
from conformance.workers import Worker, workers
from cpkit import BackendUnavailable, ListsThreads

MINUTE, DAY = 65, 24 * 60 * 60

_REAL = {
    name: getattr(time, name)
    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter")
}


class _Loop(asyncio.SelectorEventLoop):
    """Keeps the real time, so that timers fire when they should."""

    def time(self) -> float:
        return float(_REAL["monotonic"]())


class _Kind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, datetime)


def _shifted(ahead: Callable[[], int]) -> Any:
    """Return a `datetime` whose now is so many seconds ahead; it makes real ones."""

    class Shifted(datetime, metaclass=_Kind):
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return datetime(*args, **options)

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=ahead())

        @classmethod
        def utcnow(cls) -> Any:
            return datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=ahead())

    return Shifted


@contextmanager
def _clocks() -> Iterator[Callable[[int], None]]:
    """Yield a function that puts the clocks of this process forward, by seconds.

    They are those of the modules ``time`` and ``datetime``, also where a module that is
    not of Python itself has imported them by name.
    """
    ahead = 0

    def forward(seconds: int) -> None:
        nonlocal ahead
        ahead += seconds

    def ahead_of(name: str, real: Callable[[], Any]) -> Callable[[], Any]:
        unit = 1_000_000_000 if name.endswith("_ns") else 1
        return lambda: real() + ahead * unit

    instead: dict[int, Any] = {id(datetime): _shifted(lambda: ahead)}
    instead |= {id(real): ahead_of(name, real) for name, real in _REAL.items()}
    changed: list[tuple[Any, str, Any]] = []

    for module in [*sys.modules.values()]:
        package = getattr(module, "__name__", "").partition(".")[0]
        own = module in (time, sys.modules["datetime"])

        if own or package not in {*sys.stdlib_module_names, "conformance"}:
            for name, value in [*getattr(module, "__dict__", {}).items()]:
                if id(value) in instead:
                    changed.append((module, name, value))
                    setattr(module, name, instead[id(value)])

    try:
        yield forward
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


@clause("clock.nothing-expires", deadline=80)
def nothing_expires(case: Case) -> None:
    """After a minute and a day every answer is the same, and every write works."""

    async def run() -> None:
        with _clocks() as forward:
            async with case.open() as cp:
                await _pass_time(case, cp, forward)

    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(run())


async def _pass_time(case: Case, cp: Store, forward: Callable[[int], None]) -> None:
    made = await places(case, writes_of(cp), cp)
    before = [await state(cp, place, write.at) for write, place in made]

    for seconds in (MINUTE, DAY):
        if seconds == MINUTE and case.rounds >= 2:
            await asyncio.sleep(MINUTE)

        forward(seconds)

        for (write, place), expected in zip(made, before, strict=True):
            seen = await state(cp, place, write.at)
            check_equal(seen, expected, f"{seconds} seconds later")

        for n, key in enumerate(made[0][1].keys[1:3], 1):
            holder = await cp.record_issued(made[0][1].thread, case.call(key))
            assert holder is not None, f"key {n} is held {seconds} seconds later"

    for write, place in made:
        await write.do(cp, place)
        seen = await state(cp, place, write.at)
        assert await tell_outcome(write, seen, "a day after its thread"), write.name


@contextmanager
def _zone(name: str) -> Iterator[None]:
    """Let this process be in a time zone."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = name
    time.tzset()

    try:
        yield
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before

        time.tzset()


@clause("clock.any-time-zone")
async def any_time_zone(case: Case) -> None:
    """In another time zone every time is of now and in UTC, and reads back the same."""
    made = await places(case, writes_of(case.cp))

    with _zone(ELSEWHERE):
        for write, place in made:
            await write.do(case.cp, place)

        place = await prepare(case.cp, Place(case.id("p")))
        loaded = await case.cp.load(place.thread)
        done = await case.cp.find_completed(place.keys[1])
        assert loaded is not None
        assert done is not None
        times = [done.issued_at, done.resolved_at, loaded.pending[0].issued_at]
        cp: object = case.cp

        if isinstance(cp, ListsThreads):
            (info,) = await cp.list_threads(prefix=place.thread)
            times += [info.created_at, info.updated_at]

        assert all(map(is_utc, times))
        made = [(write, place) for write, place in made if write.at != "gone"]
        there = [await state(case.cp, place, write.at) for write, place in made]

    for (write, place), expected in zip(made, there, strict=True):
        seen = await state(case.cp, place, write.at)
        check_equal(seen, expected, f"{write.name}, read in two time zones")


WAIT = 0.25
"""Seconds that a handle waits for another one's lock, where the harness can say so."""

PATIENCE = 15.0
"""Seconds that an operation may take then, with much to spare."""

MOST = 60.0
"""Seconds that it may take where the harness cannot."""

TRIES = 30
"""How often the writers are stopped, until they hold a lock."""

HELD = 0.15
"""Seconds after which a write is taken to wait for a lock."""


@clause("clock.stopped-writers", "processes", level=Level.DURABLE, deadline=120)
async def stopped_writers(case: Case) -> None:
    """While writing processes are stopped, every operation ends in time."""
    options = case.harness.short_waits(WAIT * slowdown())
    limit = PATIENCE * slowdown() if options else MOST
    thread, key = case.id(), case.id("key")
    jobs: list[dict[str, Any]] = [
        {"does": "threads", "with": {"threads": [thread]}, "clients": ["a", "b"]},
        {
            "does": "keys",
            "with": {"threads": {"c": thread, "d": thread}, "keys": [key]},
            "clients": ["c", "d"],
        },
    ]

    for job in jobs:
        job["with"]["count"], job["seed"] = 100_000, case.random.random()

    async with case.open(**options) as cp, workers(case.harness, jobs) as started:
        for one in started:
            await one.line()  # it has begun

        readers = [asyncio.create_task(_drain(one)) for one in started]

        try:
            for _ in range(TRIES):
                await asyncio.sleep(0.01 + case.random.random() * 0.02)

                if await _stopped(case, cp, started, thread, key, limit):
                    break
        finally:
            for one in started:
                one.kill()

            await asyncio.gather(*readers)

        version = await cp.append(thread, [])
        assert await cp.append(thread, [{"token": "last"}]) == version + 1


async def _drain(worker: Worker) -> None:
    """Read what a worker prints, so that it goes on."""
    while await worker.line() is not None:
        pass


async def _stopped(
    case: Case, cp: Store, started: list[Worker], thread: str, key: str, limit: float
) -> bool:
    """Stop the writers, and use the store; return whether they held a lock."""
    uses: dict[str, Callable[[], Awaitable[object]]] = {
        "append": lambda: cp.append(thread, [{"token": "x"}]),
        "save_extra": lambda: cp.save_extra(thread, {"x": 1}),
        "record_issued": lambda: cp.record_issued(thread, case.call(key)),
        "another thread": lambda: cp.append(case.id(), [{"n": 1}]),
        "load": lambda: cp.load(thread),
        "find_completed": lambda: cp.find_completed(key),
    }

    for one in started:
        one.stop()

    try:
        tasks = {name: asyncio.ensure_future(use()) for name, use in uses.items()}
        _, waiting = await asyncio.wait(tasks.values(), timeout=HELD)
        _, late = await asyncio.wait(tasks.values(), timeout=limit)
    finally:
        for one in started:
            one.resume()

    waits = [name for name, task in tasks.items() if task in late]
    answers = await asyncio.gather(*tasks.values(), return_exceptions=True)

    if waits:
        expected = f"every operation to end within {limit:g} s"
        raise Failure(expected, f"{waits} wait", "another process is stopped")

    for name, answer in zip(tasks, answers, strict=True):
        if isinstance(answer, Exception) and not isinstance(answer, BackendUnavailable):
            told = f"{type(answer).__name__}: {answer}"
            raise Failure("an answer or BackendUnavailable", told, name)

    return bool(waiting)
