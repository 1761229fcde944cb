"""The commands in docs/command-line.md run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from cpkit.cli.app import VERBS
from tests.cli.command import cpkit

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text("utf-8")


def test_each_command_runs(tmp_path: Path) -> None:
    """In their order, from an empty folder; each ends well."""
    commands = re.findall(r"^\$ (cpkit .*)$", PAGE, flags=re.MULTILINE)
    assert len(commands) > 5

    for command in commands:
        ended = cpkit(*shlex.split(command)[1:], cwd=tmp_path)
        assert ended.code == 0, (command, ended.err)


def test_each_verb_is_on_the_page() -> None:
    """And has an example of its own in its help."""
    for verb in VERBS:
        assert f"`{verb.__name__.rstrip('_')}" in PAGE
