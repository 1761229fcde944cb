"""Go through all threads of a store, page by page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import islice
from typing import TypeVar

from cpkit.protocol import ListsThreads
from cpkit.records import ThreadInfo

__all__ = ["gather_limited", "thread_pages"]

T = TypeVar("T")
ItemT = TypeVar("ItemT")

_PAGE_SIZE = 500
_CONCURRENCY = 8  # hides a server's round trips without crowding out the agents


async def thread_pages(
    store: ListsThreads, *, prefix: str = "", limit: int | None = None
) -> AsyncIterator[list[ThreadInfo]]:
    """Yield the threads whose ids start with the prefix, ordered by id, in pages.

    Stops after ``limit`` threads. A thread that is created behind the current page
    while the caller iterates is not in a later page.
    """
    after: str | None = None
    left = limit

    while left is None or left > 0:
        size = _PAGE_SIZE if left is None else min(left, _PAGE_SIZE)
        page = await store.list_threads(prefix=prefix, after=after, limit=size)

        if not page:
            return

        yield page
        after = page[-1].thread_id
        left = None if left is None else left - len(page)


async def gather_limited(
    work: Callable[[ItemT], Awaitable[T]], items: Iterable[ItemT]
) -> list[T]:
    """Await ``work`` for every item, eight at a time, and return the results in order.

    Raises the first exception at once; the other calls of its group go on.
    """
    left = iter(items)
    results: list[T] = []

    while group := list(islice(left, _CONCURRENCY)):
        results += await asyncio.gather(*map(work, group))

    return results
