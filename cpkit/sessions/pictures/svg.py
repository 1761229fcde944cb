"""A session's tree as an SVG: time goes down, and each branch has its own lane."""

from __future__ import annotations

from html import escape

from cpkit.sessions.pictures.describe import shortened
from cpkit.sessions.pictures.outline import Item, Run, every_run, outline
from cpkit.sessions.view import SessionView

__all__ = ["draw_svg"]

COLOURS = {
    "user": "#0b7285",
    "assistant": "#2b8a3e",
    "tool": "#4263eb",
    "summary": "#9c36b5",
    "setting": "#e67700",
    "fold": "#adb5bd",
}

# Pixels: the distance of lanes, the distance of rows, the margin, a letter's width.
LANE, ROW, EDGE, LETTER = 18, 22, 20, 6.6

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"
     viewBox="0 0 {width} {height}" role="img">
<title>{title}</title>
<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>
<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11"
   fill="#212529">
"""


def draw_svg(session: SessionView, *, everything: bool = False) -> str:
    """Return the text of an SVG file; inactive branches are pale."""
    roots = outline(session, everything=everything)
    lanes = _lanes(roots)
    items = sorted((i for run in lanes for i in run.items), key=lambda i: i.order)
    rows = {item.order: row for row, item in enumerate(items)}
    text_at = EDGE + LANE * (max(lanes.values(), default=0) + 1)
    longest = max((len(_text(item)) for item in items), default=0)
    head = HEAD.format(
        width=round(text_at + LETTER * longest + EDGE),
        height=ROW * len(items) + 2 * EDGE,
        title=escape(shortened(session.name or session.session_id)),
    )
    lines: list[str] = []
    marks: list[str] = []

    def spot(run: Run, item: Item) -> tuple[int, int]:
        return EDGE + LANE * lanes[run], EDGE + ROW * rows[item.order] + ROW // 2

    for run, parent in every_run(roots):
        before = None if parent is None else spot(parent, parent.items[-1])

        for item in run.items:
            here = spot(run, item)
            lines += [] if before is None else [_line(before, here, item)]
            marks += _mark(here, text_at, item)
            before = here

    return head + "\n".join([*lines, *marks, "</g>", "</svg>"]) + "\n"


def _lanes(roots: list[Run]) -> dict[Run, int]:
    """Give each run a lane; the first run after a fork stays in its parent's lane."""
    lanes: dict[Run, int] = {}
    last = -1

    for run, parent in every_run(roots):
        if parent is not None and run is parent.forks[0]:
            lanes[run] = lanes[parent]
            continue

        last += 1
        lanes[run] = last

    return lanes


def _line(start: tuple[int, int], end: tuple[int, int], item: Item) -> str:
    (x, y), (to_x, to_y) = start, end
    bend = f"C{x} {y + ROW} {to_x} {y} {to_x} {y + ROW}"
    path = f"M{x} {y} {bend} V{to_y}" if x != to_x else f"M{x} {y} V{to_y}"
    return (
        f'<path d="{path}" fill="none" stroke="#495057" stroke-width="1.5"'
        f"{_pale(item)}/>"
    )


def _mark(here: tuple[int, int], text_at: int, item: Item) -> list[str]:
    x, y = here
    dot = f'<circle cx="{x}" cy="{y}" r="{3 if item.kind == "fold" else 5}"'
    border = ' stroke="#212529" stroke-width="2"' if item.is_leaf else ""
    weight = ' font-weight="bold"' if item.kind == "user" else ""
    colour = COLOURS[item.kind]
    text = escape(_text(item))
    return [
        # White below a pale dot, so that lines do not show through it.
        f'{dot} fill="#ffffff"/>{dot} fill="{colour}"{border}{_pale(item)}/>',
        f'<text x="{text_at}" y="{y + 4}"{weight}{_pale(item)}>{text}</text>',
    ]


def _text(item: Item) -> str:
    label = f"  [{shortened(item.label, 24)}]" if item.label else ""
    return f"{item.text}{label}{'  ◀' if item.is_leaf else ''}"


def _pale(item: Item) -> str:
    return "" if item.is_active else ' opacity="0.45"'
