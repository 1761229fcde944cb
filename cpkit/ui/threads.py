"""The list of threads."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from cpkit.protocol import KeepsReceipts, ListsThreads
from cpkit.records import ThreadInfo
from cpkit.tools.formats import thread_json
from cpkit.tools.paging import INTERNAL, gather_limited, thread_pages
from cpkit.ui.site import Page, Site, needs, number
from cpkit.ui.waiting import counts_of

__all__ = ["threads"]

# Threads that are read to find those that changed last, a few milliseconds of work.
_SORTED = 2_000


async def threads(site: Site, request: Request) -> Page:
    """Show one page of threads that start with a prefix, ordered by id.

    Leases and other threads of cpkit's own are left out, unless the prefix or the
    parameter ``internal`` asks for them. With ``order=changed`` the page shows the
    threads that changed last, of the first ``sorted_of`` threads: stores list by id.
    ``sorted_all`` is false if threads behind those were not looked at.
    """
    needs(site, ListsThreads, "list its threads")
    prefix = request.query_params.get("prefix", "")
    after = request.query_params.get("after") or None
    limit = number(request, "limit", 50, 1, 500)
    internal = "internal" in request.query_params or prefix.startswith(INTERNAL)
    by_change = request.query_params.get("order") == "changed"
    count = (_SORTED if by_change else limit) + 1
    pages = thread_pages(
        site.cp, prefix=prefix, after=after, limit=count, internal=internal
    )
    found: list[ThreadInfo] = [info async for page in pages for info in page]
    has_more = len(found) == count

    if by_change:
        found = found[:_SORTED]
        found.sort(key=lambda info: info.updated_at, reverse=True)

    page = found[:limit]

    async def one(info: ThreadInfo) -> dict[str, Any]:
        waits = (
            await counts_of(site, info.thread_id)
            if isinstance(site.cp, KeepsReceipts)
            else None
        )
        return {**thread_json(info), "waits": waits}

    return Page(
        "threads.html",
        {
            "prefix": prefix,
            "after": after,
            "limit": limit,
            "internal": internal,
            "threads": await gather_limited(one, page),
            "order": "changed" if by_change else "id",
            "sorted_of": len(found) if by_change else None,
            "sorted_all": not has_more if by_change else None,
            "next": page[-1].thread_id if has_more and not by_change else None,
        },
    )
