"""A plain function that runs once for each name: a fresh call, and a replayed one.

A contender takes part if it has a method `once`, which calls a function through the
decorator that the library's documentation shows first. The function does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Protocol, runtime_checkable

from cpkit import Checkpointer, JsonValue
from cpkit.effects import once
from cpkit.tools.benchmark import Contender, Scale, Stored, Trial
from cpkit.tools.benchmark.contender import CALL_RESULT

__all__ = ["Ours", "OursWithoutSync", "RunsOnce", "once_trials"]


@runtime_checkable
class RunsOnce(Protocol):
    """What a contender of these trials has."""

    async def once(self, name: str) -> JsonValue:
        """Call the function for this name; return its result, or the first call's."""
        ...


class Ours(Stored):
    """cpkit, with a function behind `cpkit.effects.once`."""

    def use(self, cp: Checkpointer[Any]) -> None:
        super().use(cp)

        @once(cp, key=lambda name: name)
        async def charge(name: str) -> JsonValue:
            return CALL_RESULT

        self._charge = charge

    async def once(self, name: str) -> JsonValue:
        result: JsonValue = await self._charge(name)
        return result


class OursWithoutSync(Ours):
    """The same at the promise of the small libraries: what a dead process leaves."""

    def use(self, cp: Checkpointer[Any]) -> None:
        super().use(cp)
        self.abilities = frozenset()


class Once(Trial):
    """Calls of a function under new names, or under one name again and again."""

    def __init__(self, contender: Contender, scale: Scale, *, fresh: bool) -> None:
        super().__init__(contender, f"once-{'fresh' if fresh else 'replayed'}", scale)
        self.fresh = fresh
        self.names = (f"{contender.thread('once')}-{number}" for number in count())
        self.first = next(self.names)

    async def prepare(self) -> None:
        await self._call(self.first)

    async def measure(self) -> Sequence[float]:
        async def call() -> None:
            await self._call(next(self.names) if self.fresh else self.first)

        return await self.timed([call] * self.scale.operations)

    async def _call(self, name: str) -> None:
        assert isinstance(self.contender, RunsOnce)
        found = await self.contender.once(name)

        if found != CALL_RESULT:
            raise AssertionError(f"the function returned {found!r}")


def once_trials(contenders: Iterable[Contender], scale: Scale) -> list[Trial]:
    """Return the trials of the contenders that have a decorator."""
    return [
        Once(contender, scale, fresh=fresh)
        for contender in contenders
        if isinstance(contender, RunsOnce)
        for fresh in (True, False)
    ]
