"""What imports every module of cpkit, for which every framework has to be here."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module

import pytest

import cpkit
from cpkit.errors import CheckpointerError
from tests.core.test_errors import CONTRACT, drawn_trees
from tests.core.test_imports import ROOT, loaded_by, module_name


def subclasses(error: type[CheckpointerError]) -> Iterator[type[CheckpointerError]]:
    for child in error.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_error_of_the_layers_is_drawn() -> None:
    """The drawing names each one once, with the package that exports it."""
    for module in pkgutil.walk_packages(cpkit.__path__, "cpkit."):
        if not module.name.endswith(".__main__"):  # runs the command
            import_module(module.name)

    _, drawn = drawn_trees()
    classes = [getattr(import_module(module), name) for name, module in drawn]
    defined = {
        error
        for error in subclasses(CheckpointerError)
        if error.__module__.startswith("cpkit.") and error not in CONTRACT
    }

    assert set(classes) == defined
    assert len(classes) == len(defined)


@pytest.mark.long
def test_no_module_of_cpkit_loads_the_suite() -> None:
    """``cpkit certify`` imports the suite when the command runs, and not before."""
    modules = [
        module_name(path)
        for path in (ROOT / "cpkit").rglob("*.py")
        if path.name != "__main__.py"  # runs the command
        and "integrations" not in path.parts  # their frameworks take seconds to load
    ]
    loaded = loaded_by(*modules)
    assert "typer" in loaded
    assert "conformance" not in loaded
