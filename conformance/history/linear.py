"""Check whether a history is linearizable.

A history is linearizable if each operation can be placed at one instant between its
start and its end, so that all answers are right in this order (Herlihy and Wing, 1990).
The search is by Wing and Gong (1993) with Lowe's memoisation (2017). It takes any
operation that started before all others ended, applies it to the model, and continues
with the rest. It never visits the same set of operations in the same state twice.

Operations on different subjects are independent, so each subject is searched alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from conformance.failure import Failure, Skip
from conformance.history.models import THREAD, Model
from conformance.history.op import Op, listing

__all__ = ["Undecided", "check_linearizable", "is_linearizable", "smallest"]

BUDGET = 100_000
"""States that one full search may visit: a second or two, about ten megabytes."""

SMALL_BUDGET = 3_000
"""States that each of the many short searches in `smallest` may visit."""


class Undecided(Skip):
    """The search has visited too many states without an answer."""


def check_linearizable(model: Model, history: Iterable[Op]) -> None:
    """Raise `Failure` with a small part of the history that has no order."""
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
                f"{listing(least)}\n"
                f"  The other {len(ops) - len(least)} operations do not explain it.\n"
                "  Times are microseconds: operations that overlap may have any order.",
            )


def is_linearizable(model: Model, history: list[Op], budget: int = BUDGET) -> bool:
    """Return whether one subject's history has an order that explains it.

    An operation of unknown outcome may be placed anywhere after its start, or left out.
    Raises `Undecided` if the search takes too long.
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

            # Do not place an unknown operation that changes nothing: leaving it out
            # gives the same state.
            if out == ops[i].out or (ops[i].out is None and after != state):
                stack.append((done | 1 << i, after))

    return False


def _is_explained(model: Model, history: list[Op], budget: int = BUDGET) -> bool:
    """Return whether the search finds an order within its budget."""
    try:
        return is_linearizable(model, history, budget)
    except Undecided:
        return False


def _has_no_order(model: Model, history: list[Op]) -> bool:
    """Return whether a short search proves that there is no order."""
    try:
        return not is_linearizable(model, history, SMALL_BUDGET)
    except Undecided:
        return False


def _next(ops: list[Op], done: int) -> list[int]:
    """Return the remaining operations that started before any remaining one ended.

    ``ops`` are in the order of their starts.
    """
    found = []
    horizon: float = float("inf")
    first = (~done & (done + 1)).bit_length() - 1  # the lowest bit that is not set

    for i in range(first, len(ops)):
        if done >> i & 1:
            continue

        op = ops[i]

        if op.start > horizon:
            break

        found.append(i)

        if op.end is not None:
            horizon = min(horizon, op.end)

    return found


def smallest(model: Model, history: list[Op]) -> list[Op]:
    """Return a small part of a history without an order; the part has none either.

    First this finds the shortest prefix without an order; operations that end later
    count as unknown. Then it leaves out operations that are not needed: reads, and
    writes whose answer does not matter and whose effect no answer shows. An operation
    of unknown outcome never makes an order impossible, so leaving it out is sound.

    Raises `Undecided` if it cannot prove that the history has no order.
    """
    ends = sorted(op.end for op in history if op.end is not None)
    low, high = 0, len(ends) - 1

    while low < high:
        middle = (low + high) // 2

        if _is_explained(model, _until(history, ends[middle]), 5 * SMALL_BUDGET):
            low = middle + 1
        else:
            high = middle

    least = _until(history, ends[high])
    # The short search may have given up; then the full one raises Undecided.
    is_linearizable(model, least)

    for op in sorted(least, key=lambda op: op.start, reverse=True):
        rest = [other for other in least if other is not op]
        weaker = rest if _is_read(op) else [*rest, op.unknown()]

        if _has_no_order(model, weaker):
            least = weaker

    return _without_effect_on_answers(least)


def _until(history: list[Op], time: int) -> list[Op]:
    return [
        op if op.end is not None and op.end <= time else op.unknown()
        for op in history
        if op.start <= time
    ]


def _without_unseen(history: list[Op]) -> list[Op]:
    """Leave out writes of unknown outcome whose effect no client ever saw.

    The history of a thread ends with a load after all clients are done. An append that
    took effect is visible there. A merge whose values are never visible explains no
    answer. So both can be left out. With them the search would try each subset.

    A deletion or a trim hides such effects, so a history with one keeps everything.
    """
    if any(op.kind in ("delete_thread", "trim") for op in history):
        return history

    return _without_effect_on_answers(history)


def _without_effect_on_answers(history: list[Op]) -> list[Op]:
    seen = {text for op in history if op.out is not None for text in _texts(op.out)}
    return [op for op in history if op.out is not None or seen & _texts(op.args)]


def _is_read(op: Op) -> bool:
    return op.kind in (
        "load",
        "load_range",
        "read",
        "dump_thread",
        "find_completed",
        "find_call",
    )


def _texts(value: Any) -> set[str]:
    """Return the texts in nested tuples that clients generated: they contain a dot."""
    if isinstance(value, tuple):
        return set().union(*map(_texts, value))

    return {value} if isinstance(value, str) and "." in value else set()
