"""The README's code and commands run as pasted, from top to bottom, in one folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import run_main
from tests.docs.pages import printed_by

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
CONSOLE = "".join(re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL))
COMMANDS = re.findall(r"^(cpkit [^#\n]*)", CONSOLE, flags=re.MULTILINE)


def test_every_block_has_a_test() -> None:
    """A new block needs a test below; another language needs one too."""
    assert len(BLOCKS) == 3
    assert set(re.findall(r"^```(\w+)$", README, re.MULTILINE)) == {"python", "console"}


def test_the_program_books_once_and_the_commands_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run finds the booking of the first."""
    assert printed_by(BLOCKS[0], tmp_path) == "{'reservation': '4WQ150'} 1\n"
    assert printed_by(BLOCKS[0], tmp_path) == "{'reservation': '4WQ150'} 2\n"
    monkeypatch.chdir(tmp_path)
    shown = [one for one in COMMANDS if "certify" not in one]
    assert len(shown) > 3

    for command in shown:
        ended = run_main(*shlex.split(command)[1:])
        assert ended.code == 0, (command, ended.err)


def test_typed_messages_are_loaded_typed(tmp_path: Path) -> None:
    """The printed message has its fields."""
    assert printed_by(BLOCKS[1], tmp_path).startswith("content='hi'")


@pytest.mark.long
def test_the_test_file_certifies_a_backend(tmp_path: Path) -> None:
    """The inherited class collects the clauses, and some of them pass."""
    (tmp_path / "test_my_store.py").write_text(BLOCKS[2], encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-k", "append.returns or shares-calls", "test_my_store.py"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("command", [one for one in COMMANDS if "certify" in one])
def test_a_store_is_certified_from_the_command_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every clause that is checked holds."""
    monkeypatch.chdir(tmp_path)
    ended = run_main(*shlex.split(command)[1:])
    assert ended.code == 0, ended.out + ended.err


@pytest.mark.parametrize("verb", re.findall(r"^make (\w+)", README, flags=re.MULTILINE))
def test_the_make_verbs_exist(verb: str) -> None:
    """Each ``make`` verb that the README names is a target."""
    assert re.search(rf"^{verb}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_links_lead_to_files() -> None:
    """Pictures and pages that the README names are in the repository."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target
