"""The store itself: its promises and its size."""

from __future__ import annotations

import platform
from contextlib import suppress
from heapq import nlargest
from importlib.metadata import version
from typing import Any

from starlette.requests import Request

from cpkit.driver import Limits
from cpkit.errors import CorruptThread
from cpkit.protocol import (
    KeepsReceipts,
    ListsThreads,
    ReadsRanges,
    StatesDurability,
)
from cpkit.records import ThreadInfo
from cpkit.registry import inspect_store
from cpkit.tools.paging import gather_limited, thread_pages
from cpkit.tools.space import Weight, weigh
from cpkit.ui.site import Page, Site

__all__ = ["store"]

# How many threads are counted, so that a large store answers soon.
_COUNTED = 5_000

# Of these, so many with the most messages are weighed, and the largest are named.
_WEIGHED, _NAMED = 100, 5


async def store(site: Site, request: Request) -> Page:
    """Show durability with advice, schema, size, counts and the largest threads.

    ``largest`` is about threads with many messages: of each it reads the newest 20, and
    the calls.
    """
    cp: Any = site.cp
    durability = cp.durability if isinstance(cp, StatesDurability) else None
    limits: Limits | None = getattr(cp, "limits", None)
    found = None if site.url is None else await inspect_store(site.url)
    threads = messages = 0
    longest: list[ThreadInfo] = []

    if isinstance(cp, ListsThreads):
        async for page in thread_pages(cp, limit=_COUNTED, internal=False):
            threads += len(page)
            messages += sum(info.version for info in page)
            longest = nlargest(_WEIGHED, [*longest, *page], key=_version)

    return Page(
        "store.html",
        {
            "store": site.title,
            "cpkit": version("cpkit"),
            "python": platform.python_version(),
            "survives": None if durability is None else str(durability.survives),
            "settings": {} if durability is None else dict(durability.settings),
            "advice": [] if durability is None else list(durability.advice),
            "schema_version": None if found is None else found.version,
            "bytes": None if found is None else found.size,
            "dead": {} if found is None else dict(found.dead),
            "path": None if found is None else found.path,
            "max_payload": None if limits is None else limits.max_value,
            "max_append": None if limits is None else limits.max_append,
            "threads": threads,
            "messages": messages,
            "counted_all": threads < _COUNTED,
            "largest": await _largest(cp, longest),
        },
    )


def _version(info: ThreadInfo) -> int:
    return info.version


async def _largest(cp: Any, infos: list[ThreadInfo]) -> list[dict[str, Any]]:
    """Return the weights of the largest of these threads."""
    if not isinstance(cp, KeepsReceipts) or not isinstance(cp, ReadsRanges):
        return []

    async def look(info: ThreadInfo) -> Weight | None:
        with suppress(CorruptThread):  # the thread's own page tells
            return await weigh(cp, info.thread_id, await cp.list_calls(info.thread_id))

        return None

    weights = [one for one in await gather_limited(look, infos) if one is not None]
    largest = nlargest(_NAMED, weights, key=lambda one: one.total)
    return [
        {"thread_id": one.thread_id, "bytes": one.total, "shares": one.shares}
        for one in largest
    ]
