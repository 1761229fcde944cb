"""The store itself: its promises and its size."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from starlette.requests import Request

from cpkit.driver import Limits
from cpkit.protocol import ListsThreads, StatesDurability
from cpkit.registry import inspect_store
from cpkit.tools.paging import thread_pages
from cpkit.ui.site import Page, Site

__all__ = ["store"]

# How many threads are counted, so that a large store answers soon.
_COUNTED = 5_000


async def store(site: Site, request: Request) -> Page:
    """Show durability with advice, schema, size and counts."""
    cp: Any = site.cp
    durability = cp.durability if isinstance(cp, StatesDurability) else None
    limits: Limits | None = getattr(cp, "limits", None)
    found = None if site.url is None else await inspect_store(site.url)
    threads = messages = 0

    if isinstance(cp, ListsThreads):
        async for page in thread_pages(cp, limit=_COUNTED, internal=False):
            threads += len(page)
            messages += sum(info.version for info in page)

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
            "path": None if found is None else found.path,
            "max_payload": None if limits is None else limits.max_value,
            "max_append": None if limits is None else limits.max_append,
            "threads": threads,
            "messages": messages,
            "counted_all": threads < _COUNTED,
        },
    )
