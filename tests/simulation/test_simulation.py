"""In thousands of schedules with crashes and lost answers, effects happen once."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cpkit.effects import EffectLedger
from tests.broken.reference import Reference
from tests.simulation.history import History
from tests.simulation.leases import simulate_lease
from tests.simulation.planted import (
    ApprovesAfterClaim,
    ChecksThenInserts,
    OverwritesResults,
)
from tests.simulation.scenario import MakeLedger, MakeStore, simulate

ROUNDS = float(os.environ.get("CPKIT_ROUNDS") or 1)
SEEDS = round(400 * ROUNDS)
"""Seeds of a normal run: four times as many as the rarest planted bug needs."""

LONG = [range(SEEDS * n, SEEDS * (n + 1)) for n in range(1, 8)]
"""Seeds of the long run, in parts that workers share."""


def first_failure(
    seeds: range,
    make_store: MakeStore = Reference,
    make_ledger: MakeLedger = EffectLedger,
) -> History | None:
    """Return the first history of the seeds that breaks an invariant."""
    histories = (simulate(seed, make_store, make_ledger) for seed in seeds)
    return next((history for history in histories if history.violations), None)


@pytest.mark.parametrize(
    "seeds",
    [range(SEEDS), *(pytest.param(seeds, marks=pytest.mark.long) for seeds in LONG)],
    ids=str,
)
def test_no_seed_breaks_an_invariant(seeds: range) -> None:
    """No key is held twice, and no effect is repeated or run unapproved."""
    found = first_failure(seeds)
    assert found is None, f"python -m tests.simulation {found.seed}\n{found}"


@pytest.mark.parametrize(
    ("make_store", "make_ledger", "violation"),
    [
        pytest.param(ChecksThenInserts, EffectLedger, "two holders", id="claim"),
        pytest.param(Reference, ApprovesAfterClaim, "unapproved", id="approval"),
        pytest.param(
            OverwritesResults, EffectLedger, "different outcomes", id="result"
        ),
    ],
)
def test_planted_bugs_are_found(
    make_store: MakeStore, make_ledger: MakeLedger, violation: str
) -> None:
    """The seeds of a normal test run find each of three well-known bugs."""
    for seed in range(SEEDS):
        history = simulate(seed, make_store, make_ledger)

        if any(violation in found for found in history.violations):
            return

    pytest.fail(f"no seed below {SEEDS} found it")


@pytest.mark.parametrize(
    "seeds",
    [range(SEEDS // 4), pytest.param(range(SEEDS // 4, SEEDS), marks=pytest.mark.long)],
    ids=str,
)
def test_no_seed_breaks_a_lease(seeds: range) -> None:
    """Tokens are unique, no runner writes after its successor, and all get a turn."""
    histories = map(simulate_lease, seeds)
    found = next((history for history in histories if history.violations), None)
    assert found is None, f"python -m tests.simulation lease {found.seed}\n{found}"


def test_a_seed_always_gives_the_same_history() -> None:
    """The history of a failing seed can be printed again, line by line."""
    for run in (simulate, simulate_lease):
        histories = [str(run(seed)) for seed in (3, 3, 4)]
        assert histories[0] == histories[1] != histories[2]


def test_the_seeds_contain_every_kind_of_fault() -> None:
    """The schedules contain crashes, takeovers, denials and cancellations."""
    text = "\n".join(str(simulate(seed)) for seed in range(200))
    wanted: list[Any] = [
        "is dead",
        "books",
        "resolves charge failed",
        "denied",
        "attempt 3",
        "was cancelled",
        "resume landed",
        "resume released",
    ]
    assert [word for word in wanted if word not in text] == []
