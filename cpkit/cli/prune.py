"""``cpkit prune``: delete old threads, cut old messages, erase old calls."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from cpkit.cli.output import print_json, progress, write
from cpkit.cli.running import BadUse, Exit, fail, print_stderr, run
from cpkit.cli.stores import Json, Url, command_line, display_url, open_store, store_url
from cpkit.retention import Pruned, Retention
from cpkit.retention import prune as prune_store

__all__ = [
    "CallsOlderThan",
    "KeepLast",
    "MessagesOlderThan",
    "OlderThan",
    "duration",
    "policy_of",
    "prune",
]

OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        help="Delete threads without a write for so long: 30d, 12h, 2w.",
        metavar="TIME",
        show_default=False,
    ),
]
KeepLast = Annotated[
    int | None,
    typer.Option(
        "--keep-last",
        help="Cut the older messages of each thread; keep at least the last so many.",
        metavar="NUMBER",
        min=1,
        show_default=False,
    ),
]
MessagesOlderThan = Annotated[
    str | None,
    typer.Option(
        "--messages-older-than",
        help="Cut the messages of each thread that say that they are so old.",
        metavar="TIME",
        show_default=False,
    ),
]
CallsOlderThan = Annotated[
    str | None,
    typer.Option(
        "--calls-older-than",
        help="Erase args and results of calls that ended so long ago; keep their keys.",
        metavar="TIME",
        show_default=False,
    ),
]
Prefix = Annotated[
    str | None,
    typer.Option(help="Only threads whose id starts with this text.", metavar="TEXT"),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Count what would go; change nothing.")
]
ForgetKeys = Annotated[
    bool,
    typer.Option(
        "--forget-keys",
        help="Also free the keys of deleted calls: a payment can then be repeated.",
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


def prune(
    older_than: OlderThan = None,
    url: Url = None,
    keep_last: KeepLast = None,
    messages_older_than: MessagesOlderThan = None,
    calls_older_than: CallsOlderThan = None,
    prefix: Prefix = None,
    dry_run: DryRun = False,
    forget_keys: ForgetKeys = False,
    with_pending: WithPending = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete old threads, cut old messages, erase old calls.

    --older-than deletes messages, extra, args and results of threads without a
    write for so long. It keeps the keys of calls, so that no payment is repeated;
    --forget-keys deletes them too. It keeps threads with pending calls, and those that
    a worker is to run.

    --keep-last and --messages-older-than cut the begin of a conversation, between two
    turns; its calls and its extra stay. A message is as old as it says itself.

    --calls-older-than erases what calls were given and what they returned. An effect
    whose result is erased is never run again.

    Internal threads (cpkit:…) are kept unless --prefix names them. A thread that is
    written to during the run is left for the next time.
    Exits with 1 if a thread is damaged: it is named and kept, and the others are
    pruned.
    """
    if prefix == "":
        raise BadUse("--prefix is empty; leave it out to prune all threads")

    place = store_url(url)
    policy = policy_of(
        older_than,
        keep_last,
        messages_older_than,
        calls_older_than,
        prefix=prefix or "",
        forget_keys=forget_keys,
        with_pending=with_pending,
    )

    if policy is None:
        raise BadUse(
            "say what may go: --older-than, --keep-last, --messages-older-than, "
            "--calls-older-than"
        )

    planned = None

    if dry_run or not yes:
        # Count with the code that prunes, so that the question is accurate.
        planned = run(_prune(place, policy, dry_run=True))

    if planned and not dry_run:
        _confirm(place, planned, forget_keys)

    pruned = (
        planned
        if planned is not None and (dry_run or not planned)
        else run(_prune(place, policy, dry_run=False))
    )

    for problem in pruned.damaged:
        print_stderr(f"kept: {problem}")

    if json:
        print_json(asdict(pruned))
    else:
        _print(place, pruned)

    raise typer.Exit(Exit.NO if pruned.damaged else Exit.DONE)


def policy_of(
    older_than: str | None,
    keep_last: int | None,
    messages_older_than: str | None,
    calls_older_than: str | None,
    *,
    prefix: str,
    forget_keys: bool = False,
    with_pending: bool = False,
) -> Retention | None:
    """Return the policy of a command line, or ``None`` if it has none."""
    ages = {
        "older_than": older_than,
        "messages_older_than": messages_older_than,
        "calls_older_than": calls_older_than,
    }
    given = {name: duration(age) for name, age in ages.items() if age is not None}

    if not given and keep_last is None:
        return None

    try:
        return Retention(
            prefix=prefix,
            keep_last=keep_last,
            **given,
            forget_keys=forget_keys,
            with_pending=with_pending,
        )
    except (ValueError, OverflowError) as exc:
        raise BadUse(str(exc)) from exc


def _print(url: str, pruned: Pruned) -> None:
    write(f"{'would delete' if pruned.dry_run else 'deleted'} {pruned}\n")

    if pruned.pending:
        listing = command_line("pending", url)
        write(f"kept {len(pruned.pending)} with pending calls or runs: {listing}\n")

    if pruned.touched:
        write(f"kept {len(pruned.touched)} that were written to during the run\n")


def duration(text: str) -> timedelta:
    """Parse a duration such as ``30d``; raise ``BadUse`` if that is not possible."""
    found = re.fullmatch(r"(\d{1,9})\s*([a-z]+)", text.strip().lower())

    if found is None or found[2] not in _UNITS:
        raise BadUse(
            f"{text!r} is not a duration: write a number and a unit "
            f"({', '.join(_UNITS)}), for example 30d"
        )

    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


async def _prune(url: str, policy: Retention, *, dry_run: bool) -> Pruned:
    with progress("counting" if dry_run else "deleting") as advance:
        async with open_store(url, *policy.abilities) as cp:
            return await prune_store(cp, policy, dry_run=dry_run, progress=advance)


def _confirm(url: str, planned: Pruned, forget_keys: bool) -> None:
    """Ask for confirmation, outside an event loop so that Ctrl-C works."""
    what = f"delete {planned} from {display_url(url)}" + (
        " and forget their keys" if forget_keys else ""
    )

    if not sys.stdin.isatty():
        fail(Exit.BAD_USE, f"to {what}, add --yes; --dry-run only counts")

    if not typer.confirm(f"{what[0].upper()}{what[1:]}?", err=True):
        fail(Exit.NO, "nothing was deleted")
