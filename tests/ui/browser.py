"""A page server in its own process, and a real browser that looks at it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

__all__ = ["Visit", "browser_for", "serving", "visit"]


@contextmanager
def serving(url: str, folder: Path | None = None) -> Iterator[str]:
    """Run ``cpkit ui`` in a folder, and yield the link that it prints."""
    command = [sys.executable, "-m", "cpkit", "ui", url, "--port", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--by", "anna"], stdout=subprocess.PIPE, text=True, cwd=folder
    )

    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextmanager
def browser_for() -> Iterator[Browser]:
    """Start Chromium, Debian's or any other on the machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)

    if found is None:
        pytest.skip("needs chromium")

    with sync_playwright() as playwright:
        # The sandbox needs rights that a container does not give.
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox"]
        )

        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One browser window that is logged in, and what its console reported."""

    def __init__(self, context: BrowserContext, link: str) -> None:
        self.root = link.partition("/threads")[0]
        self.page: Page = context.new_page()
        self.reports: list[str] = []
        self.page.on("console", lambda message: self.reports.append(message.text))
        self.page.on("pageerror", lambda error: self.reports.append(str(error)))
        self.page.on("dialog", lambda dialog: self.reports.append(dialog.message))
        self.page.goto(link)

    def go(self, path: str) -> Page:
        """Open a path of the page."""
        self.page.goto(self.root + path)
        return self.page


@contextmanager
def visit(browser: Browser, link: str, **options: Any) -> Iterator[Visit]:
    """Open the page in a window of its own."""
    context = browser.new_context(**options)

    try:
        yield Visit(context, link)
    finally:
        context.close()
