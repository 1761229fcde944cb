"""Paging through all threads of a store, and limited concurrency."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cpkit import ThreadInfo, open_checkpointer
from cpkit.tools.paging import gather_limited, thread_pages


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        (None, [500, 500, 200]),
        (700, [500, 200]),
        (500, [500]),
        (0, []),
        (9999, [500, 500, 200]),
    ],
)
async def test_pages_have_every_thread_once(
    limit: int | None, sizes: list[int]
) -> None:
    """Pages are ordered by id, and end at the limit or with the last thread."""
    async with open_checkpointer("memory://") as opened:
        cp: Any = opened
        ids = [f"t{n:04}" for n in range(1200)]

        for thread_id in [*ids, "other"]:
            await cp.append(thread_id, [{}])

        pages: list[list[ThreadInfo]] = [
            page async for page in thread_pages(cp, prefix="t", limit=limit)
        ]

    listed = [info.thread_id for page in pages for info in page]
    assert listed == ids[:limit]
    assert [len(page) for page in pages] == sizes


async def test_paging_ends_behind_the_greatest_internal_id() -> None:
    """Also if another program made an id greater than any that cpkit makes."""
    async with open_checkpointer("memory://") as opened:
        cp: Any = opened

        for thread_id in ("a", "cpkit:one", "cpkit:" + chr(0x10FFFF) * 126 + "ab"):
            await cp.append(thread_id, [{}])

        pages = [page async for page in thread_pages(cp, internal=False)]
        assert [[info.thread_id for info in page] for page in pages] == [["a"]]


async def test_eight_calls_run_at_a_time() -> None:
    """The results have the order of the items."""
    running = most = 0

    async def double(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 2 * number

    assert await gather_limited(double, range(20)) == [*range(0, 40, 2)]
    assert most == 8
