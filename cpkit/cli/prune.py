"""``cpkit prune``: delete the threads that nobody has touched for long."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from cpkit.cli.output import moment, print_json, progress, write
from cpkit.cli.pending import pending_in
from cpkit.cli.running import BadUse, Exit, give_up, run
from cpkit.cli.stores import Json, Store, Url, opened, shown, store_url
from cpkit.protocol import ErasesThreads, KeepsReceipts, ListsThreads
from cpkit.records import ThreadInfo

__all__ = ["duration", "prune"]

OlderThan = Annotated[
    str,
    typer.Option(
        "--older-than",
        help="Untouched for so long: 30d, 12h, 90min, 2w.",
        metavar="TIME",
        show_default=False,
    ),
]
Prefix = Annotated[str, typer.Option(help="Only ids that start so.", metavar="TEXT")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would go; delete nothing.")
]
ForgetKeys = Annotated[
    bool,
    typer.Option(
        "--forget-keys",
        help="Free the keys of their calls too: what was paid can be paid again.",
    ),
]
WithPending = Annotated[
    bool,
    typer.Option("--with-pending", help="Also those with calls that still wait."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_UNITS = {"s": 1, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_PAGE = 500
# Threads at a time, which hides a server's round trips.
_AT_ONCE = 8
_OURS = "cpkit:"


@dataclass
class Pruned:
    """What was deleted, and what was kept although it is old."""

    before: str
    dry_run: bool
    threads: int = 0
    messages: int = 0
    pending: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)


def prune(
    older_than: OlderThan,
    url: Url = None,
    prefix: Prefix = "",
    dry_run: DryRun = False,
    forget_keys: ForgetKeys = False,
    with_pending: WithPending = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete whole threads that were not written to for some time.

    Messages, extra, args and results go; the keys of calls are kept, so that what was
    paid stays paid, unless --forget-keys. Threads with pending calls are kept, and so
    are cpkit's own (cpkit:…) unless --prefix names them.

    Each thread is looked at again right before it is deleted. A write that comes
    between that look and the deletion is lost with the thread, so do not prune what
    agents may come back to.
    """
    place = store_url(url)
    planned = None

    if dry_run or not yes:
        # The same walk, so that what is asked about is what will be done.
        planned = run(_prune(place, older_than, prefix, with_pending, None))

    if planned is not None and not dry_run and planned.threads:
        _confirm(place, planned, forget_keys)

    pruned = (
        planned
        if planned is not None and (dry_run or not planned.threads)
        else run(_prune(place, older_than, prefix, with_pending, forget_keys))
    )

    if json:
        print_json(asdict(pruned))
        return

    would = "would delete" if dry_run else "deleted"
    write(f"{would} {pruned.threads} threads with {pruned.messages} messages\n")

    if pruned.pending:
        write(f"kept {len(pruned.pending)} with pending calls: cpkit pending\n")

    if pruned.touched:
        write(f"kept {len(pruned.touched)} that were written to meanwhile\n")


def duration(text: str) -> timedelta:
    """Return the time that a person wrote; raises ``BadUse``."""
    found = re.fullmatch(r"(\d{1,9})\s*([a-z]+)", text.strip().lower())

    if found is None or found[2] not in _UNITS:
        raise BadUse(
            f"{text!r} is no time; write a number and one of {', '.join(_UNITS)}: 30d"
        )

    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


async def _prune(
    url: str,
    older_than: str,
    prefix: str,
    with_pending: bool,
    forget_keys: bool | None,
) -> Pruned:
    try:
        before = datetime.now(UTC) - duration(older_than)
    except OverflowError:
        raise BadUse(f"{older_than!r} is before all times") from None

    async with opened(url, ListsThreads, KeepsReceipts, ErasesThreads) as cp:
        return await _walk(cp, prefix, before, with_pending, forget_keys)


def _confirm(url: str, planned: Pruned, forget_keys: bool) -> None:
    """Ask, outside of any event loop, where Ctrl-C ends the question."""
    what = (
        f"delete {planned.threads} threads with {planned.messages} messages from "
        f"{shown(url)}" + (" and forget their keys" if forget_keys else "")
    )

    if not sys.stdin.isatty():
        give_up(Exit.BAD_USE, f"to {what}, say --yes; --dry-run only counts")

    if not typer.confirm(f"{what[0].upper()}{what[1:]}?", err=True):
        give_up(Exit.NO, "nothing was deleted")


async def _walk(
    cp: Store,
    prefix: str,
    before: datetime,
    with_pending: bool,
    forget_keys: bool | None,
) -> Pruned:
    """Go through the old threads; delete them unless ``forget_keys`` is ``None``."""
    pruned = Pruned(f"{moment(before)} UTC", forget_keys is None)
    after: str | None = None

    with progress("counting" if forget_keys is None else "deleting") as advance:
        while page := await cp.list_threads(prefix=prefix, after=after, limit=_PAGE):
            old = [
                info
                for info in page
                if info.updated_at < before and _is_meant(info, prefix)
            ]

            for i in range(0, len(old), _AT_ONCE):
                await asyncio.gather(
                    *(
                        _one(cp, info, with_pending, forget_keys, pruned)
                        for info in old[i : i + _AT_ONCE]
                    )
                )

            advance(len(page))
            after = page[-1].thread_id

    pruned.pending.sort()
    pruned.touched.sort()
    return pruned


async def _one(
    cp: Store,
    info: ThreadInfo,
    with_pending: bool,
    forget_keys: bool | None,
    pruned: Pruned,
) -> None:
    thread_id = info.thread_id

    if not with_pending and await pending_in(cp, thread_id):
        pruned.pending.append(thread_id)
        return

    if forget_keys is not None:
        # An id is the first of all that start with it.
        now = await cp.list_threads(prefix=thread_id, limit=1)

        if not now or now[0].thread_id != thread_id:
            return  # somebody else deleted it

        if now[0] != info:
            pruned.touched.append(thread_id)
            return

        await cp.delete_thread(thread_id, forget_keys=forget_keys)

    pruned.threads += 1
    pruned.messages += info.version


def _is_meant(info: ThreadInfo, prefix: str) -> bool:
    return prefix.startswith(_OURS) or not info.thread_id.startswith(_OURS)
