"""``cpkit tree``: draw the branches of a session."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cpkit.cli.output import print_json, stdout, write
from cpkit.cli.running import Exit, No, give_up, run
from cpkit.cli.stores import opened, url_and
from cpkit.sessions import SessionLog
from cpkit.sessions.pictures import draw_mermaid, draw_svg, draw_terminal
from cpkit.sessions.pictures.describe import describe

__all__ = ["tree"]

Words = Annotated[
    list[str],
    typer.Argument(
        help="Where the store is, unless CPKIT_URL says it; and the session's id.",
        metavar="[URL] THREAD",
        show_default=False,
    ),
]
All = Annotated[
    bool, typer.Option("--all", help="Show every entry; straight runs are not folded.")
]
Mermaid = Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")]
Svg = Annotated[bool, typer.Option("--svg", help="Print an SVG file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the entries as JSON.")]


def tree(
    words: Words,
    everything: All = False,
    mermaid: Mermaid = False,
    svg: Svg = False,
    json: Json = False,
) -> None:
    """Draw the branches of a session.

    In the terminal, or for a document. The active branch is bright, the others are
    dim. Exits with 1 where there is no such session, 2 for a thread that is none
    and 3 where the store cannot be reached.
    """
    if mermaid + svg + json > 1:
        give_up(Exit.BAD_USE, "--mermaid, --svg and --json exclude each other")

    log = run(_read(words))

    if mermaid:
        write(draw_mermaid(log, everything=everything))
    elif svg:
        write(draw_svg(log, everything=everything))
    elif json:
        print_json(_as_json(log))
    else:
        stdout().print(draw_terminal(log, everything=everything))


async def _read(words: list[str]) -> SessionLog:
    url, thread_id = url_and(words, "THREAD")

    async with opened(url) as cp:
        log = await SessionLog.open(cp, thread_id)

    if log.version == 0:
        raise No(f"there is no session {thread_id!r}; cpkit threads lists all threads")

    return log


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
