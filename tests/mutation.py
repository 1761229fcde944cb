"""Make small changes to a store's code, and list those that the suite does not notice.

Run by hand; it is not a part of the test run::

    python -m tests.mutation cpkit/memory.py memory://mutation --count 60
    python -m tests.mutation cpkit_sqlite/store.py sqlite:///x.db --count 60 --seed 3

Each change is made in a copy of the packages. A change is caught if a clause fails, or
if the store does not open or does not end in time.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "cpkit cpkit_file cpkit_postgres cpkit_redis cpkit_sqlite conformance".split()
)
LEVELS = ("core", "optional", "concurrent")

PATIENCE = 300
"""Seconds for the clauses on one change."""

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
IN_QUERIES = {
    " AND ": " OR ",
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " = ": " <> ",
    " DESC": " ASC",
    " + 1": "",
    "'failed'": "'issued'",
    "NOT EXISTS": "EXISTS",
    " FOR UPDATE": "",
    "BEGIN IMMEDIATE": "BEGIN DEFERRED",
    "DO NOTHING": "DO UPDATE SET rowid = rowid",
}

CERTIFY = f"""
import sys
from conformance import Certification

run = Certification(sys.argv[1], levels={LEVELS!r}, rounds=0.25, seed=1)
for outcome in run:
    if outcome.status == "failed":
        print(outcome.clause.id)
        sys.stdout.flush()
        import os
        os._exit(1)
"""


def changes(tree: ast.Module) -> Iterator[tuple[str, ast.Module]]:
    """Yield each change as a description and the changed module."""
    texts = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }

    for n, node in enumerate(ast.walk(tree)):
        for words, new in _changed(node, id(node) in texts):
            copy = deepcopy(tree)
            place = list(ast.walk(copy))[n]
            place.__class__ = new.__class__
            place.__dict__.clear()
            place.__dict__.update(new.__dict__)
            line = getattr(node, "lineno", 0)
            yield f"line {line}: {words}", copy


def _changed(node: ast.AST, is_docstring: bool) -> Iterator[tuple[str, ast.AST]]:
    new = deepcopy(node)

    if isinstance(new, ast.Compare):
        before = ast.unparse(new)
        new.ops = [FLIPPED[type(op)]() for op in new.ops]
        yield f"{before} -> {ast.unparse(new)}", new
    elif isinstance(new, ast.BoolOp):
        before = ast.unparse(new)
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield f"{before} -> {ast.unparse(new)}", new
    elif isinstance(new, ast.Expr) and isinstance(new.value, (ast.Call, ast.Await)):
        yield f"without {ast.unparse(new)}", ast.copy_location(ast.Pass(), new)
    elif isinstance(new, ast.Constant) and type(new.value) is int:
        new.value += 1
        yield f"{new.value - 1} -> {new.value}", new
    elif isinstance(new, ast.Constant) and isinstance(new.value, str):
        if is_docstring or "\n" not in new.value and " " not in new.value:
            return

        for old, other in IN_QUERIES.items():
            for nth in range(new.value.count(old)):
                parts = new.value.split(old)
                text = old.join(parts[: nth + 1]) + other + old.join(parts[nth + 1 :])
                found = ast.copy_location(ast.Constant(text), new)
                yield f"{old!r} -> {other!r} after {parts[nth][-40:]!r}", found


def verdict(tree: Path, url: str) -> str:
    """Return the clause that caught the change, or nothing."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}

    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", CERTIFY, url],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "the time limit"

    if done.returncode == 0:
        return ""

    return done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description="Change a store; list what is missed.")
    parser.add_argument("file", help="the module to change, relative to the project")
    parser.add_argument("url", help="a new store; relative paths are in a new folder")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    source = (ROOT / given.file).read_text(encoding="utf-8")
    found = list(changes(ast.parse(source)))
    Random(given.seed).shuffle(found)
    chosen = found[: given.count]
    missed = 0

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)

        for package in PACKAGES:
            shutil.copytree(ROOT / package, tree / package)

        for n, (words, module) in enumerate(chosen, 1):
            (tree / given.file).write_text(ast.unparse(module), encoding="utf-8")
            caught = verdict(tree, given.url)
            missed += not caught
            print(f"{n:>4} {caught or 'MISSED':<50} {words}", flush=True)  # noqa: T201  # a tool run by hand

    print(f"{given.file}: {missed} of {len(chosen)} changes are missed")  # noqa: T201  # likewise


if __name__ == "__main__":
    main()
