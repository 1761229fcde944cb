"""The commands in docs/command-line.md run as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cpkit.cli.app import COMMANDS
from tests.cli.command import run_main

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text("utf-8")


def test_each_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exits with 0, in the order of the page, starting from an empty folder."""
    commands = re.findall(r"^\$ (cpkit .*)$", PAGE, flags=re.MULTILINE)
    assert len(commands) > 5
    monkeypatch.chdir(tmp_path)

    for command in commands:
        ended = run_main(*shlex.split(command)[1:])
        assert ended.code == 0, (command, ended.err)


def test_each_command_is_on_the_page() -> None:
    """The table of the page names every command."""
    for name in COMMANDS:
        assert f"`{name}" in PAGE
