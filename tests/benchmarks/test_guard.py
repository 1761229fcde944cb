"""The guard: no store is clearly slower than its goals, and it would find one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.goals import GOALS
from benchmarks.guard import missed
from cpkit.tools.benchmark import Contender, Stored

pytestmark = pytest.mark.long

Pair = tuple[Contender, Contender]


@pytest.mark.parametrize("driver", ["sqlite", "postgres", "redis", "file"])
async def test_no_ratio_to_the_floor_is_twice_its_goal(pair: Pair) -> None:
    """A miss must show in three tries, so noise does not fail the test."""
    floor, ours = pair
    assert await missed(floor, ours) == {}


class Slowed(Stored):
    """A store with a mistake in its append; another handle fills its threads."""

    def __init__(self, sound: Stored) -> None:
        super().__init__(sound.driver, sound.url)
        self._sound = sound
        self._turn = asyncio.Lock()

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        await self._sound.fill(thread, messages)


class LoadsFirst(Slowed):
    """Each append loads the thread first."""

    async def append(self, thread: str, message: Any) -> None:
        await self.load(thread)
        await super().append(thread, message)


class OneAtATime(Slowed):
    """Concurrent appends do not share a commit."""

    async def append(self, thread: str, message: Any) -> None:
        async with self._turn:
            await super().append(thread, message)


MISTAKES = [
    ("file", LoadsFirst, "append@10000", ["append@10000", "append@10000 / append@0"]),
    ("sqlite", OneAtATime, "tasks-64-one", ["tasks-64-one"]),
]


@pytest.mark.parametrize(("driver", "mistake", "workload", "found"), MISTAKES)
async def test_a_mistake_that_slows_a_store_down_is_found(
    pair: Pair, mistake: type[Slowed], workload: str, found: list[str]
) -> None:
    """The guard reports the goals that the mistake misses in every try.

    It looks up to four times: a disk that is busy for others can hide a mistake.
    """
    floor, ours = pair
    assert isinstance(ours, Stored)
    goals = [goal for goal in GOALS if goal.workload == workload]
    seen: list[list[str]] = []

    async with mistake(ours) as slow:
        while found not in seen and len(seen) < 4:
            seen.append(sorted(await missed(floor, slow, goals)))

    assert found in seen, seen
