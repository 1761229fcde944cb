"""``cpkit erase``: delete the threads of a person, and print a receipt."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from cpkit.cli.output import print_json, progress
from cpkit.cli.running import Exit, fail, run
from cpkit.cli.stores import Url, display_url, open_store, store_url
from cpkit.privacy import Erasure
from cpkit.privacy import erase as erase_threads
from cpkit.protocol import ErasesThreads, KeepsReceipts, ListsThreads, ReadsRanges

__all__ = ["erase"]

Prefix = Annotated[
    str, typer.Option(help="Threads whose id starts with this text.", metavar="TEXT")
]
ForgetKeys = Annotated[
    bool,
    typer.Option(
        "--forget-keys",
        help="Also free the keys of the calls: a payment can then be repeated.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def erase(
    prefix: Prefix, url: Url = None, forget_keys: ForgetKeys = False, yes: Yes = False
) -> None:
    """Delete all threads of a prefix; print a receipt as JSON.

    Messages, extra, args, results and the data keys go, and cpkit's own threads that
    belong to these: runs, sessions, LangGraph's. The receipt lists what is kept, so
    that nothing is paid twice: the keys of calls with their status; and counts the
    threads whose ids do not say whom they belong to. Interrupted, it is run again, and
    does what is left. Exits with 1 if no thread has the prefix.
    """
    if not prefix:
        fail(Exit.BAD_USE, "--prefix is empty")

    place = store_url(url)

    if not yes:
        what = f"all threads that start with {prefix!r} from {display_url(place)}"

        if not sys.stdin.isatty():
            fail(Exit.BAD_USE, f"to delete {what}, add --yes")

        if not typer.confirm(f"Delete {what}?", err=True):
            fail(Exit.NO, "nothing was deleted")

    receipt = run(_erase(place, prefix, forget_keys), "run it again for the rest")
    facts = asdict(receipt)
    times = {one: facts[one].isoformat() for one in ("began_at", "ended_at")}
    print_json({"store": display_url(place), **facts, **times})
    raise typer.Exit(Exit.DONE if receipt.threads else Exit.NO)


async def _erase(url: str, prefix: str, forget_keys: bool) -> Erasure:
    needs = ListsThreads, ErasesThreads, KeepsReceipts, ReadsRanges

    with progress("erasing") as advance:
        async with open_store(url, *needs) as cp:
            return await erase_threads(
                cp, prefix, forget_keys=forget_keys, progress=advance
            )
