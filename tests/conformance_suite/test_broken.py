"""Every clause has a broken backend that it catches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import (
    Clause,
    Level,
    Outcome,
    Status,
    URLHarness,
    all_clauses,
    run_clause,
)
from conformance.clauses import model, watch, wire
from conformance.runner import Hung
from conformance.slowdown import slowdown
from tests.broken import BROKEN, Break
from tests.broken.crashes import AppliesLate, Disk, DiskHarness
from tests.broken.holders import Held, HeldHarness
from tests.broken.powerloss import Synced
from tests.broken.reference import ReferenceHarness, forget_named_stores
from tests.broken.replicas import Replicated, ReplicatedHarness
from tests.broken.servers import AppliesAfterThePause, Served, ServedHarness
from tests.broken.sizes import LeavesSocketsOpen
from tests.sweeps import sweep

# A broken backend that hangs leaves its sockets to the garbage collector, which may
# find them in any later test.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

CLAUSES = {clause.id: clause for clause in all_clauses()}

SHORT = 3.0
"""The deadline in seconds for a clause against a backend that hangs, at any load."""


@pytest.fixture(autouse=True)
def _empty_stores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins without the named stores of earlier ones; no socket is left."""
    forget_named_stores()
    yield

    while LeavesSocketsOpen.left:
        LeavesSocketsOpen.left.pop().close()

    params = getattr(request.node, "callspec", None)

    if params is not None and getattr(params.params.get("broken"), "hangs", False):
        gc.collect()


CERTAIN = (Level.CORE, Level.OPTIONAL)
"""Clauses of these levels find a defect in milliseconds; others look for a moment."""

FIRST = {broken.clause: broken for broken in reversed(BROKEN)}
"""One broken backend for each clause."""

QUICK = [broken for broken in FIRST.values() if CLAUSES[broken.clause].level in CERTAIN]
"""Those that take milliseconds. `make test-long` runs all."""


RACES = [
    broken
    for broken in BROKEN
    if not broken.hangs
    and (
        CLAUSES[broken.clause].level is Level.CONCURRENT
        or broken.clause == "powerloss.one-holder"
    )
]
"""Those that every seed must show."""

OTHERS = [broken for broken in BROKEN if broken not in RACES]


def try_seed(broken: Break, clause: Clause, folder: Path, seed: int) -> Outcome:
    """Run the clause on a new store of the broken backend."""
    forget_named_stores()
    folder.mkdir()
    return run_clause(clause, broken.make(str(folder)), seed=seed)


def is_caught(broken: Break, outcome: Outcome) -> bool:
    """Whether the clause failed as registered: by a check, or by the store's error."""
    reason = outcome.seen.partition(":")[0] if outcome.expected == "no error" else ""
    is_failed = outcome.status is Status.FAILED and outcome.seen != ""
    return is_failed and reason in ("", broken.raises)


@pytest.mark.parametrize(
    "broken", sweep(OTHERS, QUICK), ids=lambda one: f"{one.name}-{one.clause}"
)
def test_a_broken_backend_is_caught(
    broken: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken backend fails the clauses that it is registered for.

    A clause that looks for a moment, such as a kill between two writes, may miss it
    on a busy machine, or meet a limit of time first: it has three seeds. So has the
    one with random scripts, of which one seed in fifty finds nothing.
    """
    monkeypatch.setattr(watch, "PATIENCE", 0.3)
    monkeypatch.setattr(model, "SHRINKING", 0.0)  # test_model.py has the short script
    monkeypatch.setattr(wire, "COMMON", [])  # the two faults of all writes suffice
    clause = CLAUSES[broken.clause]
    is_certain = clause.level in CERTAIN and clause.subject != "model"
    tries = 1 if is_certain else 3

    if broken.hangs:
        clause = replace(clause, deadline=SHORT / slowdown())

    for seed in range(tries):
        outcome = try_seed(broken, clause, tmp_path / f"{seed}", seed)

        if is_caught(broken, outcome):
            break

    assert is_caught(broken, outcome), outcome
    assert isinstance(outcome.error, Hung) <= broken.hangs, outcome.trace


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("race", RACES, ids=lambda one: f"{one.name}-{one.clause}")
def test_a_race_is_caught_every_time(race: Break, tmp_path: Path) -> None:
    """No planted race is caught by luck: each of three seeds shows it.

    A busy machine may give another process no turn, so a seed has a second try.
    """

    def shows(name: str, seed: int) -> bool:
        outcome = try_seed(race, CLAUSES[race.clause], tmp_path / name, seed)
        return is_caught(race, outcome) and not isinstance(outcome.error, Hung)

    missed = [
        seed
        for seed in range(3)
        if not shows(f"{seed}", seed) and not shows(f"{seed} again", seed)
    ]
    assert not missed


def test_every_clause_has_a_broken_backend() -> None:
    """Each clause is proven by a backend that fails it."""
    assert CLAUSES.keys() == {broken.clause for broken in BROKEN}


@pytest.mark.long
def test_the_reference_passes() -> None:
    """The class that the broken backends inherit from fails no clause."""
    harness = ReferenceHarness("reference")
    failed = [
        (outcome.clause.id, outcome.seen)
        for clause in all_clauses()
        if (outcome := run_clause(clause, harness, rounds=0.25)).status is Status.FAILED
    ]
    assert not failed


@pytest.mark.long
@pytest.mark.parametrize(
    "clause",
    [c for c in all_clauses() if "processes" in c.needs],
    ids=lambda clause: clause.id,
)
def test_the_reference_on_disk_passes(clause: object, tmp_path: Path) -> None:
    """The base class of the crashing backends passes what they fail."""
    harness = DiskHarness(f"{Disk.__module__}:{Disk.__qualname__}", str(tmp_path))
    outcome = run_clause(clause, harness, rounds=0.25)  # type: ignore[arg-type]  # a Clause
    assert (outcome.status, outcome.seen) == (Status.PASSED, "")


@pytest.mark.long
def test_the_held_reference_passes(tmp_path: Path) -> None:
    """The base class of the stores of one process passes what they fail."""
    harness = HeldHarness(f"{Held.__module__}:{Held.__qualname__}", str(tmp_path))
    outcome = run_clause(CLAUSES["kill.one-process-at-a-time"], harness)
    assert (outcome.status, outcome.seen) == (Status.PASSED, "")


def test_a_store_in_memory_is_not_asked_for_a_second_process() -> None:
    """Each process has a store of its own, so none can be refused."""
    harness = URLHarness("memory://held")
    outcome = run_clause(CLAUSES["kill.one-process-at-a-time"], harness)
    assert outcome.status is Status.SKIPPED
    assert outcome.reason.startswith("the state ends with its process")


@pytest.mark.long
@pytest.mark.parametrize(
    "clause_id", ["kill.writes-survive", "kill.every-write-is-whole"]
)
def test_late_writes_of_a_killed_process_pass(clause_id: str, tmp_path: Path) -> None:
    """A store may apply an unacknowledged write after its process was killed."""
    kind = f"{AppliesLate.__module__}:{AppliesLate.__qualname__}"
    outcome = run_clause(CLAUSES[clause_id], DiskHarness(kind, str(tmp_path)))
    assert (outcome.status, outcome.seen) == (Status.PASSED, "")


@pytest.mark.long
@pytest.mark.parametrize(
    "clause_id", ["server.paused-is-honest", "server.paused-handle-comes-back"]
)
def test_late_writes_of_a_paused_server_pass(clause_id: str) -> None:
    """A server may apply a request that timed out when it goes on."""
    kind = f"{AppliesAfterThePause.__module__}:{AppliesAfterThePause.__qualname__}"
    outcome = run_clause(CLAUSES[clause_id], ServedHarness(kind, ""))
    assert (outcome.status, outcome.seen) == (Status.PASSED, "")


@pytest.mark.long
@pytest.mark.parametrize(
    "clause",
    [c for c in all_clauses() if {"server", "pause"} & {*c.needs}],
    ids=lambda clause: clause.id,
)
def test_the_reference_behind_a_server_passes(clause: object) -> None:
    """The base class of the backends with a server passes what they fail."""
    harness = ServedHarness(f"{Served.__module__}:{Served.__qualname__}", "")
    outcome = run_clause(clause, harness)  # type: ignore[arg-type]  # a Clause
    assert (outcome.status, outcome.seen) == (Status.PASSED, "")


@pytest.mark.long
@pytest.mark.parametrize(
    "clause",
    [c for c in all_clauses() if c.subject in ("powerloss", "faults")],
    ids=lambda clause: clause.id,
)
def test_the_synced_reference_passes(clause: object, tmp_path: Path) -> None:
    """The base class of the backends that lose power passes what they fail."""
    harness = DiskHarness(f"{Synced.__module__}:{Synced.__qualname__}", str(tmp_path))
    outcome = run_clause(clause, harness, rounds=0.5)  # type: ignore[arg-type]  # a Clause
    assert (outcome.status, outcome.seen) == (Status.PASSED, "")


@pytest.mark.long
@pytest.mark.parametrize(
    "clause", [c for c in all_clauses() if "nodes" in c.needs], ids=lambda one: one.id
)
def test_a_pair_that_refuses_alone_passes(clause: Clause) -> None:
    """The base class of the split-brained pair loses none of what it acknowledged."""
    harness = ReplicatedHarness(
        f"{Replicated.__module__}:{Replicated.__qualname__}", ""
    )
    outcome = run_clause(clause, harness, rounds=0.5)
    assert (outcome.status, outcome.seen) == (Status.PASSED, "")
    assert outcome.acknowledged > outcome.lost == 0
