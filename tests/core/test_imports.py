"""The public names, and which package may import which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import cpkit

ROOT = Path(__file__).parents[2]

# The names of the contract.
DESIGNED = """
    BackendUnavailable CallMismatch CallRecord CheckpointData Checkpointer
    CheckpointerError Closed CorruptThread ErasesThreads InvalidId InvalidURL JsonValue
    KeepsReceipts KeyTaken ListsThreads MovesThreads PayloadTooLarge ReadsRanges
    SchemaMismatch SerializationError ThreadDump ThreadInfo ToolCall UnknownCall
    VersionConflict WrongEventLoop open_checkpointer
""".split()

MODULES = """
    canonical driver.codec driver.dumps driver.group_commit driver.handle driver.ids
    driver.jsontext driver.lifecycle driver.store_calls driver.writes errors
    driver.hash_check driver.sealed fenced keyring memory messages protocol records
    registry
""".split()

PYDANTIC = {"pydantic", "pydantic_core"}

# What each package may import besides the standard library and itself.
ALLOWED = {
    "cpkit": PYDANTIC,
    "cpkit_sqlite": {"cpkit"} | PYDANTIC,
    "cpkit_postgres": {"cpkit", "asyncpg"} | PYDANTIC,
    "cpkit_redis": {"cpkit", "redis"} | PYDANTIC,
    "cpkit_file": {"cpkit", "aiofiles", "watchfiles"} | PYDANTIC,
    # pydantic needs the TypedDict of typing_extensions below Python 3.12.
    "conformance": {"cpkit", "pytest", "hypothesis", "typing_extensions"} | PYDANTIC,
}

# The parts of the core that may import more: an adapter imports its framework, and
# the command line imports the suite, and the page a web framework.
EDGES = (
    ROOT / "cpkit" / "cli",
    ROOT / "cpkit" / "integrations",
    ROOT / "cpkit" / "tools" / "importing" / "langgraph",
    ROOT / "cpkit" / "ui",
)
# Names with an underscore that the standard library documents.
DOCUMENTED = {"os._exit", "sys._current_frames", "sys._getframe"}

ABOVE = {"cpkit_sqlite", "cpkit_postgres", "cpkit_redis", "cpkit_file", "conformance"}


@cache
def nodes_of(path: Path) -> tuple[list[ast.stmt], list[ast.AST]]:
    """Return the statements of a file at its top level, and all imports and names."""
    tree = ast.parse(path.read_text())
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute)
    return tree.body, [node for node in ast.walk(tree) if isinstance(node, kinds)]


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
    """Return the packages that a file imports although its package may not.

    The core may import the packages of an extra inside a function or a ``try``. It may
    not import a driver or the suite there either.
    """
    body, nodes = nodes_of(path)
    allowed = ALLOWED[package] | {package} | set(sys.stdlib_module_names)

    if any(edge in path.parents for edge in EDGES):
        return imports(nodes) & (ABOVE - {"conformance"})

    if package == "cpkit":
        return imports(body) - allowed | imports(nodes) & ABOVE

    return imports(nodes) - allowed


def module_name(path: Path) -> str:
    """Return the dotted name of a file in the repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@cache
def import_graph(package: str) -> dict[str, set[str]]:
    """Return which modules of the package each of its modules imports.

    Imports inside functions and under ``TYPE_CHECKING`` are included.
    """
    paths = {module_name(path): path for path in (ROOT / package).rglob("*.py")}
    graph = {}

    for module, path in paths.items():
        named: set[str] = set()

        for node in nodes_of(path)[1]:
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path} has a relative import"

                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    named.add(inner if inner in paths else str(node.module))

        graph[module] = named & set(paths) - {module}

    return graph


def cyclic_modules(graph: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that import themselves through other modules."""

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        left = [*graph[start]]

        while left:
            module = left.pop()

            if module not in found:
                found.add(module)
                left += graph[module]

        return found

    return {module for module in graph if module in reachable(module)}


def private_names(path: Path) -> set[str]:
    """Return the private names that a file takes from modules of other projects."""
    nodes = nodes_of(path)[1]
    foreign = imports(nodes) - set(ALLOWED)
    dotted: set[str] = set()

    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            dotted.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            dotted |= {f"{node.module}.{alias.name}" for alias in node.names}

    return {
        name
        for name in dotted - DOCUMENTED
        if name.partition(".")[0] in foreign
        and re.fullmatch(r"[\w.]+\._[A-Za-z]\w*", name)
    }


def core_modules() -> Iterator[str]:
    """Yield the names of the core's modules, except those that may import more."""
    for path in sorted((ROOT / "cpkit").rglob("*.py")):
        if not any(edge in path.parents for edge in EDGES) and path.stem != "__main__":
            yield module_name(path)


def public(module: ModuleType) -> set[str]:
    """Return the public classes and functions that a module defines."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    }


def test_all_is_sorted_and_complete() -> None:
    """``cpkit.__all__`` has exactly the public names."""
    assert cpkit.__all__ == sorted(cpkit.__all__)
    assert {*cpkit.__all__} == {*cpkit._HOMES} <= {*dir(cpkit)}
    assert all(getattr(cpkit, name) is not None for name in cpkit.__all__)

    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", cpkit.__version__)

    with pytest.raises(AttributeError, match="no attribute 'Checkpoint'"):
        _ = cpkit.Checkpoint  # type: ignore[attr-defined]  # the mistake under test


def test_importing_cpkit_imports_only_what_is_used() -> None:
    """``import cpkit`` alone loads neither pydantic nor asyncio."""
    script = "import cpkit, sys; print(*{'asyncio', 'pydantic'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "\n"


@pytest.mark.parametrize("name", DESIGNED)
def test_a_designed_name_is_importable_from_cpkit(name: str) -> None:
    """Every name of the contract can be imported from ``cpkit``."""
    assert name in cpkit.__all__


@pytest.mark.parametrize("name", MODULES)
def test_a_module_lists_its_public_names(name: str) -> None:
    """A module's ``__all__`` has every public class and function, and nothing else."""
    module = import_module(f"cpkit.{name}")

    assert public(module) <= set(module.__all__)
    assert all(hasattr(module, exported) for exported in module.__all__)


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    """Drivers and the suite import the core, and the core imports only pydantic."""
    paths = sorted((ROOT / package).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): wrong(package, path) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("package", ALLOWED)
def test_modules_of_a_package_import_each_other_without_a_cycle(package: str) -> None:
    """Imports inside functions and imports for types count too."""
    assert not cyclic_modules(import_graph(package))


def test_the_contract_and_the_driver_kit_import_no_layer() -> None:
    """Layers, tools and the command line build on them, never the other way."""
    below = {"cpkit", *(f"cpkit.{name.partition('.')[0]}" for name in MODULES)}

    for module, imported in import_graph("cpkit").items():
        if module in below or module.startswith("cpkit.driver"):
            outside = {
                name
                for name in imported
                if name not in below and not name.startswith("cpkit.driver")
            }
            assert not outside, f"{module} imports {sorted(outside)}"


def test_a_cycle_is_found() -> None:
    """A module that only imports a cycle is not part of it."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "c"}}
    assert cyclic_modules(graph) == {"b", "c"}


@pytest.mark.parametrize("package", ALLOWED)
def test_private_names_of_dependencies_are_not_used(package: str) -> None:
    """A name with a leading underscore may change in any release of its owner."""
    paths = sorted((ROOT / package).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): private_names(path) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


def loaded_by(*modules: str) -> set[str]:
    """Return the top-level modules that an import loads beyond those of pydantic."""
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
    """No driver, client library or test tool is loaded before it is used."""
    loaded = loaded_by(*(f"cpkit.{name}" for name in MODULES))
    heavy = {"ctypes", "http", "multiprocessing", "pickle", "sqlite3", "unittest"}

    assert loaded - set(sys.stdlib_module_names) == {"cpkit"}
    assert not heavy & loaded


def test_the_layers_load_nothing_else_from_outside_either() -> None:
    """A layer imports other packages when it uses them, or if installed (tracing)."""
    outside = loaded_by(*core_modules()) - set(sys.stdlib_module_names)
    assert outside - {"opentelemetry"} == {"cpkit"}
