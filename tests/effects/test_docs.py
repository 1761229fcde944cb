"""The code blocks in docs/effects.md run unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cpkit.errors
from cpkit import effects, lease
from cpkit.effects import errors
from tests.docs.pages import DOCS, blocks_of, printed_by

PAGE = (DOCS / "effects.md").read_text(encoding="utf-8")
BLOCKS = blocks_of("effects.md")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_block_runs(tmp_path: Path, number: int) -> None:
    """A block runs without an error, so its own assertions hold."""
    printed = printed_by(BLOCKS[number], tmp_path)

    if number == 0:
        assert printed == "charging 1000\n" + "{'charge': 'ch_1'}\n" * 2
        assert printed_by(BLOCKS[0], tmp_path) == "{'charge': 'ch_1'}\n" * 2


@pytest.mark.parametrize("module", [effects, lease, errors])
def test_all_names_only_what_exists(module: object) -> None:
    """``__all__`` has no duplicates, and every name in it exists."""
    names: list[str] = module.__all__  # type: ignore[attr-defined]  # all have it
    assert sorted(names) == sorted(set(names))
    assert all(hasattr(module, name) for name in names)


def test_the_tree_of_all_errors_draws_those_of_the_effects() -> None:
    """It has exactly the classes of the module."""
    drawn = re.findall(r"[├└]── (\w+) +cpkit\.effects:", cpkit.errors.__doc__ or "")
    assert sorted(drawn) == sorted(errors.__all__)
