"""Everything that is stored is hostile: shown, cut, and never run."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from cpkit.sessions import SessionLog
from tests.cli.stocked import CUT, stock_cut
from tests.ui.checks import assert_inert
from tests.ui.conftest import Client
from tests.ui.stocked import stock_hostile


async def test_hostile_text_is_inert_in_every_field(cp: Any, client: Client) -> None:
    """No stored text becomes a tag, an attribute, a script or a foreign image."""
    await stock_hostile(cp)

    async with client(cp, title="<b>\u202e title") as http:
        seen = 0
        waiting = await http.get("/waiting")
        pages = ["/threads?limit=500", "/waiting", "/store"]
        pages += [one for one in assert_inert(waiting).links if "/decide" in one]

        for info in await cp.list_threads(limit=500):
            name = quote(info.thread_id)
            pages += [f"/thread?id={name}", f"/thread/calls?id={name}"]
            pages.append(f"/thread/extra?id={name}")

            if info.version:  # the list of open requests has no messages
                pages.append(f"/thread/message?id={name}&at=0")

            if info.thread_id.startswith("session"):
                pages.append(f"/session?id={name}&all=1")
                tree = await http.get(f"/session?id={name}")
                pages += [one for one in assert_inert(tree).links if "state" in one]

        for path in pages:
            page = await http.get(path)
            assert page.status_code == 200, (path[:200], page.text[-500:])
            assert "\u202e" not in page.text
            assert_inert(page)
            seen += 1

        assert seen > 60


async def test_a_long_text_is_cut_with_a_link(cp: Any, client: Client) -> None:
    """A page of a conversation stays small; the message's own page has all of it."""
    text = "x" * 1_000_000
    await cp.append("t", [{"role": "user", "content": text}])

    async with client(cp) as http:
        page = await http.get("/thread?id=t")
        assert len(page.text) < 20_000
        assert "Show more" in page.text
        assert text in (await http.get("/thread/message?id=t&at=0")).text


async def test_many_parts_are_cut_with_a_link(cp: Any, client: Client) -> None:
    """A message of many small parts costs as little as one of a long text."""
    parts = [{"type": "text", "text": f"part {n}"} for n in range(20_000)]
    await cp.append("t", [{"role": "user", "content": parts}])

    async with client(cp) as http:
        page = await http.get("/thread?id=t")
        assert len(page.text) < 20_000
        assert "Show more: the whole message 0" in page.text
        assert "part 19999" in (await http.get("/thread/message?id=t&at=0")).text


async def test_a_short_text_makes_no_huge_table(cp: Any, client: Client) -> None:
    """Markdown gives each line of a table as many cells as its head has."""
    small = "|a|b|\n|-|-|\n|1|2|"
    huge = "|a" * 600 + "|\n" + "|-" * 600 + "|\n" + "|b|\n" * 400
    await cp.append("t", [{"role": "user", "content": text} for text in (small, huge)])

    async with client(cp) as http:
        page = await http.get("/thread?id=t")
        assert page.text.count("<table>") == 1
        assert len(page.text) < 20_000


async def test_control_characters_are_visible(cp: Any, client: Client) -> None:
    """Characters that a browser hides, or that reorder text, are shown as signs."""
    await cp.append("t", [{"role": "user", "content": "a\x00b\x1b[31m\u202ecod.exe"}])

    async with client(cp) as http:
        page = await http.get("/thread?id=t")
        assert "a\u2400b\u241b[31m⟨right-to-left override⟩cod.exe" in page.text
        data = (await http.get("/thread.json?id=t")).json()
        assert data["messages"][0]["content"] == "a\x00b\x1b[31m\u202ecod.exe"


async def test_half_a_character_is_visible(cp: Any, client: Client) -> None:
    """The page is valid UTF-8 and names it; its JSON has the text as it was."""
    await stock_cut(cp, "t")
    log = await SessionLog.open(cp, "s")
    at = await log.append_message({"role": "user", "content": CUT[0]})
    await log.append_state(text=CUT[1])
    await log.label(at, "\udfff")
    pages = ["thread?id=t", "thread/message?id=t&at=0", "thread/calls?id=t"]
    pages += ["thread/extra?id=t", "thread?id=s", "session?id=s&all=1"]
    pages.append(f"session/state?id=s&entry={log.leaf_id}")

    async with client(cp) as http:
        for path in pages:
            page = await http.get(f"/{path}")
            assert (page.status_code, path) == (200, path)
            assert "⟨U+D83D⟩" in page.content.decode() or "⟨U+DFFF⟩" in page.text
            assert_inert(page)
            place, _, query = path.partition("?")
            data = await http.get(f"/{place}.json?{query}")
            assert (data.status_code, path) == (200, path)
            json.loads(data.content.decode())

        data = await http.get("/thread/calls.json?id=t")
        assert data.json()["calls"][0]["result"][0] == CUT[0]
