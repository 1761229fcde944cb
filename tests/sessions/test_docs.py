"""The code in docs/sessions.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpkit import cadence, sessions
from cpkit.sessions import editor

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sessions.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

# A block is a program, or defines a coroutine function that takes a store.
RUNNER = """
import asyncio
from cpkit import open_checkpointer

async def run():
    async with open_checkpointer("memory://") as cp:
        await {name}(cp)

asyncio.run(run())
"""


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_block_runs(tmp_path: Path, number: int) -> None:
    """Its own assertions hold."""
    code = BLOCKS[number]

    if "asyncio.run(" not in code:
        code += RUNNER.format(name=re.findall(r"async def (\w+)\(cp\)", code)[0])

    script = tmp_path / "block.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    if number == 0:
        assert done.stdout == (
            "['user', 'branchSummary', 'assistant'] {}\n6 entries, 2 branches\n"
        )


def test_every_append_is_in_the_table() -> None:
    """What a session can be told is told to its reader."""
    verbs = [name for name in vars(editor.SessionEditor) if name.startswith("append_")]
    assert all(f"`{verb}(" in PAGE for verb in verbs)


@pytest.mark.parametrize("module", [sessions, cadence])
def test_public_names_are_there(module: object) -> None:
    """__all__ names what exists."""
    names: list[str] = module.__all__  # type: ignore[attr-defined]  # both have it
    assert sorted(names) == sorted(set(names))
    assert all(hasattr(module, name) for name in names)
