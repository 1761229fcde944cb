"""No change is missed, whatever happens to notifications."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Hashable, Mapping, Sequence
from random import Random

import pytest

from cpkit.driver import DriverOptions, Heard, handle_over
from cpkit.memory import MemoryStore
from tests.simulation.loop import simulated_loop
from tests.simulation.watching import READ, Faulty, simulate_watching

SEEDS = round(100 * float(os.environ.get("CPKIT_ROUNDS") or 1))
LONG = [range(SEEDS * first, SEEDS * end) for first, end in ((1, 8), (8, 14))]


@pytest.mark.parametrize(
    "seeds",
    [range(SEEDS), *(pytest.param(seeds, marks=pytest.mark.long) for seeds in LONG)],
    ids=str,
)
@pytest.mark.timeout(600)
def test_no_seed_misses_a_change(
    seeds: range, caplog: pytest.LogCaptureFixture
) -> None:
    """Each change is seen within the poll interval, in every schedule."""
    caplog.set_level(logging.CRITICAL, logger="cpkit")  # a look that fails is logged
    found = {seed: missed for seed in seeds if (missed := simulate_watching(seed))}
    assert found == {}


class IgnoresExtra(Faulty):
    """A store whose markers change with messages and calls alone."""

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        await super().markers(thread_ids)
        found = self._data.threads
        ids = found if thread_ids is None else found.keys() & set(thread_ids)
        return {one: (len(found[one].bodies), len(found[one].calls)) for one in ids}


@pytest.mark.parametrize(
    ("kind", "poll"), [(Faulty, 86_400.0), (IgnoresExtra, 1.0)], ids=["poll", "marker"]
)
def test_planted_bugs_are_found(kind: type[Faulty], poll: float) -> None:
    """A watch that trusts notifications, or markers that miss extra, fail a seed."""
    assert any(simulate_watching(seed, kind, poll) for seed in range(SEEDS))


class Slow(MemoryStore):
    """A store on a busy machine: a look takes long, and a hint names no thread."""

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        await asyncio.sleep(READ)
        return await super().markers(thread_ids)

    async def listen(self, heard: Heard) -> None:
        loop = asyncio.get_running_loop()
        self._data.listeners.add((loop, lambda _: heard(None)))
        await asyncio.Event().wait()


async def longest_wait() -> float:
    """Return how long a watcher waited for a change by another handle, at most."""
    clock = asyncio.get_running_loop().time
    slow, other = Slow(), MemoryStore()
    other._data = slow._data
    longest = 0.0

    async with (
        handle_over(slow, options=DriverOptions(poll=60.0)) as cp,
        handle_over(other) as writer,
        cp.watch("t") as changes,
    ):
        for _ in range(10):
            await asyncio.sleep(READ)
            await writer.append("t", [{}])
            began = clock()
            await anext(changes)
            longest = max(longest, clock() - began)

    return longest


def test_a_named_thread_is_looked_at_soon_after_a_slow_look() -> None:
    """A waiter waits for two looks at most, and hardly for the rest between them."""
    assert simulated_loop(Random(1)).run(longest_wait()) <= 2 * READ + 0.02
