"""The list of all clauses, and how a caller selects from it."""

from __future__ import annotations

from collections.abc import Sequence

import conformance.clauses  # noqa: F401  # each of its modules registers its clauses
from conformance.clause import REGISTERED, Clause, Level

__all__ = ["all_clauses", "select"]


def all_clauses() -> list[Clause]:
    """Return every clause, by level and then in the order of the contract."""
    order = list(Level)
    return sorted(REGISTERED.values(), key=lambda found: order.index(found.level))


def select(levels: Sequence[str] = (), ids: Sequence[str] = ()) -> list[Clause]:
    """Return the clauses that match the levels and the ids.

    No levels, or no ids, means all of them. An id may be a subject (``append``) and
    then stands for all of its clauses. Raises ``ValueError`` for an unknown level or
    id, and when no clause matches.
    """
    found = all_clauses()
    unknown = sorted({*levels} - {*Level})

    if unknown:
        raise ValueError(f"unknown level {unknown[0]!r}: use one of {', '.join(Level)}")

    for wanted in ids:
        if not any(wanted in (one.id, one.subject) for one in found):
            raise ValueError(
                f"unknown clause {wanted!r}: use an id such as {found[0].id!r} or "
                f"a subject such as {found[0].subject!r}"
            )

    chosen = [
        one
        for one in found
        if (not levels or one.level in levels)
        and (not ids or one.id in ids or one.subject in ids)
    ]

    if not chosen:
        raise ValueError(
            f"no clause matches both levels {', '.join(levels)} and {', '.join(ids)}"
        )

    return chosen
