"""``cpkit prune``: delete threads that were not written to for some time."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from cpkit.cli.output import counted, print_json, progress, write
from cpkit.cli.pending import pending_in
from cpkit.cli.running import BadUse, Exit, fail, print_stderr, run
from cpkit.cli.stores import (
    Json,
    Store,
    Url,
    command_line,
    display_url,
    open_store,
    store_url,
)
from cpkit.errors import CorruptThread
from cpkit.protocol import ErasesThreads, KeepsReceipts, ListsThreads
from cpkit.records import ThreadInfo
from cpkit.runs import RunList
from cpkit.tools.formats import utc_time
from cpkit.tools.paging import find_thread, gather_limited, thread_pages

__all__ = ["duration", "prune"]

OlderThan = Annotated[
    str,
    typer.Option(
        "--older-than",
        help="Minimum time since the last write: 30d, 12h, 90min, 2w.",
        metavar="TIME",
        show_default=False,
    ),
]
Prefix = Annotated[
    str | None,
    typer.Option(help="Only threads whose id starts with this text.", metavar="TEXT"),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Count what would be deleted; delete nothing.")
]
ForgetKeys = Annotated[
    bool,
    typer.Option(
        "--forget-keys",
        help="Also free the keys of calls: a payment can then be repeated.",
    ),
]
WithPending = Annotated[
    bool,
    typer.Option(
        "--with-pending", help="Also delete threads with pending calls or runs."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

_UNITS = {"s": 1, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}


@dataclass
class Pruned:
    """What was deleted, and the old threads that were kept, or are damaged."""

    before: str
    dry_run: bool
    threads: int = 0
    messages: int = 0
    pending: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def prune(
    older_than: OlderThan,
    url: Url = None,
    prefix: Prefix = None,
    dry_run: DryRun = False,
    forget_keys: ForgetKeys = False,
    with_pending: WithPending = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete threads that were not written to for some time.

    Deletes messages, extra, args and results. Keeps the keys of calls, so that no
    payment is repeated; --forget-keys deletes them too. Keeps threads with pending
    calls, and those that a worker is to run. Keeps internal threads (cpkit:…) unless
    --prefix names them.

    Each thread is checked again right before its deletion. A write between that check
    and the deletion is lost, so do not prune threads that agents may still use.
    Exits with 1 if a thread is damaged: it is named and kept, and the others are
    deleted.
    """
    if prefix == "":
        raise BadUse("--prefix is empty; leave it out to prune all threads")

    place = store_url(url)
    prefix = prefix or ""
    planned = None

    if dry_run or not yes:
        # Count with the code that deletes, so that the question is accurate.
        planned = run(_prune(place, older_than, prefix, with_pending, None))

    if planned is not None and not dry_run and planned.threads:
        _confirm(place, planned, forget_keys)

    pruned = (
        planned
        if planned is not None and (dry_run or not planned.threads)
        else run(_prune(place, older_than, prefix, with_pending, forget_keys))
    )

    for problem in pruned.damaged:
        print_stderr(f"not deleted: {problem}")

    if json:
        print_json(asdict(pruned))
    else:
        _print(place, pruned)

    raise typer.Exit(Exit.NO if pruned.damaged else Exit.DONE)


def _print(url: str, pruned: Pruned) -> None:
    would = "would delete" if pruned.dry_run else "deleted"
    write(f"{would} {_count(pruned)}\n")

    if pruned.pending:
        listing = command_line("pending", url)
        write(f"kept {len(pruned.pending)} with pending calls or runs: {listing}\n")

    if pruned.touched:
        write(f"kept {len(pruned.touched)} that were written to during the run\n")


def _count(pruned: Pruned) -> str:
    return (
        f"{counted(pruned.threads, 'thread')} with "
        f"{counted(pruned.messages, 'message')}"
    )


def duration(text: str) -> timedelta:
    """Parse a duration such as ``30d``; raise ``BadUse`` if that is not possible."""
    found = re.fullmatch(r"(\d{1,9})\s*([a-z]+)", text.strip().lower())

    if found is None or found[2] not in _UNITS:
        raise BadUse(
            f"{text!r} is not a duration: write a number and a unit "
            f"({', '.join(_UNITS)}), for example 30d"
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
        raise BadUse(f"--older-than {older_than} is too long ago") from None

    async with open_store(url, ListsThreads, KeepsReceipts, ErasesThreads) as cp:
        return await _prune_threads(cp, prefix, before, with_pending, forget_keys)


def _confirm(url: str, planned: Pruned, forget_keys: bool) -> None:
    """Ask for confirmation, outside an event loop so that Ctrl-C works."""
    what = f"delete {_count(planned)} from {display_url(url)}" + (
        " and forget their keys" if forget_keys else ""
    )

    if not sys.stdin.isatty():
        fail(Exit.BAD_USE, f"to {what}, add --yes; --dry-run only counts")

    if not typer.confirm(f"{what[0].upper()}{what[1:]}?", err=True):
        fail(Exit.NO, "nothing was deleted")


async def _prune_threads(
    cp: Store,
    prefix: str,
    before: datetime,
    with_pending: bool,
    forget_keys: bool | None,
) -> Pruned:
    """Delete the old threads, or only count them if ``forget_keys`` is ``None``."""
    pruned = Pruned(f"{utc_time(before)} UTC", forget_keys is None)
    in_use = await _threads_in_use(cp)

    async def prune_one(info: ThreadInfo) -> None:
        try:
            await _prune_thread(cp, info, in_use, with_pending, forget_keys, pruned)
        except CorruptThread as exc:
            pruned.damaged.append(str(exc))

    with progress("counting" if forget_keys is None else "deleting") as advance:
        async for page in thread_pages(cp, prefix=prefix, internal=False):
            old = [info for info in page if info.updated_at < before]
            await gather_limited(prune_one, old)
            advance(len(page))

    pruned.pending.sort()
    pruned.touched.sort()
    pruned.damaged.sort()
    return pruned


async def _threads_in_use(cp: Store) -> set[str]:
    """Return the threads with an open run, or with a request that a run waits for."""
    runs = RunList(cp)
    await runs.refresh()
    states = runs.mine()
    asks = [ask for state in states.values() for ask in state.asks.values()]
    return {*states, *(ask.thread_id for ask in asks)}


async def _prune_thread(
    cp: Store,
    info: ThreadInfo,
    in_use: set[str],
    with_pending: bool,
    forget_keys: bool | None,
    pruned: Pruned,
) -> None:
    thread_id = info.thread_id

    if not with_pending and (thread_id in in_use or await pending_in(cp, thread_id)):
        pruned.pending.append(thread_id)
        return

    if forget_keys is not None:
        now = await find_thread(cp, thread_id)

        if now is None:
            return  # another process deleted it

        if now != info:
            pruned.touched.append(thread_id)
            return

        await cp.delete_thread(thread_id, forget_keys=forget_keys)

    pruned.threads += 1
    pruned.messages += info.version
