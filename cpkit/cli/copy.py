"""``cpkit copy``: copy all threads of one store into another."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cpkit.cli.output import print_json, printable, progress, write
from cpkit.cli.running import BadUse, Exit, print_stderr, run
from cpkit.cli.stores import Json, destination, display_url, open_store
from cpkit.keyring import keyring_at
from cpkit.protocol import ErasesThreads, ListsThreads, MovesThreads
from cpkit.tools.copying import CopyReport, ExportFile, Source, copy_store
from cpkit.tools.formats import counted

__all__ = ["copy"]

From = Annotated[
    str,
    typer.Argument(
        help="A store's URL, or an exported file (NAME.jsonl).",
        metavar="SRC",
        show_default=False,
    ),
]
To = Annotated[str, destination("DST")]
Update = Annotated[
    bool,
    typer.Option(
        "--update",
        help="Replace a thread if DST has an earlier copy of it; DST must not be in "
        "use.",
    ),
]

# Lines for each kind of problem on a screen; JSON has all of them.
_SHOWN = 20


def copy(src: From, dst: To, update: Update = False, json: Json = False) -> None:
    """Copy all threads of one store into another, exactly.

    Messages, extra and calls keep their order and times. Deleted threads that keep the
    keys of their calls are copied too. Each thread is written in one step and compared
    afterwards. After an interruption run the command again: it copies the rest.

    A thread that DST already has is compared and not changed. With --update it is
    replaced if DST has an earlier copy of it. Exits with 1 if DST lacks something that
    SRC has, because of a conflict, a failure, or a thread that changed in SRC.
    """
    report = run(
        _copy(src, dst, update),
        "run the same command again; it copies the rest",
    )

    if json:
        print_json({**asdict(report), "complete": report.is_complete})
    else:
        _print(report)

    raise typer.Exit(Exit.DONE if report.is_complete else Exit.NO)


async def _copy(src: str, dst: str, update: bool) -> CopyReport:
    if src == dst:
        raise BadUse("SRC and DST are the same store")

    if Path(src).suffix == ".jsonl" and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", src):
        place = os.environ.get("CPKIT_KEYRING")
        ring = await asyncio.to_thread(keyring_at, place) if place is not None else None
        export = await asyncio.to_thread(partial(ExportFile, src, keyring=ring))
        return await _into(export, dst, update)

    async with open_store(src, ListsThreads, MovesThreads) as source:
        return await _into(source, dst, update)


async def _into(source: Source, dst: str, update: bool) -> CopyReport:
    needed = [ListsThreads, MovesThreads, *([ErasesThreads] if update else [])]

    async with open_store(dst, *needed, create=True) as destination:
        with progress(f"copying to {display_url(dst)}") as advance:
            return await copy_store(
                source, destination, update=update, on_thread=lambda: advance(1)
            )


def _print(report: CopyReport) -> None:
    write(
        f"{counted(report.threads, 'thread')} in SRC: {report.copied} copied, "
        f"{report.updated} "
        f"updated, {report.already} already in DST; {report.checked} verified\n"
        f"written: {counted(report.messages, 'message')}, "
        f"{counted(report.calls, 'call')}\n"
    )
    problems: list[tuple[str, list[Any]]] = [
        ("changed since an earlier copy, add --update", report.changed),
        ("conflict", report.conflicts),
        ("failed", report.failures),
        ("changed during the copy, run it again", report.moved),
    ]

    for what, found in problems:
        for one in found[:_SHOWN]:
            print_stderr(f"{what}: {one}")

        if len(found) > _SHOWN:
            print_stderr(
                printable(f"{what}: {len(found) - _SHOWN} more; --json lists all")
            )
