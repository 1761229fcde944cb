"""A session's tree as a Mermaid flowchart."""

from __future__ import annotations

import re

from cpkit.sessions.pictures.describe import shortened
from cpkit.sessions.pictures.outline import Item, every_run, outline
from cpkit.sessions.view import SessionView

__all__ = ["draw_mermaid"]

COLOURS = {
    "user": "fill:#d5f0f6,stroke:#0b7285",
    "assistant": "fill:#dcf2dc,stroke:#2b8a3e",
    "tool": "fill:#dde7fb,stroke:#364fc7",
    "summary": "fill:#f3dcf4,stroke:#862e9c",
    "setting": "fill:#fbf0d0,stroke:#a06a00",
    "fold": "fill:#f1f3f5,stroke:#868e96,stroke-dasharray:3",
}


def draw_mermaid(session: SessionView, *, everything: bool = False) -> str:
    """Return the text of a flowchart, from the first entry down to the leaves.

    Lines to inactive branches are dotted. By default Mermaid draws at most 500 lines,
    so a longer session cannot be drawn with ``everything``.
    """
    lines = ["flowchart TD"]
    last: dict[int, str] = {}

    for run, parent in every_run(outline(session, everything=everything)):
        before = None if parent is None else last[id(parent)]

        for item in run.items:
            node = f"n{item.order}"
            lines.append(f'    {node}["{_label(item)}"]:::{item.kind}')

            if before is not None:
                lines.append(
                    f"    {before} {'-->' if item.is_active else '-.->'} {node}"
                )

            before = last[id(run)] = node

    lines += [
        f"    classDef {kind} {style},color:#212529" for kind, style in COLOURS.items()
    ]
    return "\n".join(lines) + "\n"


def _label(item: Item) -> str:
    text = item.text

    if item.label:
        text += f" [{shortened(item.label, 24)}]"

    if item.is_leaf:
        text += " ◀"

    # Characters that could be markup become numeric entities of Mermaid.
    return re.sub(r"[^\w\s.,:/…◀→-]", lambda found: f"#{ord(found[0])};", text)
