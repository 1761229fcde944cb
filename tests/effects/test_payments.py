"""The payments example: the server's books show each order once, despite kills."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stores import quick_on

FILE = Path(__file__).parents[2] / "examples" / "payments.py"


async def payments(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the example until it exits."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(FILE), *options],
        capture_output=True,
        text=True,
    )


async def check_each_is_charged_once(url: str, how: str) -> None:
    """Run the example with kills; no order is charged twice, unapproved or never."""
    done = await payments(
        "--url", url, "--orders", "40", "--kills", "4", "--ledger", how
    )
    # A kill may cut a write of the files, and the next reader says so.
    lines = done.stderr.splitlines()
    errors = [one for one in lines if "a write that was never acknowledged" not in one]
    assert (done.returncode, errors) == (0, []), done.stdout + done.stderr
    row = re.search(
        rf"^{how} +(\d+) +(\d+) +0 +0 +0 +0 +[\d.]+$", done.stdout, re.MULTILINE
    )
    assert row is not None, done.stdout
    assert (row[1], row[2]) == ("4", "37")


# Two classes, so that two test processes share the work.
class TestVerify:
    @pytest.mark.parametrize("url", quick_on(), indirect=True)
    async def test_orders_are_charged_exactly_once(self, url: str) -> None:
        """``verify`` looks up what a killed worker did."""
        await check_each_is_charged_once(url, "verify")


class TestKey:
    @pytest.mark.parametrize("url", quick_on(), indirect=True)
    async def test_orders_are_charged_exactly_once(self, url: str) -> None:
        """The handler passes the key downstream."""
        await check_each_is_charged_once(url, "key")


@pytest.mark.long
async def test_without_the_ledger_the_books_show_duplicates() -> None:
    """The same workers without the ledger charge orders twice, and without approval."""
    done = await payments("--orders", "40", "--kills", "3", "--ledger", "none")
    row = re.search(r"^none +3 +40 +(\d+) +0 +(\d+)", done.stdout, re.MULTILINE)
    assert row is not None, done.stdout + done.stderr
    assert int(row[1]) > 0
    assert int(row[2]) > 0
