"""The page about other people's stores says what the suite finds."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.strangers.harnesses import STRANGERS
from tests.strangers.page import PAGE
from tests.strangers.servers import placed


def listed(kind: str) -> dict[str, str]:
    """Return whose each failure is, as the page's section about a store says."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"## {kind}\n")
    table, _, lacks = section.partition("\n## ")[0].partition("\nLacks ")
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|", table, flags=re.MULTILINE)
    return dict(rows) | dict.fromkeys(re.findall(r"`([^`]+)`", lacks), "lacks")


# Not held to it: CubePi's Postgres store takes a use from another event loop down to
# asyncpg, and that can take the interpreter with it.
HELD = [kind for kind in STRANGERS if kind != "CubePi, Postgres"]


@pytest.mark.parametrize("kind", HELD)
async def test_the_page_lists_what_the_suite_finds(kind: str, tmp_path: Path) -> None:
    """Clause by clause, and whose each failure is."""
    stranger = await placed(kind, tmp_path)
    command = [sys.executable, "-m", "tests.strangers.findings", kind, *stranger.where]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)

    try:
        out, said = await asyncio.wait_for(process.communicate(), 50)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert process.returncode == 0, said.decode()
    assert listed(kind) == json.loads(out)
