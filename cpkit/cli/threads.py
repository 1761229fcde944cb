"""``cpkit threads``: list the threads of a store."""

from __future__ import annotations

from typing import Annotated

import typer

from cpkit.cli.output import print_json, print_table
from cpkit.cli.running import print_stderr, run
from cpkit.cli.stores import Internal, Json, Url, command_line, open_store, store_url
from cpkit.protocol import ListsThreads
from cpkit.records import ThreadInfo
from cpkit.tools.formats import age, thread_json, utc_time
from cpkit.tools.paging import thread_pages

__all__ = ["threads"]

Prefix = Annotated[
    str, typer.Option(help="List only ids that start with this text.", metavar="TEXT")
]
After = Annotated[
    str | None, typer.Option(help="Only ids after this one.", metavar="THREAD")
]
Limit = Annotated[int, typer.Option(help="Maximum number of threads.", min=1)]


def threads(
    url: Url = None,
    prefix: Prefix = "",
    after: After = None,
    limit: Limit = 100,
    internal: Internal = False,
    json: Json = False,
) -> None:
    """List the threads of a store, ordered by id.

    If there are more threads than the limit, pass the last id to --after for the next
    page. In JSON that id is "next". Threads that cpkit itself uses, such as leases,
    are listed with --internal, or with a --prefix that starts with "cpkit:".
    """
    place = store_url(url)
    found = run(_list(place, prefix, after, limit, internal))
    page, more = found[:limit], len(found) > limit

    if json:
        print_json(
            {
                "threads": [thread_json(one) for one in page],
                "next": page[-1].thread_id if more else None,
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
        options += ["--prefix", prefix] if prefix else []
        options += ["--internal"] if internal else []
        print_stderr(f"there are more: {command_line('threads', place, *options)}")
    elif not page:
        hint = ""

        if not internal and not prefix:
            own = command_line("threads", place, "--internal")
            hint = f"; list cpkit's own, for instance those of an adapter: {own}"

        what = f" that start with {prefix!r}" if prefix else ""
        print_stderr(f"there are no threads{what}{hint}")


async def _list(
    url: str, prefix: str, after: str | None, limit: int, internal: bool
) -> list[ThreadInfo]:
    """Return up to one thread more than the limit."""
    async with open_store(url, ListsThreads) as cp:
        pages = thread_pages(
            cp, prefix=prefix, after=after, limit=limit + 1, internal=internal
        )
        return [info async for page in pages for info in page]
