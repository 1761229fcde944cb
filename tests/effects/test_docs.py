"""The code in docs/effects.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpkit import effects, lease
from cpkit.effects import errors

PAGE = (Path(__file__).parents[2] / "docs" / "effects.md").read_text(encoding="utf-8")
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
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    if number == 0:
        assert done.stdout == "charging 1000\n" + "{'charge': 'ch_1'}\n" * 2
        again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert again.stdout == "{'charge': 'ch_1'}\n" * 2


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
