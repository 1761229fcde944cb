"""Turn any exception of a check into a `Failure`.

A plain ``AssertionError`` carries no facts. So what was expected is the text of the
failed ``assert``, and what was seen are the values of the variables in it. The message
of the ``assert`` says in which circumstances, so it becomes a part of ``where``.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import cpkit
from conformance.case import Case
from conformance.difference import difference, shown
from conformance.failure import Failure

__all__ = ["explain"]

SMALL = 120
"""Characters up to which a value is shown without the place where it differs."""

SHORT = 300
"""Characters of an error that is one of many."""

MOST = 5
"""Different errors that are shown."""

_SUITE = str(Path(__file__).parent)

_KIT = str(Path(cpkit.__file__).parent) + os.sep

# Where packages are installed, and Python itself.
_INSTALLED = tuple({*sysconfig.get_paths().values(), os.path.dirname(os.__file__)})


def explain(error: BaseException, check: Callable[..., object]) -> Failure:
    """Return what was expected, what was seen, and where.

    ``check`` is the function that raised. An assertion that fails in its file, or in
    the suite, is a broken expectation; any other error is a defect of the store.
    """
    if isinstance(error, Failure) and error.__traceback__ is None:
        return error  # the runner's own, of a check that it abandoned

    files = (_SUITE, inspect.getfile(inspect.unwrap(check)))
    innermost = _Frame.innermost(error)
    place = str(_Frame.innermost(error, files))

    if isinstance(error, Failure):
        where = [_line_of_driver(error, files), error.where or place]
        return Failure(error.expected, error.seen, "\n".join(filter(None, where)))

    if not (isinstance(error, AssertionError) and innermost.is_in(files)):
        where = [_line_of_driver(error, files), str(innermost)]
        told = f"{type(error).__name__}: {error}"
        return Failure("no error", told, "\n".join(dict.fromkeys(filter(None, where))))

    statement = innermost.failed_assert()

    if statement is None:
        return Failure("the clause to hold", str(error), place)

    values = [f"{name} = {shown(value)}" for name, value in innermost.names(statement)]
    values += innermost.raised(statement, files)
    unequal = innermost.unequal(statement)

    if unequal is not None:
        place, one, other = unequal
        values.insert(0, f"{place}: {one}, and not {other}")

    return Failure(
        ast.unparse(statement.test),
        "\n".join(values) or "it does not hold",
        f"{error}\n{place}" if str(error) else place,
    )


def _line_of_driver(error: BaseException, files: tuple[str, ...]) -> str | None:
    """Return the innermost line of the driver that led to the error, if there is one.

    That is a line outside the suite, the kit and the installed packages. The kit raises
    the contract's errors from those of the driver.
    """
    found: _Frame | None = None
    seen: set[int] = set()
    one: BaseException | None = error

    while one is not None and id(one) not in seen:
        seen.add(id(one))
        levels = [_Frame(*level) for level in traceback.walk_tb(one.__traceback__)]
        own = [level for level in levels if level.is_of_driver(files)]
        found = own[-1] if own else found
        one = one.__cause__ or one.__context__

    return None if found is None else str(found)


@dataclass(frozen=True)
class _Frame:
    """One level of a traceback."""

    frame: FrameType
    line: int

    @classmethod
    def innermost(cls, error: BaseException, files: tuple[str, ...] = ("",)) -> _Frame:
        """Return the last level in any of the files or folders, else the last one."""
        levels = [cls(*level) for level in traceback.walk_tb(error.__traceback__)]
        return next((one for one in reversed(levels) if one.is_in(files)), levels[-1])

    def is_in(self, files: tuple[str, ...]) -> bool:
        return self.frame.f_code.co_filename.startswith(files)

    def is_of_driver(self, files: tuple[str, ...]) -> bool:
        path = self.frame.f_code.co_filename
        others = (*files, _KIT, *_INSTALLED, "<")
        return not path.startswith(others) and "site-packages" not in path

    def failed_assert(self) -> ast.Assert | None:
        """Return the ``assert`` statement at the line, if there is one."""
        path = self.frame.f_code.co_filename
        linecache.checkcache(path)

        try:
            tree = ast.parse("".join(linecache.getlines(path)))
        except SyntaxError:
            return None

        for node in ast.walk(tree):
            if isinstance(node, ast.Assert) and node.lineno <= self.line <= (
                node.end_lineno or node.lineno
            ):
                return node

        return None

    def unequal(self, statement: ast.Assert) -> tuple[str, str, str] | None:
        """Return where the two sides of a failed ``==`` or ``exactly`` differ.

        ``None`` where they are small, or may not be evaluated again.
        """
        sides = _sides(statement.test)

        if not sides or any(map(_has_effects, sides)):
            return None

        # One mapping, so that the scopes of comprehensions find the local names too.
        names = {**self.frame.f_globals, **self.frame.f_locals}

        try:
            values = [
                eval(compile(ast.Expression(side), "<assert>", "eval"), names)
                for side in sides
            ]
        except Exception:
            return None

        if all(len(shown(value)) < SMALL for value in values):
            return None

        return difference(values[0], values[1], ast.unparse(sides[0]))

    def names(self, statement: ast.Assert) -> list[tuple[str, object]]:
        """Return the local variables in the statement with their values."""
        found = {}

        for node in ast.walk(statement.test):
            if isinstance(node, ast.Name) and node.id in self.frame.f_locals:
                found[node.id] = self.frame.f_locals[node.id]

        return [pair for pair in found.items() if not isinstance(pair[1], Case)]

    def raised(self, statement: ast.Assert, files: tuple[str, ...]) -> list[str]:
        """Return the errors in lists of answers that the statement does not show."""
        named = {name for name, _ in self.names(statement)}
        errors: dict[str, list[BaseException]] = {}

        for name, value in self.frame.f_locals.items():
            if name not in named and isinstance(value, list | tuple):
                for one in value:
                    if isinstance(one, BaseException):
                        told = f"{name}: {type(one).__name__}: {one}"
                        errors.setdefault(told[:SHORT], []).append(one)

        return [
            f"{len(found)} of {told}"
            + (f"\n  {line}" if (line := _line_of_driver(found[0], files)) else "")
            for told, found in list(errors.items())[:MOST]
        ]

    def __str__(self) -> str:
        code = self.frame.f_code
        return f"{code.co_filename}:{self.line} in {code.co_name}"


_PURE = {"dict", "len", "list", "set", "sorted", "tuple"}


def _sides(test: ast.expr) -> list[ast.expr]:
    """Return the two values that must be equal, if the test is about that."""
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return [left, right]
        case ast.Call(func=ast.Name(id="exactly"), args=[left, right]):
            return [left, right]

    return []


def _has_effects(expression: ast.expr) -> bool:
    """Return whether it calls more than a function that copies or counts."""
    effects = (ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom)
    return any(
        isinstance(node, effects)
        or (
            isinstance(node, ast.Call)
            and not (isinstance(node.func, ast.Name) and node.func.id in _PURE)
        )
        for node in ast.walk(expression)
    )
