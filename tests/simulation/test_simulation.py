"""In thousands of schedules with crashes and lost answers, effects happen once.

In half of the schedules of effects and leases, and in all of the workers', the store
has a watch whose notifications are lost, delayed and doubled.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from cpkit.effects import EffectLedger, waits
from cpkit.worker import Worker
from tests.broken.reference import Reference
from tests.simulation.history import History
from tests.simulation.leases import simulate_lease
from tests.simulation.planted import (
    ApprovesAfterClaim,
    ChecksThenInserts,
    FreesErasedKeys,
    OverwritesResults,
)
from tests.simulation.scenario import MakeLedger, MakeStore, simulate
from tests.simulation.workers import simulate_worker
from tests.sweeps import sweep

ROUNDS = float(os.environ.get("CPKIT_ROUNDS") or 1)
SEEDS = 400
"""Seeds in which each planted bug is found."""

QUICK = range(SEEDS // 4, SEEDS // 2)
"""Those that `make test` runs; the rarest bug is found in them, too."""


def in_parts(seeds: int) -> list[range]:
    """Return the seeds of a long run in parts that one test each runs."""
    return [range(first, first + SEEDS) for first in range(0, seeds, SEEDS)]


# `CPKIT_ROUNDS=13 make test-long ARGS=tests/simulation` runs 10,000 of each and more.
LONG = [range(QUICK.start), range(QUICK.stop, SEEDS)]
LONG += in_parts(round(2400 * ROUNDS))[1:]
LONG_LEASES = in_parts(round(800 * ROUNDS))
LONG_WORKERS = in_parts(round(1600 * ROUNDS))


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
    sweep([QUICK, *LONG], [QUICK]),
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
        pytest.param(FreesErasedKeys, EffectLedger, "repeated", id="policy"),
    ],
)
def test_planted_bugs_are_found(
    make_store: MakeStore, make_ledger: MakeLedger, violation: str
) -> None:
    """The seeds of a normal test run find each of four well-known bugs."""
    for seed in (*QUICK, *range(SEEDS)):
        history = simulate(seed, make_store, make_ledger)

        if any(violation in found for found in history.violations):
            return

    pytest.fail(f"no seed below {SEEDS} found it")


@pytest.mark.parametrize(
    "seeds",
    [
        range(SEEDS // 16),
        *(pytest.param(seeds, marks=pytest.mark.long) for seeds in LONG_LEASES),
    ],
    ids=str,
)
def test_no_seed_breaks_a_lease(seeds: range) -> None:
    """Tokens are unique, no runner writes after its successor, and all get a turn."""
    histories = map(simulate_lease, seeds)
    found = next((history for history in histories if history.violations), None)
    assert found is None, f"python -m tests.simulation lease {found.seed}\n{found}"


@pytest.mark.parametrize(
    "seeds",
    [
        range(SEEDS // 20),
        *(pytest.param(seeds, marks=pytest.mark.long) for seeds in LONG_WORKERS),
    ],
    ids=str,
)
def test_no_seed_leaves_a_thread_without_a_run(seeds: range) -> None:
    """Whatever dies or gets lost, each thread is charged once, or denied."""
    histories = map(simulate_worker, seeds)
    found = next((history for history in histories if history.violations), None)
    assert found is None, f"python -m tests.simulation worker {found.seed}\n{found}"


def test_a_wait_that_trusts_notifications_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a look from time to time, a lost notification stops a waiter."""
    monkeypatch.setattr(waits, "_RECHECK", 1e6)
    found = first_failure(range(SEEDS))
    assert found is not None
    assert found.violations == ["no progress"]


@pytest.mark.long
def test_a_worker_that_does_not_look_for_dead_runs_is_found() -> None:
    """Their threads have no run, and nothing else calls for one."""
    histories = (simulate_worker(seed, OnlyDecisions) for seed in range(SEEDS // 4))
    assert any(history.violations == ["no progress"] for history in histories)


class OnlyDecisions(Worker):
    """A worker that takes every lease for one that is held by a live runner."""

    async def _note_runs(self) -> None:
        await super()._note_runs()

        for seen in self._seen.values():
            seen.is_stale = False


def test_a_seed_always_gives_the_same_history() -> None:
    """The history of a failing seed can be printed again, line by line."""
    for run in (simulate, simulate_lease, simulate_worker):
        histories = [str(run(seed)) for seed in (3, 3, 4)]
        assert histories[0] == histories[1] != histories[2]


@pytest.mark.long
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
        "withdrew",
        "was withdrawn",
        "reopened",
        "claims cpkit:lease",
        "policy     erased",
        "was erased, by a deletion or a policy",
    ]
    assert [word for word in wanted if word not in text] == []
