"""The code in docs/sessions.md runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cpkit import cadence, sessions
from cpkit.sessions import editor
from tests.cli.command import run_main
from tests.docs.pages import DOCS, blocks_of, printed_by

PAGE = (DOCS / "sessions.md").read_text(encoding="utf-8")
BLOCKS = blocks_of("sessions.md")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_block_runs(tmp_path: Path, number: int) -> None:
    """The assertions in each block hold."""
    printed = printed_by(BLOCKS[number], tmp_path)

    if number == 0:
        assert printed == (
            "['user', 'branchSummary', 'assistant'] {}\n6 entries, 2 branches\n"
        )


def test_the_picture_is_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command below the first block draws the file that the page shows."""
    [command] = re.findall(r"`cpkit (tree [^`]*--svg)`", PAGE)
    printed_by(BLOCKS[0], tmp_path)
    monkeypatch.chdir(tmp_path)
    picture = (DOCS / "pictures" / "session-tree.svg").read_text(encoding="utf-8")
    assert run_main(*command.split()).out == picture


def test_every_append_is_in_the_table() -> None:
    """The table lists every append method of the editor."""
    verbs = [name for name in vars(editor.SessionEditor) if name.startswith("append_")]
    assert all(f"`{verb}(" in PAGE for verb in verbs)


@pytest.mark.parametrize("module", [sessions, cadence])
def test_public_names_exist(module: object) -> None:
    """__all__ lists only names of the module."""
    names: list[str] = module.__all__  # type: ignore[attr-defined]  # both have it
    assert sorted(names) == sorted(set(names))
    assert all(hasattr(module, name) for name in names)
