"""The store itself: its promises, its size, and what this process did with it."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from starlette.requests import Request

from cpkit.driver import Limits, Tally
from cpkit.driver.tally import Figure
from cpkit.protocol import ListsThreads, StatesDurability
from cpkit.registry import inspect_store
from cpkit.tools.paging import thread_pages
from cpkit.ui.site import Page, Site

__all__ = ["store"]

# How many threads are counted, so that a large store answers soon.
_COUNTED = 5_000


async def store(site: Site, request: Request) -> Page:
    """Show durability with advice, schema, size, counts, and this process's metrics."""
    cp: Any = site.cp
    durability = cp.durability if isinstance(cp, StatesDurability) else None
    limits: Limits | None = getattr(cp, "limits", None)
    found = None if site.url is None else await inspect_store(site.url)
    threads = messages = 0

    if isinstance(cp, ListsThreads):
        async for page in thread_pages(cp, limit=_COUNTED):
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
            "metrics": None if site.tally is None else _metrics(site.tally),
        },
    )


def _metrics(tally: Tally) -> dict[str, Any]:
    """Return the metrics of ``docs/metrics.md``, of this process, as JSON."""
    operations: dict[str, dict[str, Any]] = {}

    for figure in tally.of("cpkit.operation.duration"):
        name = figure.attributes["cpkit.operation"]
        error = figure.attributes.get("error.type")
        row = operations.setdefault(name, {"operation": name, "errors": {}})

        if error is None:
            row |= _times(figure)
        else:
            row["errors"][error] = figure.count

    batches = tally.of("cpkit.commit.writes")
    wakes = tally.of("cpkit.watch.wake")
    return {
        "since": tally.since.isoformat(),
        "operations": [
            {"count": 0, "median": None, "p99": None, "slowest": None} | operations[one]
            for one in sorted(operations)
        ],
        "commits": sum(one.count for one in batches),
        "writes": round(sum(one.total for one in batches)),
        "most_writes": round(max((one.largest for one in batches), default=0)),
        "conflicts": round(sum(one.total for one in tally.of("cpkit.conflicts"))),
        "wakes": _times(wakes[0]) if wakes else None,
    }


def _times(figure: Figure) -> dict[str, Any]:
    """Return how often, and how long in seconds."""
    return {
        "count": figure.count,
        "median": figure.at(0.5),
        "p99": figure.at(0.99),
        "slowest": figure.largest,
    }
