"""A store that fails in every way a store may fail, in front of the reference.

Each worker reaches the one reference store through its own `FaultyStore`, which has
only the six methods, or through a `FaultyAbleStore`, which also has the abilities that
the layers use. Before and after each operation the worker may be delayed, the clock may
jump, or the worker may die. The operation itself may be refused, lost before the store
got it, or applied with its answer lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

from cpkit import (
    BackendUnavailable,
    CallRecord,
    CheckpointData,
    Checkpointer,
    JsonValue,
    ThreadInfo,
    ToolCall,
)
from tests.broken.reference import Reference
from tests.simulation.loop import SimulatedLoop

__all__ = ["Crash", "FaultyAbleStore", "FaultyStore", "Life", "Weather"]

T = TypeVar("T")


class Crash(BaseException):
    """The worker died; nothing that it does afterwards has an effect."""


class Weather:
    """How likely faults are, and how many of them remain."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.calm = False
        self.faults = random.choice([0.0, 0.05, 0.15])
        self.crashes = random.choice([0.0, 0.03, 0.1])
        self.delays = random.choice([0.02, 0.1])
        self.budget = random.randrange(12)

    def strikes(self, chance: float) -> bool:
        """Decide whether a fault happens now."""
        if self.calm or self.budget == 0 or self.random.random() >= chance:
            return False

        self.budget -= 1
        return True

    async def delay(self) -> None:
        """Sleep: mostly for no time, sometimes for longer than any timeout."""
        if self.calm or self.random.random() >= self.delays:
            await asyncio.sleep(0)
            return

        loop = asyncio.get_running_loop()
        kind = self.random.randrange(4)

        if kind == 0 and isinstance(loop, SimulatedLoop):
            loop.jump(self.random.uniform(0, 30))

        await asyncio.sleep(self.random.uniform(0, (0.1, 1, 5, 20)[kind]))


class Life:
    """A worker process, from its start until it finishes or dies."""

    def __init__(self, name: str, weather: Weather, mortal: bool = True) -> None:
        self.name = name
        self.weather = weather
        self.alive = True
        self._mortal = mortal

    async def point(self) -> None:
        """Pass a point at which the worker may be delayed or die."""
        self.check()

        if self._mortal and self.weather.strikes(self.weather.crashes):
            self.alive = False

        self.check()
        await self.weather.delay()
        self.check()

    def check(self) -> None:
        """Raise ``Crash`` if the worker is dead."""
        if not self.alive:
            raise Crash(self.name)


class FaultyStore:
    """The six methods, as one worker sees them; ``applied`` gets each operation."""

    def __init__(
        self,
        inner: Checkpointer[Any],
        life: Life,
        applied: Callable[[Life, str, Any], None],
    ) -> None:
        self._inner = inner
        self._life = life
        self._applied = applied

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        return await self._read(lambda: self._inner.load(thread_id), thread_id)

    async def append(
        self,
        thread_id: str,
        messages: Sequence[Any],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        return await self._write(
            "append",
            thread_id,
            lambda: self._inner.append(
                thread_id, messages, expected_version=expected_version, extra=extra
            ),
        )

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await self._write(
            "save_extra",
            thread_id,
            lambda: self._inner.save_extra(thread_id, extra),
            extra,
        )

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        return await self._write(
            "record_issued",
            thread_id,
            lambda: self._inner.record_issued(thread_id, call),
            call,
        )

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        return await self._write(
            "record_result",
            thread_id,
            lambda: self._inner.record_result(
                thread_id, call_id, result, success=success
            ),
        )

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        return await self._read(lambda: self._inner.find_completed(idempotency_key))

    def _changed(self, thread_id: str) -> None:
        """Hear of a change that was just applied; nothing watches this store."""

    async def _read(
        self, operation: Callable[[], Awaitable[T]], subject: Any = None
    ) -> T:
        await self._life.point()

        if self._life.weather.strikes(self._life.weather.faults):
            raise BackendUnavailable("sim", "refused")

        found = await operation()
        self._applied(self._life, "read", (subject, found))
        await self._life.point()
        return found

    async def _write(
        self,
        name: str,
        thread_id: str,
        operation: Callable[[], Awaitable[T]],
        subject: Any = None,
    ) -> T:
        await self._life.point()
        weather = self._life.weather
        fault = None

        if weather.strikes(weather.faults):
            fault = weather.random.choice(["refused", "lost", "unanswered"])

        if fault == "refused":
            raise BackendUnavailable("sim", "refused")

        if fault == "lost":
            raise BackendUnavailable("sim", "request lost", maybe_applied=True)

        answer = await operation()
        self._applied(self._life, name, (subject, answer))
        self._changed(thread_id)
        await self._life.point()

        if fault == "unanswered":
            raise BackendUnavailable("sim", "answer lost", maybe_applied=True)

        return answer


class FaultyAbleStore(FaultyStore):
    """The abilities that the layers use besides, as one worker sees them."""

    def __init__(
        self,
        inner: Reference,
        life: Life,
        applied: Callable[[Life, str, Any], None],
    ) -> None:
        super().__init__(inner, life, applied)
        self._able = inner

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        return await self._read(lambda: self._able.list_calls(thread_id))

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        return await self._read(lambda: self._able.find_call(idempotency_key))

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        return await self._read(lambda: self._able.list_threads(**options))

    async def delete_thread(
        self,
        thread_id: str,
        *,
        expected_version: int | None = None,
        forget_keys: bool = False,
    ) -> None:
        await self._write(
            "delete_thread",
            thread_id,
            lambda: self._able.delete_thread(
                thread_id, expected_version=expected_version, forget_keys=forget_keys
            ),
        )
