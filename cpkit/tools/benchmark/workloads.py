"""The workloads, and the checks of their effect.

A *trial* is one workload on one contender. A *family* has the trials that run in the
same rounds. Operations are timed one by one. Concurrent operations are timed together,
and the time is divided by their number, so that every figure is in seconds per
operation. After the timed part the stored messages are counted and read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

from cpkit.records import JsonValue
from cpkit.tools.benchmark.contender import CALL_RESULT, Contender
from cpkit.tools.benchmark.messages import messages

__all__ = ["ABILITIES", "FAMILIES", "NORMAL", "QUICK", "Scale", "Trial", "trials"]

TAIL = 20

# A shorter thread is created again for each round, so that it keeps its nominal size.
# The appends of a round hardly change the size of a longer one.
_LONG = 5000


@dataclass(frozen=True)
class Scale:
    """The size of the workloads: ``operations`` a round, for at most ``seconds``.

    ``appends`` is the total of all tasks in a round of concurrent appends.
    """

    operations: int = 60
    seconds: float = 1.0
    appends: int = 4096
    sizes: tuple[int, ...] = (0, 100, 1_000, 10_000, 100_000)
    tasks: tuple[int, ...] = (1, 8, 64, 256)


NORMAL = Scale()
QUICK = Scale(operations=20, seconds=0.2, appends=128, sizes=(0, 1_000, 10_000))


class Trial:
    """One workload on one contender.

    ``collector_counts``: its operations create many objects, so that the time of
    Python's garbage collector is part of the result.
    """

    collector_counts = False

    def __init__(self, contender: Contender, workload: str, scale: Scale) -> None:
        self.contender = contender
        self.workload = workload
        self.scale = scale

    def __repr__(self) -> str:
        return f"{self.contender.driver}: {self.contender.name}, {self.workload}"

    async def prepare(self) -> None:
        """Create the data that the workload needs, if any."""

    async def measure(self) -> Sequence[float]:
        """Run one round, and return the seconds of each operation."""
        raise NotImplementedError

    async def check(self) -> None:
        """Raise if stored data is missing; most trials check in each round instead."""

    async def timed(
        self, operations: Iterable[Callable[[], Awaitable[object]]]
    ) -> list[float]:
        """Run operations one after another until the round's time is over."""
        took = []
        end = perf_counter() + self.scale.seconds

        for operation in operations:
            start = perf_counter()
            await operation()
            now = perf_counter()
            took.append(now - start)

            if now > end:
                break

        return took

    async def grown(self, label: str, size: int) -> str:
        """Create a thread with this many messages, at least one; return its id."""
        thread = self.contender.thread(label)
        await self.contender.fill(
            thread, self.contender.native(messages(0, max(size, 1)))
        )
        return thread

    async def expect(self, thread: str, version: int) -> None:
        """Raise unless the thread has this many messages and the right last one."""
        found = await self.contender.load(thread)

        if len(found) != version:
            raise AssertionError(f"load returned {len(found)} of {version} messages")

        if found[-1:] != self.contender.native(messages(version - 1, 1)):
            raise AssertionError("load returned a different last message")


class Append(Trial):
    """Appends by one task, one after another, to a thread of a given size."""

    def __init__(self, contender: Contender, size: int, scale: Scale) -> None:
        super().__init__(contender, f"append@{size}", scale)
        self.size = size
        self.thread = ""
        self.version = 0

    async def measure(self) -> Sequence[float]:
        if self.size < _LONG or not self.thread:
            await self.contender.forget([self.thread])
            self.thread = await self.grown("append", self.size)
            self.version = max(self.size, 1)

        native = self.contender.native(messages(self.version, self.scale.operations))
        took = await self.timed(
            [lambda m=m: self.contender.append(self.thread, m) for m in native]  # type: ignore[misc]  # mypy cannot infer lambdas with defaults
        )
        self.version += len(took)

        if self.size < _LONG:
            await self.expect(self.thread, self.version)

        return took

    async def check(self) -> None:
        await self.expect(self.thread, self.version)


class First(Trial):
    """The first append to a new thread."""

    def __init__(self, contender: Contender, scale: Scale) -> None:
        super().__init__(contender, "append-first", scale)

    async def measure(self) -> Sequence[float]:
        (native,) = self.contender.native(messages(0, 1))
        threads = [
            self.contender.thread("first") for _ in range(self.scale.operations // 2)
        ]
        took = await self.timed(
            [lambda t=t: self.contender.append(t, native) for t in threads]  # type: ignore[misc]  # as above
        )

        for thread in threads[: len(took)]:
            await self.expect(thread, 1)

        await self.contender.forget(threads)
        return took


class Tasks(Trial):
    """Appends by concurrent tasks, each to its own thread or all to one thread."""

    def __init__(
        self, contender: Contender, tasks: int, scale: Scale, *, one: bool
    ) -> None:
        super().__init__(contender, f"tasks-{tasks}-{'one' if one else 'many'}", scale)
        self.tasks = tasks
        self.one = one

    async def measure(self) -> Sequence[float]:
        threads = [
            await self.grown("tasks", 1) for _ in range(1 if self.one else self.tasks)
        ]
        each = max(self.scale.appends // self.tasks, 4)
        native = self.contender.native(messages(1, each * self.tasks))
        end = perf_counter() + self.scale.seconds
        done = [0] * len(threads)

        async def work(number: int) -> None:
            place = number % len(threads)
            first = 0 if not self.one else number * each

            for message in native[first : first + each]:
                await self.contender.append(threads[place], message)
                done[place] += 1

                if perf_counter() > end:
                    break

        start = perf_counter()
        await asyncio.gather(*map(work, range(self.tasks)))
        took = perf_counter() - start

        for thread, appended in zip(threads, done, strict=True):
            found = await self.contender.load(thread)

            if len(found) != appended + 1:
                raise AssertionError(
                    f"load returned {len(found)} of {appended + 1} messages"
                )

        await self.contender.forget(threads)
        return [took / sum(done)]


class Load(Trial):
    """Loads of a whole thread, decoded."""

    collector_counts = True

    def __init__(self, contender: Contender, size: int, scale: Scale) -> None:
        super().__init__(contender, f"load@{size}", scale)
        self.size = size
        self.thread = ""

    async def prepare(self) -> None:
        self.thread = await self.grown("load", self.size)
        await self.contender.forget([self.thread])

    async def measure(self) -> Sequence[float]:
        times = max(1, min(20, 20_000 // self.size))
        return await self.timed([lambda: self.contender.load(self.thread)] * times)

    async def check(self) -> None:
        await self.expect(self.thread, self.size)


class Tail(Load):
    """Reads of the last twenty messages of a thread."""

    collector_counts = False

    def __init__(self, contender: Contender, size: int, scale: Scale) -> None:
        super().__init__(contender, size, scale)
        self.workload = f"tail@{size}"

    async def measure(self) -> Sequence[float]:
        return await self.timed(
            [lambda: self.contender.tail(self.thread, TAIL)] * self.scale.operations
        )

    async def check(self) -> None:
        found = await self.contender.tail(self.thread, TAIL)

        if found != self.contender.native(messages(self.size - TAIL, TAIL)):
            raise AssertionError(f"read returned {TAIL} different messages")


class Calls(Trial):
    """A new call claimed, recorded and found; or a completed call found."""

    def __init__(self, contender: Contender, scale: Scale, *, fresh: bool) -> None:
        super().__init__(contender, f"calls-{'fresh' if fresh else 'replayed'}", scale)
        self.fresh = fresh
        self.thread = ""
        self.numbers = count()

    async def prepare(self) -> None:
        self.thread = await self.grown("calls", 1)
        await self.contender.cycle(self.thread, "finished")

    async def measure(self) -> Sequence[float]:
        found: list[JsonValue] = []

        async def cycle() -> None:
            name = f"call-{next(self.numbers)}"
            found.append(await self.contender.cycle(self.thread, name))

        async def replay() -> None:
            found.append(await self.contender.replay(self.thread, "finished"))

        operations = [cycle if self.fresh else replay] * self.scale.operations
        took = await self.timed(operations)

        if any(result != CALL_RESULT for result in found):
            raise AssertionError("find_completed returned a different result")

        return took


class Extra(Trial):
    """Writes of one key of extra, which has a hundred other keys."""

    def __init__(self, contender: Contender, scale: Scale) -> None:
        super().__init__(contender, "extra", scale)
        self.thread = ""
        self.numbers = count()

    async def prepare(self) -> None:
        self.thread = await self.grown("extra", 1)
        plan: dict[str, JsonValue] = {f"key {i}": f"{i} " * 30 for i in range(100)}
        await self.contender.merge(self.thread, plan)

    async def measure(self) -> Sequence[float]:
        async def merge() -> None:
            step: dict[str, Any] = {"step": next(self.numbers), "goal": "rebook " * 10}
            await self.contender.merge(self.thread, {"plan": step})

        took = await self.timed([merge] * self.scale.operations)
        found = await self.contender.extra(self.thread)
        plan = found["plan"]

        if len(found) != 101 or not isinstance(plan, dict):
            raise AssertionError(f"load returned {len(found)} of 101 extra keys")

        return took


class OpenClose(Trial):
    """Opening and closing the store."""

    def __init__(self, contender: Contender, scale: Scale) -> None:
        super().__init__(contender, "open-close", scale)

    async def measure(self) -> Sequence[float]:
        async def open_and_close() -> None:
            other = self.contender.another()
            await other.open()
            await other.close()

        return await self.timed([open_and_close] * max(2, self.scale.operations // 10))


def _appends(contender: Contender, scale: Scale) -> list[Trial]:
    return [
        First(contender, scale),
        *(Append(contender, size, scale) for size in scale.sizes),
    ]


def _tasks(contender: Contender, scale: Scale) -> list[Trial]:
    return [
        Tasks(contender, tasks, scale, one=one)
        for tasks in scale.tasks
        for one in (False, True)
        if tasks > 1 or not one
    ]


def _loads(contender: Contender, scale: Scale) -> list[Trial]:
    return [Load(contender, size, scale) for size in scale.sizes if size]


def _tails(contender: Contender, scale: Scale) -> list[Trial]:
    return [Tail(contender, size, scale) for size in scale.sizes if size]


def _calls(contender: Contender, scale: Scale) -> list[Trial]:
    return [
        Calls(contender, scale, fresh=True),
        Calls(contender, scale, fresh=False),
    ]


def _extra(contender: Contender, scale: Scale) -> list[Trial]:
    return [Extra(contender, scale)]


def _open(contender: Contender, scale: Scale) -> list[Trial]:
    return [OpenClose(contender, scale)]


FAMILIES: dict[str, Callable[[Contender, Scale], list[Trial]]] = {
    "append": _appends,
    "tasks": _tasks,
    "load": _loads,
    "tail": _tails,
    "calls": _calls,
    "extra": _extra,
    "open": _open,
}

ABILITIES = {name: "append" if name == "tasks" else name for name in FAMILIES}
"""The ability that a family needs from a contender."""


def trials(
    family: str, contenders: Iterable[Contender], scale: Scale = NORMAL
) -> list[Trial]:
    """Return the family's trials for the contenders that have its ability."""
    return [
        trial
        for contender in contenders
        if ABILITIES[family] in contender.abilities
        for trial in FAMILIES[family](contender, scale)
    ]
