"""One operation of a history: client, arguments, answer, start and end."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

from conformance.difference import shown

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
        found[op.client, op.subject, op.start] = op

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
        when = f"{begin:>8} - {end:<8}"
        lines.append(f"{when} {op.client:<10} {op.kind}{_given(op)} -> {_answer(op)}")

    return "\n".join(lines)


def _given(op: Op) -> str:
    """Return the arguments as a caller would write them, without the subject."""
    match op.kind, op.args:
        case "append", (tokens, expected, items):
            given = [shown(list(tokens))]
            given += [] if expected is None else [f"expected_version={expected}"]
            given += [f"extra={shown(dict(items))}"] if items else []
        case "save_extra", items:
            given = [shown(dict(items))]
        case "restore_thread", (tokens, items):
            given = [f"messages={shown(list(tokens))}", f"extra={shown(dict(items))}"]
        case "record_result", (call_id, status, result):
            given = [shown(call_id), shown(result), f"success={status == 'completed'}"]
        case "trim", (before, expected):
            given = [f"{before}"]
            given += [] if expected is None else [f"expected_version={expected}"]
        case "delete_thread", (expected,):
            given = [] if expected is None else [f"expected_version={expected}"]
        case "delete_thread", (client, forget_keys):
            given = [f"thread of {client}", f"forget_keys={forget_keys}"]
        case _, args:
            given = [shown(one) for one in args]

    return f"({', '.join(given)})"


def _answer(op: Op) -> str:
    match op.out:
        case None:
            return "answer lost or not needed: takes effect at any time, or never"
        case "version", version:
            return f"version {version}"
        case "conflict", version:
            return f"VersionConflict: the thread is at version {version}"
        case "loaded", tokens, items:
            return f"messages {shown(list(tokens))}, extra {shown(dict(items))}"
        case "part", tokens, items, version:
            part = f"messages {shown(list(tokens))}, extra {shown(dict(items))}"
            return f"{part}, version {version}"
        case "read", tokens:
            return f"messages {shown(list(tokens))}"
        case "record", call_id, status, result, attempt:
            kept = "" if result is None else f" with {shown(result)}"
            return f"call {call_id!r}, {status}{kept}, attempt {attempt}"
        case ("claimed",):
            return "None: the key is claimed"
        case ("nothing",):
            return "None"
        case out:
            return " ".join(map(str, out))
