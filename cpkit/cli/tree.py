"""``cpkit tree``: draw the branches of a session."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cpkit.cli.output import print_json, stdout, write
from cpkit.cli.running import BadUse, Exit, fail, run
from cpkit.cli.stores import command_line, no_thread, open_store, split_words
from cpkit.sessions import NotASession, SessionLog
from cpkit.sessions.pictures import draw_mermaid, draw_svg, draw_terminal
from cpkit.sessions.pictures.describe import describe

__all__ = ["tree"]

Words = Annotated[
    list[str],
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set, and the session's id.",
        metavar="[URL] THREAD",
        show_default=False,
    ),
]
All = Annotated[
    bool,
    typer.Option("--all", help="Show every entry instead of folding straight runs."),
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

    The active branch is bright, the others are dim. Exits with 1 if the session does
    not exist, 2 if the thread is not a session, and 3 if the store is unavailable.
    """
    if mermaid + svg + json > 1:
        fail(Exit.BAD_USE, "--mermaid, --svg and --json exclude each other: use one")

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
    url, thread_id = split_words(words, "THREAD")

    async with open_store(url) as cp:
        try:
            log = await SessionLog.open(cp, thread_id)
        except NotASession as exc:
            raise BadUse(
                f"{exc}; print it: {command_line('show', url, thread_id)}"
            ) from exc

    if log.version == 0:
        raise no_thread(url, thread_id)

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
