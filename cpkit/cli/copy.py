"""``cpkit copy``: copy all threads of one store into another."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cpkit.cli.output import print_json, printable, progress, write
from cpkit.cli.running import BadUse, Exit, print_stderr, run
from cpkit.cli.stores import Json, destination, display_url, open_store
from cpkit.protocol import KeepsReceipts, ListsThreads
from cpkit.tools.copying import CopyReport, ExportFile, Source, copy_store

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
Deleted = Annotated[
    list[str] | None,
    typer.Option(
        "--deleted",
        help="Also copy the keys of this deleted thread; may be repeated.",
        metavar="THREAD",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite-extra", help="If an extra key differs, write the value of SRC."
    ),
]

# Lines for each kind of problem on a screen; JSON has all of them.
_SHOWN = 20


def copy(
    src: From,
    dst: To,
    deleted: Deleted = None,
    overwrite_extra: Overwrite = False,
    json: Json = False,
) -> None:
    """Copy all threads of one store into another, with their calls and keys.

    Nothing in DST is overwritten, and each copied thread is compared with SRC by hash.
    After an interruption run the command again: it continues where it stopped. Exits
    with 1 if DST lacks something that SRC has, because of a conflict, a failure, or a
    thread that changed in SRC during the copy. Another run copies that change.

    Keys, attempt numbers, statuses, args and results of calls are kept. Times are
    those of the copy. No store lists a deleted thread that kept its keys: name it with
    --deleted.
    """
    report = run(_copy(src, dst, deleted or [], overwrite_extra))

    if json:
        print_json({**asdict(report), "complete": report.is_complete})
    else:
        _print(report)

    raise typer.Exit(Exit.DONE if report.is_complete else Exit.NO)


async def _copy(
    src: str, dst: str, deleted: list[str], overwrite_extra: bool
) -> CopyReport:
    if src == dst:
        raise BadUse("SRC and DST are the same store")

    if Path(src).suffix == ".jsonl" and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", src):
        export = await asyncio.to_thread(ExportFile, src)
        return await _into(export, dst, deleted, overwrite_extra)

    async with open_store(src, ListsThreads, KeepsReceipts) as source:
        return await _into(source, dst, deleted, overwrite_extra)


async def _into(
    source: Source, dst: str, deleted: list[str], overwrite_extra: bool
) -> CopyReport:
    async with open_store(dst, KeepsReceipts, create=True) as destination:
        with progress(f"copying to {display_url(dst)}") as advance:
            return await copy_store(
                source,
                destination,
                deleted=deleted,
                overwrite_extra=overwrite_extra,
                on_start=lambda total: advance(-total),
                on_thread=lambda: advance(1),
            )


def _print(report: CopyReport) -> None:
    write(
        f"{report.threads} threads in SRC: {report.copied} copied, "
        f"{report.already} there already; {report.checked} verified\n"
        f"written: {report.messages} messages, {report.extra} extra keys, "
        f"{report.calls} calls"
        + (f", {report.erased_calls} erased ones" if report.erased_calls else "")
        + "\n"
    )
    problems: list[tuple[str, list[Any]]] = [
        ("conflict", report.conflicts),
        ("failed", report.failures),
        ("changed during the copy, run it again", report.moved),
        ("note", report.notes),
    ]

    for what, found in problems:
        for one in found[:_SHOWN]:
            print_stderr(f"{what}: {one}")

        if len(found) > _SHOWN:
            print_stderr(
                printable(f"{what}: {len(found) - _SHOWN} more; --json has them all")
            )
