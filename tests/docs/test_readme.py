"""The README's code runs unchanged, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(code: str, folder: Path, *command: str) -> str:
    """Run a block as a file in the folder; return what it printed."""
    script = folder / "test_block.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_python_block_has_a_test() -> None:
    """A new block needs a test below."""
    assert len(BLOCKS) == 3


def test_twelve_lines_run_twice_and_book_once(tmp_path: Path) -> None:
    """The second run finds the booking of the first."""
    assert run(BLOCKS[0], tmp_path) == "{'reservation': '4WQ150'} 1\n"
    assert run(BLOCKS[0], tmp_path) == "{'reservation': '4WQ150'} 2\n"


def test_typed_messages_are_loaded_typed(tmp_path: Path) -> None:
    """The block's own assertion holds."""
    run(BLOCKS[1] + "\nimport asyncio\nasyncio.run(typed())\n", tmp_path)


def test_five_lines_certify_a_backend(tmp_path: Path) -> None:
    """The inherited class collects the clauses, and one of them passes."""
    only = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "append.returns")
    assert "passed" in run(BLOCKS[2], tmp_path, *only)


@pytest.mark.parametrize("verb", re.findall(r"^make (\w+)", README, flags=re.MULTILINE))
def test_the_commands_are_in_the_makefile(verb: str) -> None:
    """Each ``make`` verb that the README names is a target."""
    assert re.search(rf"^{verb}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
