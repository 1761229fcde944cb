"""``cpkit import``: import conversations from other formats."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from cpkit.cli.output import print_json, print_table, printable, progress, write
from cpkit.cli.running import BadUse, Exit, run
from cpkit.cli.stores import Json, destination, display_url, open_store
from cpkit.registry import inspect_store
from cpkit.tools.importing import KINDS, BadSource, Report, checked, import_from

__all__ = ["import_"]

Source = Annotated[
    str,
    typer.Argument(
        help="A file, a folder, or the URL of LangGraph's Postgres.",
        metavar="SOURCE",
        show_default=False,
    ),
]
To = Annotated[str, destination("URL")]
Kind = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}.", show_default="detected"
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Read and compare only; write nothing.")
]
SkipCorrupt = Annotated[
    bool,
    typer.Option(
        "--skip-corrupt",
        help="Leave corrupt lines out; otherwise a text in their place says so.",
    ),
]

# Names for each reason on a screen; JSON has every conversation.
_NAMED = 3


def import_(
    source: Source,
    url: To,
    kind: Kind = None,
    dry_run: DryRun = False,
    skip_corrupt: SkipCorrupt = False,
    json: Json = False,
) -> None:
    """Import conversations from other formats into a store.

    Reads LangGraph's SQLite and Postgres checkpoints, SQLite sessions of the OpenAI
    Agents SDK, files and folders of Claude Code, Codex and other coding agents,
    ChatGPT's export, and OpenAI-format JSONL transcripts. The source is not changed.
    You can run the import again: messages that the store already has are compared, and
    not written twice. Exits with 1 if a conversation was not imported.
    """
    report = run(
        _import(source, url, kind, dry_run, skip_corrupt),
        "run the same command again; it imports the rest",
    )

    if json:
        print_json(report.to_dict())
    else:
        _print(report)

    raise typer.Exit(Exit.DONE if report.ok else Exit.NO)


async def _import(
    source: str, url: str, kind: str | None, dry_run: bool, skip_corrupt: bool
) -> Report:
    try:
        # Before the store is opened: a wrong path must not create an empty store.
        kind = await asyncio.to_thread(checked, source, kind)
    except BadSource as exc:
        raise BadUse(str(exc)) from exc

    found = await inspect_store(url) if dry_run else None
    # A dry run does not create a store: it compares with an empty one in memory.
    is_missing = found is not None and not found.exists

    async with open_store(
        "memory://" if is_missing else url, create=True, volatile=is_missing
    ) as cp:
        with progress(f"importing into {display_url(url)}") as advance:
            try:
                return await import_from(
                    source,
                    cp,
                    kind=kind,
                    dry_run=dry_run,
                    skip_corrupt=skip_corrupt,
                    on_thread=lambda _: advance(1),
                )
            except BadSource as exc:
                raise BadUse(str(exc)) from exc


def _print(report: Report) -> None:
    written = "would be written" if report.dry_run else "written"
    print_table(
        [report.kind, "conversations", "messages"],
        [
            ["read", len(report.threads), report.read],
            [written, report.counts("new", "grown"), report.written],
            ["there before", report.counts("there"), ""],
            ["left", report.counts("left"), ""],
        ],
        right="conversations messages",
    )

    for reason, names in report.left.items():
        some = "; ".join(names[:_NAMED]) + ("; …" if len(names) > _NAMED else "")
        write(printable(f"left: {len(names)} × {reason} ({some})") + "\n")
