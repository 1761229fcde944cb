"""A session's tree for the terminal, with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpkit.sessions.pictures.describe import shortened
from cpkit.sessions.pictures.outline import Item, outline
from cpkit.sessions.view import SessionView

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

__all__ = ["draw_terminal"]

STYLES = {
    "user": "bold cyan",
    "assistant": "green",
    "tool": "blue",
    "summary": "magenta",
    "setting": "yellow",
    "fold": "dim",
}


def draw_terminal(session: SessionView, *, everything: bool = False) -> Tree:
    """Return the tree for rich to print; inactive branches are dim.

    A branch is indented below the entry where it forks. Needs ``cpkit[cli]``.
    """
    from rich.text import Text
    from rich.tree import Tree

    title = shortened(session.name or session.session_id)
    picture = Tree(Text(title, "bold"), guide_style="dim")
    roots = outline(session, everything=everything)
    todo = [(run, picture) for run in reversed(roots)]

    while todo:
        run, below = todo.pop()
        spot = below

        for item in run.items:
            spot = below.add(_line(item))

            # After a fork, the first line of a run carries the run's other lines.
            if item is run.items[0] and (below is not picture or len(roots) > 1):
                below = spot

        todo += [(fork, spot) for fork in reversed(run.forks)]

    return picture


def _line(item: Item) -> Text:
    from rich.text import Text

    line = Text(item.text, STYLES[item.kind] if item.is_active else "dim")

    if item.label:
        line.append(f"  [{shortened(item.label, 24)}]", "bold yellow")

    if item.is_leaf:
        line.append("  ◀", "bold")

    return line
