"""A line chart as SVG, both axes logarithmic: how a figure grows with a thread."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import ceil, floor, log10

__all__ = ["chart"]

WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 250, 40, 45

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#999999",
    "#000000",
)

Line = Mapping[float, float]


def chart(title: str, x_title: str, lines: Mapping[str, Line]) -> str:
    """Return an SVG with a line for each name.

    A line maps x to y, which is in microseconds. An x of 0 is drawn at 1.
    """
    xs = [max(x, 1) for line in lines.values() for x in line]
    ys = [y for line in lines.values() for y in line.values()]
    low_x, high_x = _decades(xs)
    low_y, high_y = _decades(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (log10(max(x, 1)) - low_x) / (high_x - low_x)
        up = (log10(y) - low_y) / (high_y - low_y)
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]

    for power in range(low_y, high_y + 1):
        x, y = at(10**low_x, 10**power)
        parts.append(_rule(x, y, WIDTH - RIGHT, y))
        parts.append(_text(x - 8, y + 4, _amount(10**power), "end"))

    for power in range(low_x, high_x + 1):
        x, y = at(10**power, 10**low_y)
        parts.append(_rule(x, y, x, TOP))
        parts.append(_text(x, y + 18, f"{10**power:,}", "middle"))

    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 8, x_title, "middle"))

    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x},{y}" for x, y in (at(*p) for p in sorted(line.items())))
        width = 3.5 if name == "cpkit" else 1.5
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" '
            f'stroke-width="{width}"/>'
        )
        height = TOP + 10 + 20 * number
        start = WIDTH - RIGHT + 20
        parts.append(
            f'<line x1="{start}" y1="{height}" x2="{start + 24}" y2="{height}" '
            f'stroke="{colour}" stroke-width="{width}"/>'
        )
        parts.append(_text(start + 30, height + 4, name, "start"))

    return "\n".join([*parts, "</svg>", ""])


def _decades(values: list[float]) -> tuple[int, int]:
    low = floor(log10(min(values)))
    return low, max(ceil(log10(max(values))), low + 1)


def _amount(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:g} µs"

    if microseconds < 1_000_000:
        return f"{microseconds / 1000:g} ms"

    return f"{microseconds / 1_000_000:g} s"


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
