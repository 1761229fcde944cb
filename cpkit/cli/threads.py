"""``cpkit threads``: list a store's threads."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cpkit.cli.output import age, moment, print_json, print_table
from cpkit.cli.running import run, say
from cpkit.cli.stores import Json, Url, opened, store_url
from cpkit.protocol import ListsThreads
from cpkit.records import ThreadInfo

__all__ = ["thread_json", "threads"]

Prefix = Annotated[str, typer.Option(help="Only ids that start so.", metavar="TEXT")]
After = Annotated[
    str | None, typer.Option(help="Only ids after this one.", metavar="THREAD")
]
Limit = Annotated[int, typer.Option(help="How many at most.", min=1)]


def threads(
    url: Url = None,
    prefix: Prefix = "",
    after: After = None,
    limit: Limit = 100,
    json: Json = False,
) -> None:
    """List a store's threads, ordered by id.

    Where there are more than the limit, the last id is what --after takes for the next
    page; in JSON it is "next".
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
                moment(one.created_at),
                moment(one.updated_at),
                age(one.updated_at),
            )
            for one in page
        ],
        right="messages ago",
    )

    if more:
        say(f"there are more: --after {page[-1].thread_id!r}")
    elif not page:
        say("there are no threads" + (f" that start with {prefix!r}" if prefix else ""))


def thread_json(info: ThreadInfo) -> dict[str, Any]:
    """Return a thread's line of a listing."""
    return {
        "thread_id": info.thread_id,
        "version": info.version,
        "created_at": info.created_at.isoformat(),
        "updated_at": info.updated_at.isoformat(),
    }


async def _list(
    url: str, prefix: str, after: str | None, limit: int
) -> list[ThreadInfo]:
    async with opened(url, ListsThreads) as cp:
        return await cp.list_threads(prefix=prefix, after=after, limit=limit + 1)
