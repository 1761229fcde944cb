"""Stores whose engine can search find a text in messages as it was written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cpkit import BackendUnavailable, SearchesThreads, open_checkpointer
from tests.stores import KINDS, fresh_url

TEXTS = [
    'a "quoted" word',
    "Übergröße",
    "back\\slash",
    "100% sure",
    "snake_case",
    "a 🎉 party",
    "line\nbreak",
    "{brace: [1, 2]}",
    "lone \ud83d half",
]


@pytest.fixture(params=["sqlite", "sqlite in memory", "postgres"])
async def cp(request: Any, tmp_path: Path) -> AsyncIterator[Any]:
    is_private = request.param == "sqlite in memory"
    url = "sqlite:///:memory:" if is_private else fresh_url(request.param, tmp_path)

    async with open_checkpointer(url) as cp:
        yield cp


async def found(cp: Any, text: str, **options: Any) -> list[str]:
    return [name for name, _ in await cp.search_threads(text, **options)]


async def test_a_text_is_found_as_it_was_written(cp: Any) -> None:
    """Whatever JSON escapes or ``LIKE`` means by it, and in any case."""
    for i, text in enumerate(TEXTS):
        await cp.append(f"t{i}", [{"content": [{"text": f"so {text} there"}]}])

    for i, text in enumerate(TEXTS):
        assert await found(cp, text) == [f"t{i}"], ascii(text)
        assert await found(cp, text.lower()) == [f"t{i}"], ascii(text)

    assert await found(cp, "_") == ["t4"]
    assert await found(cp, "%") == ["t3"]
    assert await found(cp, "\\") == ["t2"]
    assert await found(cp, '"') == ["t0"]
    assert await found(cp, "snake%case") == await found(cp, "a.quoted") == []
    assert await found(cp, "GRÖ") == ["t1"]


async def test_what_changed_last_comes_first(cp: Any) -> None:
    """With the newest message that has the text; a limit and a prefix count."""
    for name in ["chat:a", "chat:b", "chat", "d"]:
        await cp.append(name, [{"text": "needle"}, {"text": "NEEDLE"}, {"text": "hay"}])

    await cp.append("hay", [{"text": "hay"}])
    await cp.save_extra("chat:a", {"changed": True})
    await cp.delete_thread("d")
    places = [("chat:a", 1), ("chat", 1), ("chat:b", 1)]
    assert await cp.search_threads("needle") == places
    assert await cp.search_threads("needle", limit=2) == places[:2]
    assert await found(cp, "needle", prefix="chat:") == ["chat:a", "chat:b"]


async def test_a_search_ends_after_its_time(cp: Any) -> None:
    """In the engine, and the store goes on; a cancelled one leaves no thread."""
    await cp.append("t", [{"text": "x" * 10_000}] * 1_000)
    threads = threading.active_count()

    with pytest.raises(BackendUnavailable) as refused:
        await cp.search_threads("needle", timeout=0)

    assert refused.value.rejected, "it would take as long again"
    waiting = asyncio.create_task(cp.search_threads("needle"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert threading.active_count() == threads
    assert await cp.append("t", [{"text": "needle"}]) == 1_001
    assert await cp.search_threads("needle") == [("t", 1_000)]


async def test_arguments_are_checked(cp: Any) -> None:
    """Every message has the empty text, and engines limit patterns."""
    for text in ["", "x" * 1_001]:
        with pytest.raises(ValueError, match="1 to 1000 characters"):
            await cp.search_threads(text)

    with pytest.raises(ValueError, match="limit must be at least 1"):
        await cp.search_threads("x", limit=0)

    assert await cp.search_threads("\\" * 1_000) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_stores_say_whether_they_can_search(kind: str, tmp_path: Path) -> None:
    """By the optional protocol."""
    cp: object = open_checkpointer(fresh_url(kind, tmp_path))
    assert isinstance(cp, SearchesThreads) == (kind in ("sqlite", "postgres"))
