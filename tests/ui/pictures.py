"""Take the pictures of the documentation: ``python -m tests.ui.pictures``."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from cpkit import open_checkpointer
from tests.ui.browser import browser_for, serving, visit
from tests.ui.stocked import stock

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
SIZE = {"width": 1000, "height": 620}

PLACES = {
    "thread": "/thread?id=order-1042",
    "tree": "/session?id=session-parser",
    "waiting": "/waiting",
}


async def _stock(url: str) -> None:
    async with open_checkpointer(url, message_type=Any) as cp:
        await stock(cp)


def _take(page: Page, name: str) -> None:
    page.screenshot(path=FOLDER / f"{name}.png")


def main() -> None:
    """Take one picture for each place, and one of a request."""
    folder = Path(tempfile.mkdtemp())
    asyncio.run(_stock(f"sqlite:///{folder}/agent.db"))

    with serving("sqlite:///agent.db", folder) as link, browser_for() as browser:
        with visit(browser, link, viewport=SIZE, color_scheme="light") as window:
            for name, path in PLACES.items():
                _take(window.go(path), name)

            page = window.go("/waiting")
            page.get_by_role("link", name="Approve…").first.click()
            page.wait_for_load_state()
            _take(page, "decide")


if __name__ == "__main__":
    main()
