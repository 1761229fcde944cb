"""The maps of ARCHITECTURE.md and CONTRIBUTING.md: no missing file, every module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS

ROOT = DOCS.parent
PACKAGES = ("cpkit", "cpkit_*", "conformance", "benchmarks")


def _mapped(page: str) -> Iterator[Path]:
    """Yield each path in the first column of a page's tables of places.

    A name without a folder is in the folder of the name before it.
    """
    for row in re.findall(r"^\| (`.*?) \|", (ROOT / page).read_text(), re.MULTILINE):
        folder = ROOT

        for name in re.findall(r"`([^`]+)`", row):
            path = folder / name if (folder / name).exists() else ROOT / name
            yield path
            folder = path.parent


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_a_map_names_only_what_exists(page: str) -> None:
    places = list(_mapped(page))

    assert len(places) > 15
    assert [str(place) for place in places if not place.exists()] == []


def test_contributing_names_every_module() -> None:
    named = set(_mapped("CONTRIBUTING.md"))
    modules = [
        module
        for pattern in PACKAGES
        for package in ROOT.glob(pattern)
        if package.is_dir()
        for module in package.rglob("*.py")
        if module.name != "__init__.py"
    ]
    assert len(modules) > 200
    assert [
        str(module.relative_to(ROOT))
        for module in modules
        if module not in named and named.isdisjoint(module.parents)
    ] == []
