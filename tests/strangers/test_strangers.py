"""The page about other people's stores says what the suite finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.strangers.harnesses import STRANGERS
from tests.strangers.page import PAGE, findings, outcomes_of


def listed(kind: str) -> dict[str, str]:
    """Return whose each failure is, as the page's section about a store says."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"## {kind}\n")
    table, _, lacks = section.partition("\n## ")[0].partition("\nLacks ")
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|", table, flags=re.MULTILINE)
    return dict(rows) | dict.fromkeys(re.findall(r"`([^`]+)`", lacks), "lacks")


# Not held to it here: CubePi's Postgres store takes a use from another event loop to
# asyncpg, and that can take the interpreter down, with every other test in it.
HELD = [kind for kind in STRANGERS if kind != "CubePi, Postgres"]


@pytest.mark.parametrize("kind", HELD)
# Their own warnings are not ours to mend.
@pytest.mark.filterwarnings("ignore")
async def test_the_page_lists_what_the_suite_finds(kind: str, tmp_path: Path) -> None:
    """Clause by clause, and whose each failure is."""
    assert listed(kind) == findings(await outcomes_of(kind, tmp_path))
