"""``cpkit tree``: draw the branches of a session."""

from __future__ import annotations

import asyncio
import json as jsonlib
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cpkit.cli.certify import Exit
from cpkit.errors import BackendUnavailable, CheckpointerError
from cpkit.registry import open_checkpointer
from cpkit.sessions import SessionLog
from cpkit.sessions.pictures import draw_mermaid, draw_svg, draw_terminal
from cpkit.sessions.pictures.describe import describe

__all__ = ["tree"]

Url = Annotated[
    str, typer.Argument(help="Where the store is.", metavar="URL", show_default=False)
]
Thread = Annotated[
    str, typer.Argument(help="The session's id.", metavar="THREAD", show_default=False)
]
All = Annotated[
    bool, typer.Option("--all", help="Show every entry; straight runs are not folded.")
]
Mermaid = Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")]
Svg = Annotated[bool, typer.Option("--svg", help="Print an SVG file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the entries as JSON.")]


def tree(
    url: Url,
    thread: Thread,
    everything: All = False,
    mermaid: Mermaid = False,
    svg: Svg = False,
    json: Json = False,
) -> None:
    """Draw the branches of a session, in the terminal or for a document.

    The active branch is bright, the others are dim. Exits with 1 where there is no
    such session, 2 for a thread that is none and 3 where the store cannot be reached.
    """
    errors = Console(stderr=True)

    if mermaid + svg + json > 1:
        errors.print("--mermaid, --svg and --json exclude each other")
        raise typer.Exit(Exit.BAD_USE)

    try:
        log = asyncio.run(_read(url, thread))
    except CheckpointerError as exc:
        errors.print(f"[red]{escape(str(exc))}[/]", highlight=False)
        is_away = isinstance(exc, BackendUnavailable)
        raise typer.Exit(Exit.UNAVAILABLE if is_away else Exit.BAD_USE) from None

    if log.version == 0:
        errors.print(f"there is no session {escape(repr(thread))}", highlight=False)
        raise typer.Exit(Exit.NO)

    if mermaid:
        sys.stdout.write(draw_mermaid(log, everything=everything))
    elif svg:
        sys.stdout.write(draw_svg(log, everything=everything))
    elif json:
        sys.stdout.write(jsonlib.dumps(_as_json(log), ensure_ascii=False) + "\n")
    else:
        Console().print(draw_terminal(log, everything=everything))


async def _read(url: str, thread: str) -> SessionLog:
    async with open_checkpointer(url) as cp:
        return await SessionLog.open(cp, thread)


def _as_json(log: SessionLog) -> dict[str, Any]:
    active = {entry["id"] for entry in log.branch()}
    return {
        "session_id": log.session_id,
        "name": log.name,
        "version": log.version,
        "leaf_id": log.leaf_id,
        "leaves": log.leaves(),
        "entries": [
            {
                "id": entry["id"],
                "parent_id": entry.get("parentId"),
                "type": entry["type"],
                "timestamp": entry.get("timestamp"),
                "label": log.labels.get(entry["id"]),
                "text": describe(entry),
                "is_active": entry["id"] in active,
            }
            for entry in log.entries
        ],
    }
