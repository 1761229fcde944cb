"""Is there an order of the operations that explains what every client saw?

A history is linearizable when each operation can be thought to happen at one instant
between its start and its end (Herlihy and Wing, 1990). The search is Wing and Gong's
(1993) with Lowe's memoisation (2017): take any operation that started before all the
others ended, apply it to the model, go on with the rest; and never visit the same set
of operations in the same state again. A subject's operations are independent of other
subjects', so each is searched alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from conformance.failure import Failure, Skip
from conformance.history.models import THREAD, Model
from conformance.history.op import Op, listing

__all__ = ["Undecided", "check_linearizable", "is_linearizable", "smallest"]

BUDGET = 100_000
"""States to visit in a search that decides: a second or two, some ten megabytes."""

LESS = 3_000
"""States to visit in one of the many searches that make a history smaller."""


class Undecided(Skip):
    """A history has too many orders to try them all."""


def check_linearizable(model: Model, history: Iterable[Op]) -> None:
    """Raise `Failure` with the smallest offending part of the history."""
    subjects: dict[str, list[Op]] = {}

    for op in history:
        subjects.setdefault(op.subject, []).append(op)

    for subject, ops in subjects.items():
        if model is THREAD:
            ops = _without_unseen(ops)

        if not _is_explained(model, ops):
            least = smallest(model, ops)
            raise Failure(
                f"an order of operations that explains every answer about {subject!r}",
                f"{len(least)} operations without such an order",
                listing(least),
            )


def is_linearizable(model: Model, history: list[Op], budget: int = BUDGET) -> bool:
    """Tell whether one subject's history has an order that explains it.

    An operation of unknown outcome may stand anywhere after its start, or nowhere.
    Raises `Undecided` where the search would take too long.
    """
    ops = sorted(history, key=lambda op: op.start)
    must = sum(1 << i for i, op in enumerate(ops) if op.end is not None)
    seen: set[tuple[int, Any]] = set()
    stack = [(0, model.initial)]

    while stack:
        done, state = stack.pop()

        if done & must == must:
            return True

        if (done, state) in seen:
            continue

        seen.add((done, state))

        if len(seen) > budget:
            raise Undecided(f"a history of {len(ops)} operations has too many orders")

        for i in _next(ops, done):
            after, out = model.apply(state, ops[i])

            # An unknown operation that changes nothing might as well be nowhere.
            if out == ops[i].out or (ops[i].out is None and after != state):
                stack.append((done | 1 << i, after))

    return False


def _is_explained(model: Model, history: list[Op], budget: int = BUDGET) -> bool:
    """Tell whether an order was found."""
    try:
        return is_linearizable(model, history, budget)
    except Undecided:
        return False


def _goes_wrong(model: Model, history: list[Op]) -> bool:
    """Tell whether a short search shows that there is no order."""
    try:
        return not is_linearizable(model, history, LESS)
    except Undecided:
        return False


def _next(ops: list[Op], done: int) -> list[int]:
    """Return the operations not done that started before any of the others ended."""
    found = []
    horizon: float = float("inf")

    for i, op in enumerate(ops):
        if done >> i & 1:
            continue

        if op.start > horizon:
            break

        found.append(i)

        if op.end is not None:
            horizon = min(horizon, op.end)

    return [i for i in found if ops[i].start <= horizon]


def smallest(model: Model, history: list[Op]) -> list[Op]:
    """Return a small part of a history that has no order either.

    First the shortest time in which it goes wrong: what ends later counts as unknown.
    Then everything is left out that is not needed to see it: reads, and writes whose
    answer does not matter and whose effect nobody saw.

    Raises `Undecided` where all that can be said is that no order was found.
    """
    ends = sorted(op.end for op in history if op.end is not None)
    low, high = 0, len(ends) - 1

    while low < high:
        middle = (low + high) // 2

        if _is_explained(model, _until(history, ends[middle]), 5 * LESS):
            low = middle + 1
        else:
            high = middle

    least = _until(history, ends[high])
    is_linearizable(model, least)  # raises where it is not even known to go wrong

    for op in sorted(least, key=lambda op: op.start, reverse=True):
        rest = [other for other in least if other is not op]
        weaker = rest if _is_read(op) else [*rest, op.unknown()]

        if _goes_wrong(model, weaker):
            least = weaker

    return _without_unseen(least)


def _until(history: list[Op], time: int) -> list[Op]:
    return [
        op if op.end is not None and op.end <= time else op.unknown()
        for op in history
        if op.start <= time
    ]


def _without_unseen(history: list[Op]) -> list[Op]:
    """Leave out writes of unknown outcome of which nobody ever saw anything.

    They may be thought never to have happened, in a thread's history that ends with a
    load when all is quiet: an append that took effect shows there, and a merge of
    which no value ever showed explains nothing. The search would try each subset.
    """
    seen = {text for op in history if op.out is not None for text in _texts(op.out)}
    return [op for op in history if op.out is not None or seen & _texts(op.args)]


def _is_read(op: Op) -> bool:
    return op.kind in ("load", "find_completed", "find_call")


def _texts(value: Any) -> set[str]:
    """Return what clients made up, in nested tuples: it has their name and a dot."""
    if isinstance(value, tuple):
        return set().union(*map(_texts, value))

    return {value} if isinstance(value, str) and "." in value else set()
