"""The code in docs/effects.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cpkit import effects, lease
from cpkit.effects import errors
from tests.docs.pages import DOCS, blocks_of, printed_by

PAGE = (DOCS / "effects.md").read_text(encoding="utf-8")
BLOCKS = blocks_of("effects.md")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_block_runs(tmp_path: Path, number: int) -> None:
    """Its own assertions hold."""
    printed = printed_by(BLOCKS[number], tmp_path)

    if number == 0:
        assert printed == "charging 1000\n" + "{'charge': 'ch_1'}\n" * 2
        assert printed_by(BLOCKS[0], tmp_path) == "{'charge': 'ch_1'}\n" * 2


@pytest.mark.parametrize("module", [effects, lease, errors])
def test_public_names_are_there(module: object) -> None:
    """__all__ names what exists."""
    names: list[str] = module.__all__  # type: ignore[attr-defined]  # all have it
    assert sorted(names) == sorted(set(names))
    assert all(hasattr(module, name) for name in names)


def test_the_tree_of_errors_is_the_one_drawn() -> None:
    """Each class is in the docstring's tree, and the tree has no other."""
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert sorted(drawn) == sorted(errors.__all__)
