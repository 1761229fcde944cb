"""Certify a store in code, as ``cpkit certify`` does on the command line."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from conformance.case import Case
from conformance.catalog import select
from conformance.clause import Clause, Level
from conformance.harness import Harness, harness_for
from conformance.jobs import may_run_beside, run_in_jobs
from conformance.report import Report
from conformance.runner import Hung, Outcome, Patience, perform, run_clause
from cpkit import BackendUnavailable, StatesDurability
from cpkit.driver import Limits

__all__ = ["Certification", "certify"]


class Certification:
    """One run of the suite: iterate over it to get each outcome at once.

    ``report`` may be called at any time: an interrupted run reports what it has. Takes
    what `certify` takes. Creating it opens the store once. ``jobs`` is 1 where only one
    process can open the store.
    """

    def __init__(
        self,
        target: str | Harness,
        *,
        levels: Sequence[str] = (),
        clauses: Sequence[str] = (),
        seed: int | None = None,
        rounds: float = 1.0,
        jobs: int = 1,
        on_start: Callable[[Clause], None] | None = None,
    ) -> None:
        self.harness = harness_for(target)
        self.clauses = select(levels, clauses)
        self.outcomes: list[Outcome] = []
        self._given = target if isinstance(target, str) else self.harness.name
        self._asked = tuple(levels)
        self._seed = secrets.randbelow(2**32) if seed is None else seed
        self._rounds = rounds
        # A store of one process cannot be shared among several.
        self.jobs = 1 if self.harness.elsewhere() is None else jobs
        self._on_start = on_start
        self._durability, self._limits = _stated_facts(self.harness)

    def __iter__(self) -> Iterator[Outcome]:
        beside = [one for one in self.clauses if may_run_beside(one, self.harness)]
        beside = beside if self.jobs > 1 else []
        seed, rounds, patience = self._seed, self._rounds, Patience()

        if beside:
            for outcome in run_in_jobs(beside, self.harness, self.jobs, seed, rounds):
                self.outcomes.append(outcome)
                yield outcome

        for clause in self.clauses:
            if clause in beside:
                continue

            if self._on_start is not None:
                self._on_start(clause)

            outcome = run_clause(
                clause, self.harness, seed=seed, rounds=rounds, patience=patience
            )
            self.outcomes.append(outcome)
            yield outcome

    def report(self) -> Report:
        """Return the outcomes so far, in the order of the clauses."""
        place = {clause.id: n for n, clause in enumerate(self.clauses)}
        return Report(
            self.harness.name,
            self._durability,
            self._seed,
            self._rounds,
            sorted(self.outcomes, key=lambda one: place[one.clause.id]),
            self._asked,
            self._limits,
            self._given,
            len(self.clauses) - len(self.outcomes),
        )


async def certify(
    target: str | Harness,
    *,
    levels: Sequence[str] = (),
    clauses: Sequence[str] = (),
    seed: int | None = None,
    rounds: float = 1.0,
    jobs: int = 1,
    on_start: Callable[[Clause], None] | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Check a store against the clauses, and return the report.

    ``target`` is a URL, ``package.module:factory`` or a `Harness`. No ``levels`` means
    all levels; ``clauses`` selects ids or subjects. ``rounds`` scales the slow clauses.
    With more than one job, clauses that allow it run in so many processes.
    ``on_outcome`` gets each outcome at once. Use a store made for this: what the
    clauses write stays in it.

    A clause that fails does not raise; it is in the report. Raises ``ValueError`` or
    ``InvalidURL`` for an unknown target, level or clause, and ``BackendUnavailable`` if
    the store cannot be opened.
    """
    run = await asyncio.to_thread(
        partial(
            Certification,
            target,
            levels=levels,
            clauses=clauses,
            seed=seed,
            rounds=rounds,
            jobs=jobs,
            on_start=on_start,
        )
    )
    outcomes = iter(run)

    while (outcome := await asyncio.to_thread(next, outcomes, None)) is not None:
        if on_outcome is not None:
            on_outcome(outcome)

    return run.report()


def _stated_facts(harness: Harness) -> tuple[str, Limits | None]:
    """Open the store once, and return the text of its durability and its limits."""
    stated: list[tuple[str, Limits | None]] = []

    async def look(case: Case) -> None:
        cp: object = case.cp

        try:
            states = isinstance(cp, StatesDurability)
            durability = str(cp.durability) if states else "not stated"  # type: ignore[attr-defined]  # it states it
        except Exception as exc:  # the clause handle.states-durability fails with it
            durability = f"not stated: {type(exc).__name__}: {exc}"

        stated.append((durability, getattr(cp, "limits", None)))

    try:
        perform(Clause("store.opens", "", Level.CORE, (), 20, look), harness)
    except Hung as exc:
        raise BackendUnavailable(harness.name, str(exc)) from exc

    return stated[0]
