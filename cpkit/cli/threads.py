"""``cpkit threads``: list the threads of a store."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cpkit.cli.output import age, print_json, print_table, utc_time
from cpkit.cli.running import print_stderr, run
from cpkit.cli.stores import Json, Url, open_store, store_url
from cpkit.protocol import ListsThreads
from cpkit.records import ThreadInfo

__all__ = ["thread_json", "threads"]

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
    json: Json = False,
) -> None:
    """List the threads of a store, ordered by id.

    If there are more threads than the limit, pass the last id to --after for the next
    page. In JSON that id is "next".
    """
    found = run(_list(store_url(url), prefix, after, limit))
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
        print_stderr(f"there are more: --after {page[-1].thread_id!r}")
    elif not page:
        print_stderr(
            "there are no threads" + (f" that start with {prefix!r}" if prefix else "")
        )


def thread_json(info: ThreadInfo) -> dict[str, Any]:
    """Return one thread of the list as JSON."""
    return {
        "thread_id": info.thread_id,
        "version": info.version,
        "created_at": info.created_at.isoformat(),
        "updated_at": info.updated_at.isoformat(),
    }


async def _list(
    url: str, prefix: str, after: str | None, limit: int
) -> list[ThreadInfo]:
    async with open_store(url, ListsThreads) as cp:
        return await cp.list_threads(prefix=prefix, after=after, limit=limit + 1)
