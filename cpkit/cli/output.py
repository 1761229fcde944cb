"""What a command prints: tables, JSON, progress; nothing stored can write but text.

A stored message is data from anywhere. Characters that would steer a terminal, or hide
what stands there, are printed as escapes, and rich's markup is never looked for.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from io import TextIOWrapper
from math import log10
from typing import Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

__all__ = [
    "age",
    "moment",
    "one_line",
    "plain",
    "print_json",
    "print_table",
    "progress",
    "ready",
    "size",
    "stderr",
    "stdout",
    "write",
    "write_json_line",
]

# A pipe has no width to fit: what reads it wants whole lines.
_UNBOUNDED = 100_000

_BROKEN_PIPE = 141  # as of a program that SIGPIPE ended

# Columns of a table: what is at most so wide is not folded while there is room.
_SHORT = 22
_GAP = 2

_UNITS = ("kB", "MB", "GB", "TB")

_CONTROL = re.compile(r"[^\x20-\x7e]")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        _reader_gone()


def stdout(*, markup: bool = False) -> Console:
    """Return the console for a verb's answer: coloured on a terminal alone.

    With ``markup`` the caller escapes what is not its own.
    """
    bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Console(
        markup=markup,
        highlight=False,
        emoji=False,
        width=None if bounded else _UNBOUNDED,
    )


def stderr() -> Console:
    """Return the console for what is said beside the answer."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def ready() -> None:
    """Have standard output and error print any text, in whatever encoding they are."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write(text: str) -> None:
    """Write to standard output, and end the command where nobody reads it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _reader_gone()


def write_json_line(line: bytes) -> None:
    """Write a line of JSON, to a terminal so that it steers nothing."""
    try:
        if sys.stdout.isatty():
            line = _CONTROL.sub(_json_escape, line.decode()).encode()

        sys.stdout.buffer.write(line)
    except BrokenPipeError:
        _reader_gone()


def print_json(document: Any) -> None:
    """Print one JSON document, on a terminal with indentation."""
    text = json.dumps(
        document,
        ensure_ascii=not (sys.stdout.encoding or "").lower().startswith("utf"),
        indent=2 if sys.stdout.isatty() else None,
    )
    write(_CONTROL.sub(_json_escape, text) + "\n")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: str = ""
) -> None:
    """Print a table that fits the terminal; ``right`` names columns of numbers.

    Nothing is cut: where it is narrow, long texts are folded, and ids only where it is
    narrower than all that is short.
    """
    console = stdout()
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True
    )
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [
        max([cell_len(name), *(row[i].cell_len for row in cells)])
        for i, name in enumerate(columns)
    ]
    short = [width <= _SHORT for width in widths]
    room = console.width - sum(
        _GAP + (width if is_short else _SHORT)
        for width, is_short in zip(widths, short, strict=True)
    )

    for name, is_short in zip(columns, short, strict=True):
        table.add_column(
            Text(name),
            justify="right" if name in right.split() else "left",
            overflow="fold",
            no_wrap=is_short and room >= 0,
        )

    for row in cells:
        table.add_row(*row)

    console.print(table)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show how far long work is, on standard error and only on a terminal.

    Gives a function that takes how many more are done; a negative number sets the
    total to its amount.
    """
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())

    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(what, total=total)

        def advance(count: int) -> None:
            if count < 0:
                shown.update(task, total=-count)
            else:
                shown.advance(task, count)

        yield advance


def plain(text: str) -> str:
    """Return text that can only be read: what is not printable is escaped."""
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def one_line(value: object, width: int) -> str:
    """Return a value on one line, cut at the width; JSON unless it is text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    line = plain(" ".join(text[: width * 8].split()))
    return line if len(line) <= width else line[: width - 1] + "…"


def moment(time: datetime) -> str:
    """Return a time to the second, in UTC."""
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(time: datetime) -> str:
    """Return how long ago a time was, in its largest unit."""
    return span(datetime.now(UTC) - time)


def span(time: timedelta) -> str:
    seconds = max(0, int(time.total_seconds()))

    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"

    return f"{seconds} s"


def size(count: float) -> str:
    """Return a number of bytes in its largest unit."""
    if count < 1000:
        return f"{count:.0f} bytes"

    power = min(len(_UNITS), int(log10(count) / 3))
    return f"{count / 1000**power:.1f} {_UNITS[power - 1]}"


def _cell(value: object) -> Text:
    return value if isinstance(value, Text) else Text(plain(str(value)))


def _escape(char: str) -> str:
    code = ord(char)
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char)
    return short or (f"\\x{code:02x}" if code < 256 else f"\\u{{{code:x}}}")


def _json_escape(found: re.Match[str]) -> str:
    """Escape what is not printable within JSON, where only strings can have it."""
    char = found[0]

    if char == "\n" or char.isprintable():
        return char

    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def _reader_gone() -> NoReturn:
    # What is still buffered would raise again at the interpreter's end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(_BROKEN_PIPE)
