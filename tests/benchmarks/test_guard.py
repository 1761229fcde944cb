"""The guard: an append to a long thread costs what one to an empty thread costs.

Ratios to the floor depend on what a sync costs on the machine's disk, so they are left
to ``python -m benchmarks.guard``. What they stand for is tested by counts: syncs, round
trips and statements, in ``test_cost`` and ``test_round_trips`` of the stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.goals import GOALS
from benchmarks.guard import missed
from cpkit.tools.benchmark import Contender, Stored

pytestmark = pytest.mark.long

Pair = tuple[Contender, Contender]

GROWTH = [goal for goal in GOALS if goal.kind == "growth"]


@pytest.mark.parametrize("driver", ["sqlite", "postgres", "redis", "file"])
async def test_an_append_does_not_grow_with_its_thread(pair: Pair) -> None:
    """A miss must show in three tries, so noise does not fail the test."""
    floor, ours = pair
    assert GROWTH
    assert await missed(floor, ours, GROWTH) == {}


class LoadsFirst(Stored):
    """A store that loads the thread before each append; another handle fills it."""

    def __init__(self, sound: Stored) -> None:
        super().__init__(sound.driver, sound.url)
        self._sound = sound

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        await self._sound.fill(thread, messages)

    async def append(self, thread: str, message: Any) -> None:
        await self.load(thread)
        await super().append(thread, message)


@pytest.mark.parametrize("driver", ["sqlite", "file"])
async def test_an_append_that_loads_the_thread_is_found(pair: Pair) -> None:
    """The guard reports the planted mistake."""
    floor, ours = pair
    assert isinstance(ours, Stored)

    async with LoadsFirst(ours) as slow:
        assert [*await missed(floor, slow, GROWTH)] == ["append@10000 / append@0"]
