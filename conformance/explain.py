"""What was expected and what was seen, told from a failed ``assert``.

Under pytest its rewritten asserts say it. Elsewhere a plain ``AssertionError`` says
nothing, so the statement's text and the values of the names in it are shown.
"""

from __future__ import annotations

import ast
import linecache
import reprlib
import traceback
from pathlib import Path
from types import FrameType, TracebackType

__all__ = ["expected_and_seen", "shown"]

_HERE = str(Path(__file__).parent)

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 300
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = 20
_repr.maxlevel = 8
_repr.maxlong = 60


def shown(value: object) -> str:
    """Return a repr that a person can read, however large the value."""
    return _repr.repr(value)


def expected_and_seen(error: BaseException) -> tuple[str, str]:
    """Return the two halves of the report of a failure."""
    if not isinstance(error, AssertionError):
        return "no error", f"{type(error).__name__}: {error}{_where(error)}"

    text = str(error)
    frame, line = _failing(error.__traceback__)
    statement = None if frame is None else _assert_at(frame, line)

    if statement is None or frame is None:
        expected, comma, seen = text.partition(", seen ")
        expected = expected.removeprefix("expected ")
        return (expected, seen) if comma else ("the clause to hold", text)

    source = ast.unparse(statement.test)

    if text:
        return source, text

    values = [f"{name} = {shown(value)}" for name, value in _names(statement, frame)]
    return source, "\n".join(values) or "it does not hold"


def _failing(trace: TracebackType | None) -> tuple[FrameType | None, int]:
    """Return the innermost frame of the suite's own code."""
    found: tuple[FrameType | None, int] = (None, 0)

    for frame, line in traceback.walk_tb(trace):
        if frame.f_code.co_filename.startswith(_HERE):
            found = frame, line

    return found


def _assert_at(frame: FrameType, line: int) -> ast.Assert | None:
    path = frame.f_code.co_filename
    linecache.checkcache(path)

    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node.lineno <= line <= (
            node.end_lineno or node.lineno
        ):
            return node

    return None


def _names(statement: ast.Assert, frame: FrameType) -> list[tuple[str, object]]:
    found = {}

    for node in ast.walk(statement.test):
        if isinstance(node, ast.Name) and node.id in frame.f_locals:
            found[node.id] = frame.f_locals[node.id]

    return list(found.items())


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"\n  at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
