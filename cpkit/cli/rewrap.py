"""``cpkit rewrap``: put an encrypted store under the newest key of its keyring."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cpkit.cli.output import print_json, printable, progress, write
from cpkit.cli.running import BadUse, Exit, print_stderr, run
from cpkit.cli.stores import Json, Url, open_store, store_url
from cpkit.privacy import Rewrapped
from cpkit.privacy import rewrap as rewrap_store
from cpkit.protocol import KeepsReceipts, ListsThreads
from cpkit.tools.formats import counted

__all__ = ["rewrap"]

Prefix = Annotated[
    str, typer.Option(help="Only threads whose id starts with this text.")
]


def rewrap(url: Url = None, prefix: Prefix = "", json: Json = False) -> None:
    """Put every thread under the newest key of its keyring.

    Reads every thread once; agents go on. It prints which keys are still in use: the
    other keys can be removed once every process has used the new key for two seconds.
    Interrupted, it is run again, and does what is left. Exits with 1 if threads were
    too busy, are damaged, or need a key that is missing.
    """
    done = run(_rewrap(store_url(url), prefix), "run it again for the rest")

    if json:
        print_json(asdict(done))
    else:
        plain = f", {done.with_plain} with plain values" if done.with_plain else ""
        busy = f", {len(done.busy)} too busy: run it again" if done.busy else ""
        threads = counted(done.threads, "thread")

        for problem in (*done.damaged, *done.missing):
            print_stderr(f"not rewrapped: {problem}")

        write(f"{done.rewrapped} of {threads} rewrapped{plain}{busy}\n")
        write(f"keys in use: {printable(', '.join(done.in_use)) or 'none'}\n")

    is_partial = done.busy or done.damaged or done.missing
    raise typer.Exit(Exit.NO if is_partial else Exit.DONE)


async def _rewrap(url: str, prefix: str) -> Rewrapped:
    with progress("rewrapping") as advance:
        async with open_store(url, ListsThreads, KeepsReceipts) as cp:
            try:
                return await rewrap_store(cp, prefix=prefix, progress=advance)
            except TypeError as exc:
                raise BadUse(f"{exc}: set CPKIT_KEYRING") from exc
