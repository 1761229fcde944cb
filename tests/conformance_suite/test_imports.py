"""The suite's modules import few packages, and each other without a cycle."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import conformance

ROOT = Path(conformance.__file__).parents[1]

ALLOWED = {
    "conformance",
    "cpkit",
    "hypothesis",
    "pydantic",
    "pydantic_core",
    "pytest",
    "typing_extensions",
}


def imports() -> dict[str, set[str]]:
    """Return the names that each module imports, in functions and for types too."""
    found: dict[str, set[str]] = {}

    for path in (ROOT / "conformance").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        names = found.setdefault(module, set())

        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names |= {f"{node.module}.{alias.name}" for alias in node.names}

    return found


def test_the_suite_imports_only_what_it_may() -> None:
    """The suite imports cpkit, pytest and hypothesis, and never a driver."""
    packages = {
        name.partition(".")[0] for names in imports().values() for name in names
    }
    assert packages - sys.stdlib_module_names <= ALLOWED


def test_the_suite_has_no_import_cycle() -> None:
    """No module imports itself through others, type checking included."""
    found = imports()
    # `from package import module` in the package itself is not a cycle.
    graph = {
        module: {name for name in names & found.keys() if name != module}
        for module, names in found.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError
