"""The public names, and which package may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import cpkit

ROOT = Path(__file__).parents[2]

# DESIGN.md, sections 1 and 2, and what pydantic's users need to annotate with.
DESIGNED = """
    BackendUnavailable CallMismatch CallRecord CheckpointData Checkpointer
    CheckpointerError Closed CorruptThread ErasesThreads InvalidId InvalidURL JsonValue
    KeepsReceipts ListsThreads PayloadTooLarge ReadsRanges SchemaMismatch
    SerializationError ThreadInfo ToolCall UnknownCall VersionConflict WrongEventLoop
    open_checkpointer
""".split()

MODULES = """
    canonical driver.codec driver.ids driver.jsontext driver.lifetime driver.writes
    errors memory messages protocol records registry
""".split()

PYDANTIC = {"pydantic", "pydantic_core"}

# What each package may import, beside the standard library and itself.
ALLOWED = {
    "cpkit": PYDANTIC,
    "cpkit_sqlite": {"cpkit", "aiosqlite"} | PYDANTIC,
    "cpkit_postgres": {"cpkit", "asyncpg"} | PYDANTIC,
    "cpkit_redis": {"cpkit", "redis"} | PYDANTIC,
    "cpkit_file": {"cpkit", "aiofiles"} | PYDANTIC,
    # pydantic asks for typing_extensions' TypedDict below Python 3.12.
    "conformance": {"cpkit", "pytest", "hypothesis", "typing_extensions"} | PYDANTIC,
}

# The edges of the core: adapters import their frameworks, and the command is a client
# of the suite.
EDGES = (ROOT / "cpkit" / "cli", ROOT / "cpkit" / "integrations")
ABOVE = {"cpkit_sqlite", "cpkit_postgres", "cpkit_redis", "cpkit_file", "conformance"}


def imports(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the top-level packages that import statements name."""
    found = set()

    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])

    return found


def wrong(package: str, path: Path) -> set[str]:
    """Return what a file imports and its package may not.

    In the core, what an extra brings may be imported where it is used: in a function,
    or in a ``try``. A driver may not, nor the suite.
    """
    tree = ast.parse(path.read_text())
    allowed = ALLOWED[package] | {package} | set(sys.stdlib_module_names)

    if any(edge in path.parents for edge in EDGES):
        return imports(ast.walk(tree)) & (ABOVE - {"conformance"})

    if package == "cpkit":
        return imports(tree.body) - allowed | imports(ast.walk(tree)) & ABOVE

    return imports(ast.walk(tree)) - allowed


def core_modules() -> Iterator[str]:
    """Give the names of the core's modules, all but the edges that need more."""
    for path in sorted((ROOT / "cpkit").rglob("*.py")):
        if not any(edge in path.parents for edge in EDGES):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


def public(module: ModuleType) -> set[str]:
    """Return the classes and functions that a module defines for others."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    }


def test_all_is_sorted_and_complete() -> None:
    """``cpkit.__all__`` is what ``cpkit`` offers, no more and no less."""
    assert cpkit.__all__ == sorted(cpkit.__all__)
    assert {*cpkit.__all__} == {*cpkit._HOMES} <= {*dir(cpkit)}
    assert all(getattr(cpkit, name) is not None for name in cpkit.__all__)

    with pytest.raises(AttributeError, match="no attribute 'Checkpoint'"):
        _ = cpkit.Checkpoint  # type: ignore[attr-defined]  # what is asked here


def test_importing_cpkit_imports_only_what_is_used() -> None:
    """An exception or a protocol costs no validation and no event loop."""
    script = "import cpkit, sys; print(*{'asyncio', 'pydantic'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "\n"


@pytest.mark.parametrize("name", DESIGNED)
def test_a_designed_name_is_importable_from_cpkit(name: str) -> None:
    """Every name of the design comes from ``cpkit``."""
    assert name in cpkit.__all__


@pytest.mark.parametrize("name", MODULES)
def test_a_module_lists_all_that_it_defines_for_others(name: str) -> None:
    """A module's ``__all__`` has every public class and function, and nothing else."""
    module = import_module(f"cpkit.{name}")

    assert public(module) <= set(module.__all__)
    assert all(hasattr(module, exported) for exported in module.__all__)


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    """Drivers and the suite import the core, the core imports pydantic alone."""
    paths = sorted((ROOT / package).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): wrong(package, path) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


def loaded_by(*modules: str) -> set[str]:
    """Return the top-level modules that an import loads, over those of pydantic."""
    script = (
        "import sys\n"
        "from pydantic import BaseModel, PositiveInt, TypeAdapter, ValidationError\n"
        "before = {name.partition('.')[0] for name in sys.modules}\n"
        f"import {', '.join(modules)}\n"
        "after = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(after - before))\n"
    )
    said = subprocess.check_output([sys.executable, "-c", script], text=True)
    return set(said.split())


def test_importing_cpkit_loads_pydantic_and_nothing_else_from_outside() -> None:
    """No driver, client library or test tool is paid for before it is asked for."""
    loaded = loaded_by(*(f"cpkit.{name}" for name in MODULES))
    heavy = {"ctypes", "http", "multiprocessing", "pickle", "sqlite3", "unittest"}

    assert loaded - set(sys.stdlib_module_names) == {"cpkit"}
    assert not heavy & loaded


def test_the_layers_need_nothing_else_from_outside_either() -> None:
    """What depends on more imports it when it is used, or (tracing) installed."""
    outside = loaded_by(*core_modules()) - set(sys.stdlib_module_names)
    assert outside - {"opentelemetry"} == {"cpkit"}
