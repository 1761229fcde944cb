"""``cpkit threads``: list the threads of a store."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cpkit.cli.output import print_json, print_table
from cpkit.cli.running import BadUse, print_stderr, run
from cpkit.cli.stores import Internal, Json, Url, command_line, open_store, store_url
from cpkit.protocol import ListsThreads, SearchesThreads
from cpkit.records import ThreadInfo
from cpkit.tools.formats import age, thread_json, utc_time
from cpkit.tools.paging import INTERNAL, find_thread, gather_limited, thread_pages

__all__ = ["threads"]

_SECONDS = 600.0  # a person can end it

Prefix = Annotated[
    str, typer.Option(help="List only ids that start with this text.", metavar="TEXT")
]
After = Annotated[
    str | None, typer.Option(help="Only ids after this one.", metavar="THREAD")
]
Search = Annotated[
    str,
    typer.Option(
        help="List only threads with this text in a message, last changed first. "
        "SQLite and Postgres can do that.",
        metavar="TEXT",
    ),
]
Limit = Annotated[int, typer.Option(help="Maximum number of threads.", min=1)]


def threads(
    url: Url = None,
    prefix: Prefix = "",
    after: After = None,
    search: Search = "",
    limit: Limit = 100,
    internal: Internal = False,
    json: Json = False,
) -> None:
    """List the threads of a store, ordered by id.

    If there are more threads than the limit, pass the last id to --after for the next
    page. In JSON that id is "next". Threads that cpkit itself uses, such as leases,
    are listed with --internal, or with a --prefix that starts with "cpkit:".
    """
    if search and after is not None:
        raise BadUse("--search lists the threads that changed last: leave out --after")

    place = store_url(url)
    found = run(_list(place, prefix, after, search, limit, internal))
    page, more = found[:limit], len(found) > limit

    if json:
        print_json(
            {
                "threads": [thread_json(one) for one in page],
                "next": page[-1].thread_id if more and not search else None,
            }
        )
        return

    print_table(
        ["thread", "messages", "created (UTC)", "updated (UTC)", "ago"],
        [
            (
                one.thread_id,
                one.version,
                utc_time(one.created_at),
                utc_time(one.updated_at),
                age(one.updated_at),
            )
            for one in page
        ],
        right="messages ago",
    )

    if more:
        options = ["--after", page[-1].thread_id, "--limit", str(limit)]
        options = (
            ["--search", search, "--limit", str(limit * 10)] if search else options
        )
        options += ["--prefix", prefix] if prefix else []
        options += ["--internal"] if internal else []
        print_stderr(f"there are more: {command_line('threads', place, *options)}")
    elif not page:
        hint = ""

        if not internal and not prefix and not search:
            own = command_line("threads", place, "--internal")
            hint = f"; list cpkit's own, for instance those of an adapter: {own}"

        what = f" that start with {prefix!r}" if prefix else ""
        what += f" with {search!r} in a message" if search else ""
        print_stderr(f"there are no threads{what}{hint}")


async def _list(
    url: str, prefix: str, after: str | None, search: str, limit: int, internal: bool
) -> list[ThreadInfo]:
    """Return up to one thread more than the limit."""
    if search:
        internal = internal or prefix.startswith(INTERNAL)

        async with open_store(url, ListsThreads, SearchesThreads) as cp:
            most = limit + 1 if internal else 10 * limit + 1  # some are cpkit's own
            searching: Any = cp
            found = await searching.search_threads(
                search, prefix=prefix, limit=most, timeout=_SECONDS
            )
            names = [name for name, _ in found]
            kept = [one for one in names if internal or not one.startswith(INTERNAL)]
            infos = await gather_limited(
                lambda one: find_thread(cp, one), kept[: limit + 1]
            )
            return [one for one in infos if one]

    async with open_store(url, ListsThreads) as cp:
        pages = thread_pages(
            cp, prefix=prefix, after=after, limit=limit + 1, internal=internal
        )
        return [info async for page in pages for info in page]
