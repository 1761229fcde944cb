"""The list of threads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request

from cpkit.protocol import ListsThreads
from cpkit.records import ThreadInfo
from cpkit.tools.paging import INTERNAL, find_thread, gather_limited, thread_pages
from cpkit.ui.newest import Newest
from cpkit.ui.search import LOOKED_AT, Search, look_at, places_of
from cpkit.ui.site import Page, Site, needs, number
from cpkit.ui.waiting import undecided

__all__ = ["threads"]

# Ids that one page sorts by their last change, if it shows a part of the ids only.
_SORTED = 10_000

_AT_A_TIME = 8


async def threads(site: Site, request: Request) -> Page:
    """Show the threads that changed last, or those that a search finds.

    ``q`` is a part of the id, or of the text of a message; ``tool``, ``state`` and
    ``age`` are filters. Ids are searched completely, and so are messages if the store
    ``has_searched``; otherwise calls and messages are searched in the ``looked_at``
    threads that changed last. ``sorted_all`` is false if the store has more ids than
    the ``sorted_of`` that were sorted.

    With ``order=id`` or ``after`` the page has the threads in the order of ids.
    Leases and other threads of cpkit's own are left out, unless the ``prefix`` or the
    parameter ``internal`` asks for them.
    """
    needs(site, ListsThreads, "list its threads")
    search = Search.of(request)
    prefix = request.query_params.get("prefix", "")
    after = request.query_params.get("after") or None
    start = number(request, "start", 0, 0, 2_000)
    limit = number(request, "limit", 50, 1, 500)
    internal = "internal" in request.query_params or prefix.startswith(INTERNAL)
    order = request.query_params.get("order", "id" if after else "changed")
    newest: Newest | None = None

    if order == "id" and not search:
        pages = thread_pages(
            site.cp, prefix=prefix, after=after, limit=limit + 1, internal=internal
        )
        found: list[ThreadInfo] = [info async for page in pages for info in page]
    elif prefix or internal:
        newest = await Newest.of(
            site.cp, prefix=prefix, internal=internal, most=_SORTED
        )
        found = newest.threads
    else:
        newest = await site.order.newest()
        found = newest.threads

    places = await places_of(site, search, prefix)

    if search:
        found = await _candidates(
            site, request, search, found, places, prefix, internal
        )

    lines, has_more = await _lines(site, search, found[start:], limit, places)
    asked = Counter(one.run_thread for one in await undecided(site, request))

    for line in lines:  # a request may be recorded in another thread than its run
        if line["waits"]:
            own = line["waits"]["approvals"]
            line["waits"]["approvals"] = max(own, asked[line["thread_id"]])

    return Page(
        "threads.html",
        {
            "prefix": prefix,
            "after": after,
            "start": start,
            "limit": limit,
            "internal": internal,
            "q": search.text,
            "tool": search.tool,
            "state": search.state,
            "age": search.age,
            "is_search": bool(search),
            "threads": lines,
            "order": "id" if newest is None else "changed",
            "sorted_of": newest and newest.count,
            "sorted_all": newest and newest.is_all,
            "sorted_at": newest.time.isoformat()
            if newest and newest.is_usable
            else None,
            "has_searched": places is not None,
            "looked_at": min(LOOKED_AT, len(newest.threads)) if newest else None,
            "next": found[limit - 1].thread_id if has_more and not newest else None,
            "later": start + limit if has_more and newest and not search else None,
            "has_more": has_more,
        },
    )


async def _candidates(
    site: Site,
    request: Request,
    search: Search,
    newest: list[ThreadInfo],
    places: dict[str, int] | None,
    prefix: str,
    internal: bool,
) -> list[ThreadInfo]:
    """Return the threads to look at, newest first."""

    async def listed(names: Iterable[str]) -> list[ThreadInfo]:
        known = {info.thread_id: info for info in newest}

        async def find(name: str) -> ThreadInfo | None:
            return known.get(name) or await find_thread(site.cp, name)

        return [one for one in await gather_limited(find, names) if one]

    if search.state == "waits":
        waits = await undecided(site, request)
        names = {one.run_thread or one.thread_id for one in waits}
        found = await listed(name for name in names if name.startswith(prefix))
    elif places is not None:
        # Leases and the like have messages, too.
        found = await listed(
            name for name in places if internal or not name.startswith(INTERNAL)
        )
    else:
        found = newest[:LOOKED_AT]

    if search.text and search.state != "waits":
        named = await Newest.of(
            site.cp, prefix=prefix, internal=internal, part=search.text.casefold()
        )
        found += named.threads

    one_each = {info.thread_id: info for info in found if search.is_recent(info)}
    return sorted(one_each.values(), key=lambda info: info.updated_at, reverse=True)


async def _lines(
    site: Site,
    search: Search,
    found: list[ThreadInfo],
    limit: int,
    places: dict[str, int] | None,
) -> tuple[list[dict[str, Any]], bool]:
    """Return the lines of the first threads that the search finds, and if more are."""
    if not search:
        lines = await gather_limited(
            lambda one: look_at(site, one, search, places), found[:limit]
        )
        return [line for line in lines if line], len(found) > limit

    kept: list[dict[str, Any]] = []

    for at in range(0, len(found), _AT_A_TIME):
        group = found[at : at + _AT_A_TIME]
        looked = await asyncio.gather(
            *(look_at(site, one, search, places) for one in group)
        )
        kept += [line for line in looked if line]

        if len(kept) > limit:
            break

    return kept[:limit], len(kept) > limit
