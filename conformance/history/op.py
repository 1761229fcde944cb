"""One operation of a history: client, arguments, answer, start and end."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

from conformance.explain import shown

__all__ = ["Op", "frozen", "listing", "merged"]


@dataclass(frozen=True)
class Op:
    """An operation on one thread or key, the history's *subject*.

    Times are nanoseconds of the machine's monotonic clock, which all its processes
    share. ``out`` and ``end`` are ``None`` if the outcome is unknown: the operation may
    have taken effect at any time after its start, or never.
    """

    client: str
    subject: str
    kind: str
    args: tuple[Any, ...]
    out: tuple[Any, ...] | None
    start: int
    end: int | None

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, values: list[Any]) -> Op:
        return cls(*map(frozen, values))

    def unknown(self) -> Op:
        """Return the operation as if its answer had never arrived."""
        return replace(self, out=None, end=None)


def merged(lines: list[list[Any]]) -> list[Op]:
    """Return the history that a worker printed: each operation at its start and end."""
    found = {}

    for values in lines:
        op = Op.from_json(values)
        found[op.client, op.start] = op

    return list(found.values())


def frozen(value: Any) -> Any:
    """Return a JSON value with its arrays as tuples, so that it is hashable."""
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def listing(history: list[Op]) -> str:
    """Return a history as text: one line for each operation, times in microseconds."""
    first = min((op.start for op in history), default=0)
    lines = []

    for op in sorted(history, key=lambda op: op.start):
        begin = (op.start - first) // 1000
        end = "?" if op.end is None else str((op.end - first) // 1000)
        what = f"{op.kind}({', '.join(map(shown, op.args))})"
        out = "outcome unknown" if op.out is None else shown(op.out)
        lines.append(f"  {begin:>8} - {end:<8} {op.client:<10} {what} -> {out}")

    return "\n".join(lines)
