"""The page in a real browser: live, by keyboard, without scripts, for all readers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import (  # type: ignore[import-untyped]  # it has no types
    Axe,
)
from playwright.sync_api import Browser, expect

from cpkit import open_checkpointer
from cpkit.effects import EffectLedger
from tests.stores import SHARED, fresh_url
from tests.ui.browser import browser_for, serving, visit
from tests.ui.stocked import stock, stock_hostile

pytestmark = pytest.mark.long  # a browser takes seconds to start

T = TypeVar("T")

VIEWS = {
    "threads": "/threads",
    "thread": "/thread?id=order-1042",
    "calls": "/thread/calls?id=order-1042",
    "extra": "/thread/extra?id=order-1042",
    "tree": "/session?id=session-parser",
    "session": "/thread?id=session-parser",
    "waiting": "/waiting",
    "in doubt": "/waiting/calls",
    "failed": "/threads?state=failed",
    "search": "/threads?q=order",
    "store": "/store",
}


def in_store(url: str, work: Callable[[Any], Awaitable[T]]) -> T:
    """Open the store in this process, work on it, and close it.

    In a thread of its own, because the browser's client runs a loop in this one.
    """

    async def run() -> T:
        async with open_checkpointer(url, message_type=Any) as cp:
            return await work(cp)

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, run()).result()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browser_for() as browser:
        yield browser


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A stocked store that the tests of this module share."""
    url = fresh_url("sqlite", tmp_path_factory.mktemp("ui"))
    in_store(url, stock)
    return url


@pytest.fixture(scope="module")
def link(url: str) -> Iterator[str]:
    with serving(url) as link:
        yield link


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_accessible(browser: Browser, link: str, scheme: str) -> None:
    """The accessibility checker finds nothing serious, light and dark."""
    axe = Axe()

    with visit(browser, link, color_scheme=scheme) as window:
        for path in VIEWS.values():
            found = axe.run(window.go(path)).response["violations"]
            bad = [
                (one["id"], [node["html"] for node in one["nodes"]][:3])
                for one in found
                if one["impact"] in ("serious", "critical")
            ]
            assert (path, bad) == (path, [])


def test_every_view_fits_a_telephone(browser: Browser, link: str) -> None:
    """At 400 pixels no view is wider than the screen."""
    size = {"width": 400, "height": 800}

    with visit(browser, link, viewport=size) as window:
        for path in VIEWS.values():
            width = window.go(path).evaluate("document.documentElement.scrollWidth")
            assert (path, width) == (path, 400)

        assert window.reports == []


def test_an_append_appears(browser: Browser, link: str, url: str) -> None:
    """An open page shows a message of another process without a reload."""
    in_store(url, lambda cp: cp.append("live", [{"role": "user", "content": "one"}]))

    with visit(browser, link) as window:
        page = window.go("/thread?id=live")
        expect(page.locator("#live")).to_have_text("live")
        page.evaluate("window.stayed = true")
        message = {"role": "assistant", "content": "**two** from afar"}
        in_store(url, lambda cp: cp.append("live", [message]))
        expect(page.locator("strong")).to_have_text("two", timeout=20_000)
        assert page.evaluate("window.stayed")
        assert window.reports == []


def test_times_are_local(browser: Browser, link: str, url: str) -> None:
    """With UTC on hover, and after a change as well."""
    message = {"role": "user", "content": "one", "timestamp": "2026-07-01T12:00:00Z"}
    in_store(url, methodcaller("append", "times", [message]))

    with visit(browser, link, timezone_id="Asia/Tokyo") as window:
        page = window.go("/thread?id=times")
        expect(page.locator("#live")).to_have_text("live")
        in_store(url, methodcaller("append", "times", [message | {"content": "two"}]))
        expect(page.locator(".row")).to_have_count(2, timeout=20_000)
        times = page.locator(".row time")
        expect(times).to_have_text(["2026-07-01 21:00:00"] * 2)
        expect(times.first).to_have_attribute("title", "2026-07-01 12:00:00 UTC")
        assert window.reports == []


def test_a_hidden_tab_keeps_no_connection(
    browser: Browser, link: str, url: str
) -> None:
    """Six connections of hidden tabs would leave none for a decision."""
    show = """state => {
        Object.defineProperty(document, "visibilityState",
                              {value: state, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""

    with visit(browser, link) as window:
        pages = []

        for n in range(8):
            name = f"hidden{n}"
            in_store(url, methodcaller("append", name, [{"content": "one"}]))
            page = window.page.context.new_page()
            page.goto(f"{window.root}/thread?id={name}")
            page.evaluate(show, "hidden")
            pages.append(page)

        later = {"role": "assistant", "content": "**seen** later"}
        in_store(url, methodcaller("append", "hidden0", [later]))
        pages[0].evaluate(show, "visible")
        expect(pages[0].locator("strong")).to_have_text("seen", timeout=20_000)


async def _refund(cp: Any) -> object:
    """Run the effect that was approved."""
    args: dict[str, Any] = {"order": 1042, "amount": "89.90 EUR"}
    ledger = EffectLedger(cp, requires_approval=lambda effect: True)
    return await ledger.run("order-1042", "refund", args, lambda effect: "refunded")


def test_two_people_decide_at_once(browser: Browser, tmp_path: Path) -> None:
    """One window decides, the other says who did; then the first shows the effect."""
    url = fresh_url("sqlite", tmp_path)
    in_store(url, stock)

    with (
        serving(url) as link,
        visit(browser, link) as anna,
        visit(browser, link) as ben,
    ):
        for window in (anna, ben):
            window.go("/waiting").get_by_role("link", name="refund").click()

        anna.page.get_by_role("button", name="Approve").click()
        expect(anna.page.get_by_role("status").first).to_contain_text(
            "approved by anna"
        )
        ben.page.get_by_label("Reason").fill("too much")
        ben.page.get_by_role("button", name="Deny").click()
        expect(ben.page.get_by_role("alert")).to_contain_text(
            "already approved by anna"
        )
        in_store(url, _refund)
        expect(anna.page.get_by_text("completed")).to_be_visible(timeout=20_000)
        expect(anna.page.get_by_role("status").first).to_contain_text("Recorded")
        assert anna.reports == []


def test_a_request_is_decided_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    """j selects, a opens the request with its button focused, Enter approves."""
    url = fresh_url("sqlite", tmp_path)
    in_store(url, stock)

    with serving(url) as link, visit(browser, link) as window:
        page = window.go("/waiting")
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("d")
        expect(page.get_by_role("button", name="Deny")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("status").first).to_contain_text("denied by anna")
        expect(page.locator("h1")).to_have_text("send_voucher")


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
def test_enter_in_the_reason_decides_nothing(
    browser: Browser, tmp_path: Path, scripts: bool
) -> None:
    """A browser presses a form's first button then, which must not be a decision."""
    url = fresh_url("sqlite", tmp_path)
    in_store(url, stock)

    with (
        serving(url) as link,
        visit(browser, link, java_script_enabled=scripts) as window,
    ):
        page = window.go("/waiting")
        page.get_by_role("link", name="Deny…").first.click()
        buttons = page.locator(".decide button:visible")
        expect(buttons.first).to_contain_text("Deny")
        posted: list[str] = []
        page.on("request", lambda request: posted.append(request.method))
        page.get_by_label("Reason").fill("not needed")
        page.get_by_label("Reason").press("Enter")
        page.wait_for_timeout(300)
        assert "POST" not in posted
        buttons.first.click()
        expect(page.get_by_role("status").first).to_contain_text("denied by anna")
        expect(page.locator(".facts-list")).to_contain_text("will not happen")


def test_a_request_is_decided_without_scripts(browser: Browser, tmp_path: Path) -> None:
    """Reading and deciding need no script."""
    url = fresh_url("sqlite", tmp_path)
    in_store(url, stock)

    with (
        serving(url) as link,
        visit(browser, link, java_script_enabled=False) as window,
    ):
        page = window.go("/threads?prefix=order-1")
        page.get_by_role("link", name="order-1042").click()
        expect(page.locator(".conversation .row")).to_have_count(4)
        page.get_by_role("link", name="Waiting for you").click()
        page.get_by_role("link", name="Approve…").first.click()
        page.get_by_role("button", name="Approve").click()
        expect(page.get_by_role("status").first).to_contain_text("approved by anna")


def test_hostile_content_never_runs(browser: Browser, tmp_path: Path) -> None:
    """The browser runs nothing that is stored, and its policy has nothing to report."""
    url = fresh_url("sqlite", tmp_path)
    in_store(url, stock_hostile)
    listed = in_store(url, lambda cp: cp.list_threads(limit=500))

    with serving(url) as link, visit(browser, link) as window:
        for path in ["/threads", "/waiting", "/store"]:
            window.go(path)

        for info in listed:
            name = quote(info.thread_id)

            for view in ("/thread", "/thread/calls", "/thread/extra"):
                page = window.go(f"{view}?id={name}")
                assert page.title() != "owned"

            if info.thread_id.startswith("session"):
                page = window.go(f"/session?id={name}")
                assert page.title() != "owned"

        assert window.reports == []


@pytest.mark.parametrize("kind", SHARED)
def test_every_view_works_on_every_store(
    kind: str, browser: Browser, tmp_path: Path
) -> None:
    """Every view is shown, updated and decided on every kind of store."""
    url = fresh_url(kind, tmp_path)
    in_store(url, stock)

    with serving(url) as link, visit(browser, link) as window:
        for path in VIEWS.values():
            expect(window.go(path).locator("h1")).to_be_visible()

        page = window.go("/thread?id=order-1042")
        expect(page.locator("#live")).to_have_text("live")
        message = {"role": "user", "content": "a late word"}
        in_store(url, lambda cp: cp.append("order-1042", [message]))
        expect(page.get_by_text("a late word")).to_be_visible(timeout=20_000)
        page = window.go("/waiting")
        page.get_by_role("link", name="Approve…").first.click()
        page.get_by_role("button", name="Approve").click()
        expect(page.get_by_role("status").first).to_contain_text("approved by anna")
        assert window.reports == []
