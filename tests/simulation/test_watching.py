"""No change is missed, whatever happens to notifications."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence

import pytest

from tests.simulation.watching import Faulty, simulate_watching

SEEDS = round(200 * float(os.environ.get("CPKIT_ROUNDS") or 1))


@pytest.mark.parametrize(
    "seeds",
    [range(SEEDS), pytest.param(range(SEEDS, 50 * SEEDS), marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.timeout(600)
def test_no_seed_misses_a_change(seeds: range) -> None:
    """Each change is seen within the poll interval, in every schedule."""
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
