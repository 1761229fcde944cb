"""Real processes, real kills: the payment server's own books show each order once."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "payments.py"


async def payments(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the example to its end."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(FILE), *options],
        capture_output=True,
        text=True,
        timeout=55,
    )


async def check_that_each_is_charged_once(url: str, how: str) -> None:
    """Workers are killed with SIGKILL; nobody is charged twice, unasked or never."""
    if url.startswith("memory:"):
        pytest.skip("memory is of one process")

    done = await payments(
        "--url", url, "--orders", "40", "--kills", "4", "--ledger", how
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    row = re.search(
        rf"^{how} +(\d+) +(\d+) +0 +0 +0 +0 +[\d.]+$", done.stdout, re.MULTILINE
    )
    assert row is not None, done.stdout
    assert (row[1], row[2]) == ("4", "37")


# Classes, because each goes to one of the processes that share the tests.
class TestVerify:
    async def test_orders_are_charged_exactly_once(self, url: str) -> None:
        """With a hook that looks up what a killed worker left."""
        await check_that_each_is_charged_once(url, "verify")


class TestKey:
    async def test_orders_are_charged_exactly_once(self, url: str) -> None:
        """With the key passed downstream."""
        await check_that_each_is_charged_once(url, "key")


async def test_without_the_ledger_the_books_show_duplicates() -> None:
    """What the same workers do without it is what it is for."""
    done = await payments("--orders", "40", "--kills", "3", "--ledger", "none")
    row = re.search(r"^none +3 +40 +(\d+) +0 +(\d+)", done.stdout, re.MULTILINE)
    assert row is not None, done.stdout + done.stderr
    assert int(row[1]) > 0
    assert int(row[2]) > 0
