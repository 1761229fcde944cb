"""Certify a store in code; ``cpkit certify`` prints the report of this call."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from conformance.case import Case
from conformance.catalog import select
from conformance.clause import Clause, Level
from conformance.harness import Harness, harness_for
from conformance.report import Report
from conformance.runner import Hung, Outcome, perform, run_clause
from cpkit import BackendUnavailable, StatesDurability
from cpkit.driver import Limits

__all__ = ["certify"]


async def certify(
    target: str | Harness,
    *,
    levels: Sequence[str] = (),
    clauses: Sequence[str] = (),
    seed: int | None = None,
    rounds: float = 1.0,
    on_start: Callable[[Clause], None] | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Check a store against the clauses, and return the report.

    ``target`` is a URL, ``package.module:factory`` or a `Harness`. No ``levels`` means
    all levels; ``clauses`` selects ids or subjects. ``rounds`` scales the slow clauses.
    Use a store made for this: what the clauses write stays in it.

    A clause that fails does not raise; it is in the report. Raises ``ValueError`` or
    ``InvalidURL`` for an unknown target, level or clause, and ``BackendUnavailable`` if
    the store cannot be opened.
    """
    harness = harness_for(target)
    chosen = select(levels, clauses)
    seed = secrets.randbelow(2**32) if seed is None else seed
    durability, limits = await asyncio.to_thread(_stated_facts, harness)
    outcomes = []

    for clause in chosen:
        if on_start is not None:
            on_start(clause)

        outcome = await asyncio.to_thread(
            run_clause, clause, harness, seed=seed, rounds=rounds
        )
        outcomes.append(outcome)

        if on_outcome is not None:
            on_outcome(outcome)

    asked = tuple(levels)
    return Report(harness.name, durability, seed, rounds, outcomes, asked, limits)


def _stated_facts(harness: Harness) -> tuple[str, Limits | None]:
    """Open the store once, and return the text of its durability and its limits."""
    stated: list[tuple[str, Limits | None]] = []

    async def look(case: Case) -> None:
        cp: object = case.cp
        durability = cp.durability if isinstance(cp, StatesDurability) else "not stated"
        stated.append((str(durability), getattr(cp, "limits", None)))

    try:
        perform(Clause("store.opens", "", Level.CORE, (), 20, look), harness)
    except Hung as exc:
        raise BackendUnavailable(harness.name, str(exc)) from exc

    return stated[0]
