"""Go through all threads of a store, page by page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import islice
from typing import TypeVar

from cpkit.driver.sealed import HASH_THREAD
from cpkit.protocol import ListsThreads
from cpkit.records import ThreadInfo

__all__ = ["INTERNAL", "find_thread", "gather_limited", "thread_pages"]

T = TypeVar("T")
ItemT = TypeVar("ItemT")

INTERNAL = "cpkit:"
"""How the ids of cpkit's own threads start, for instance those of leases."""

# Greater than any id that starts with INTERNAL and that cpkit makes.
_LAST_INTERNAL = INTERNAL + chr(0x10FFFF) * 126

_PAGE_SIZE = 500
_CONCURRENCY = 8  # hides a server's round trips without crowding out the agents


async def thread_pages(
    store: ListsThreads,
    *,
    prefix: str = "",
    after: str | None = None,
    limit: int | None = None,
    erased: bool = False,
    internal: bool = True,
) -> AsyncIterator[list[ThreadInfo]]:
    """Yield the threads whose ids start with the prefix, ordered by id, in pages.

    Stops after ``limit`` threads. A thread that is created behind the current page
    while the caller iterates is not in a later page. With ``erased`` the pages include
    ids that have nothing but erased calls. Without ``internal`` they leave out cpkit's
    own threads, unless the prefix asks for them. They never have `HASH_THREAD`, which
    is a part of the store itself.
    """
    internal = internal or prefix.startswith(INTERNAL)
    left = limit

    while left is None or left > 0:
        size = _PAGE_SIZE if left is None else min(left, _PAGE_SIZE)
        page = await store.list_threads(
            prefix=prefix, after=after, limit=size, erased=erased
        )

        if not page:
            return

        after = page[-1].thread_id
        page = [info for info in page if info.thread_id != HASH_THREAD]

        if not internal:
            if after.startswith(INTERNAL):
                # Skips the rest: a store may have one for each other thread.
                after = max(after, _LAST_INTERNAL)

            page = [info for info in page if not info.thread_id.startswith(INTERNAL)]

        if page:
            yield page
            left = None if left is None else left - len(page)


async def find_thread(
    store: ListsThreads, thread_id: str, *, erased: bool = False
) -> ThreadInfo | None:
    """Return how the store lists one thread, or ``None``."""
    # In the order of ids, an id comes before all longer ids that start with it.
    async for page in thread_pages(store, prefix=thread_id, limit=1, erased=erased):
        if page[0].thread_id == thread_id:
            return page[0]

    return None


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
