"""docs/strangers.md lists what the suite finds."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from conformance.slowdown import slowdown
from tests.strangers.harnesses import STRANGERS
from tests.strangers.page import PAGE
from tests.strangers.servers import placed


def listed(kind: str) -> dict[str, str]:
    """Return the causes that the page lists for a store, by clause id."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"## {kind}\n")
    table, _, lacks = section.partition("\n## ")[0].partition("\nLacks ")
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|", table, flags=re.MULTILINE)
    return dict(rows) | dict.fromkeys(re.findall(r"`([^`]+)`", lacks), "lacks")


# cubeloop on Postgres is left out: it passes calls from another event loop on to
# asyncpg. That can crash the interpreter.
HELD = [kind for kind in STRANGERS if kind != "cubeloop, Postgres"]


@pytest.mark.long
@pytest.mark.parametrize("kind", HELD)
async def test_the_page_lists_what_the_suite_finds(kind: str, tmp_path: Path) -> None:
    """The page lists each failed clause with the right cause."""
    stranger = await placed(kind, tmp_path)
    command = [sys.executable, "-m", "tests.strangers.findings", kind, *stranger.where]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)

    try:
        out, errors = await asyncio.wait_for(process.communicate(), 50 * slowdown())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert process.returncode == 0, errors.decode()
    assert listed(kind) == json.loads(out)
