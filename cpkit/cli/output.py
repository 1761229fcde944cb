"""Print tables, JSON and progress, with stored text made safe for a terminal.

A stored message is untrusted data. Characters that control a terminal or hide text are
printed as escapes, and rich's markup in stored text is not interpreted.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import zip_longest
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

__all__ = [
    "discard_output",
    "one_line",
    "printable",
    "print_json",
    "print_table",
    "progress",
    "escape_unencodable",
    "stderr",
    "stdout",
    "write",
    "write_json_line",
]

# A pipe has no width, and programs that read it need whole lines.
_UNBOUNDED = 100_000

_LEAST_WIDTH = 6  # of a column with its gap: columns of one character cannot be read

_BROKEN_PIPE = 141  # like a program that SIGPIPE ended

_GAP = "  "  # between two columns of a table

_CONTROL = re.compile(r"[^\x20-\x7e]")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        _exit_on_closed_pipe()


def stdout(*, markup: bool = False) -> Console:
    """Return the console for a command's output, coloured only on a terminal.

    With ``markup`` the caller must escape stored text.
    """
    bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Console(
        markup=markup,
        highlight=False,
        emoji=False,
        width=None if bounded else _UNBOUNDED,
    )


def stderr() -> Console:
    """Return the console for progress, which is not part of the output."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def escape_unencodable() -> None:
    """Print characters that the terminal's encoding lacks as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write(text: str, *, flush: bool = True) -> None:
    """Write to standard output; end the command if its reader closed the pipe."""
    try:
        sys.stdout.write(text)

        if flush:
            sys.stdout.flush()
    except BrokenPipeError:
        _exit_on_closed_pipe()


def write_json_line(line: bytes) -> None:
    """Write a line of JSON; on a terminal, escape what is not printable."""
    try:
        if sys.stdout.isatty():
            line = _CONTROL.sub(_json_escape, line.decode()).encode()

        sys.stdout.buffer.write(line)
    except BrokenPipeError:
        _exit_on_closed_pipe()


def print_json(document: Any, *, on_one_line: bool = False) -> None:
    """Print one JSON document, indented on a terminal unless it is ``on_one_line``."""
    text = json.dumps(
        document,
        ensure_ascii=not (sys.stdout.encoding or "").lower().startswith("utf"),
        indent=2 if sys.stdout.isatty() and not on_one_line else None,
    )
    write(_CONTROL.sub(_json_escape, text) + "\n")


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: str = "",
    whole: str = "",
) -> None:
    """Print a table that fits the terminal; ``right`` names right-aligned columns.

    Nothing is truncated: a cell that is too wide continues on the next line. The widest
    columns are narrowed first. Cells of the columns that ``whole`` names stay on one
    line, so that a person can copy them. If they leave too little room, each field of a
    row has its own line. Not with rich's table, which takes a minute for 100,000 rows.
    """
    console = stdout()
    cells = [[printable(str(value)) for value in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(columns, *cells, strict=True)]
    others = [at for at, name in enumerate(columns) if name not in whole.split()]
    room = max(console.width, _LEAST_WIDTH * len(columns))
    room -= len(_GAP) * (len(columns) - 1)
    room -= sum(widths) - sum(widths[at] for at in others)

    if whole and room < _LEAST_WIDTH * len(others):
        _print_fields(columns, cells)
        return

    narrowed = _fitted([widths[at] for at in others], room)

    for at, width in zip(others, narrowed, strict=True):
        widths[at] = width

    sides = [name in right.split() for name in columns]
    bold, plain = ("\x1b[1m", "\x1b[0m") if console.color_system else ("", "")
    rule = "-" if console.options.ascii_only else "─"

    for line in _lines(columns, widths, sides, console):
        write(f"{bold}{line}{plain}\n", flush=False)

    write(rule * (sum(widths) + len(_GAP) * (len(columns) - 1)) + "\n", flush=False)

    for row in cells:
        for line in _lines(row, widths, sides, console):
            write(f"{line}\n", flush=False)

    write("")


def _print_fields(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print each field on its own line, and an empty line between two rows."""
    width = max(map(_width, columns))

    for number, row in enumerate(rows):
        write("\n" if number else "", flush=False)

        for name, cell in zip(columns, row, strict=True):
            write(f"{name:<{width}}{_GAP}{cell}".rstrip() + "\n", flush=False)

    write("")


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error, if that is a terminal.

    Yields a function that adds to the number of finished items. A negative number
    sets the total instead.
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


def printable(text: str) -> str:
    """Return the text with every character that is not printable escaped."""
    if text.isprintable():
        return text

    return "".join(c if c.isprintable() else _escape(c) for c in text)


def one_line(value: object, width: int) -> str:
    """Return a value on one line, truncated to the width; as JSON unless it is text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    line = printable(" ".join(text[: width * 8].split()))
    return line if len(line) <= width else line[: width - 1] + "…"


def _fitted(widths: list[int], room: int) -> list[int]:
    """Give all columns that are too wide the same width, so that the row fits."""
    for done, width in enumerate(sorted(widths)):
        share = max(1, room // (len(widths) - done))

        if width > share:
            return [min(width, share) for width in widths]

        room -= width

    return widths


def _lines(
    row: Sequence[str], widths: list[int], sides: list[bool], console: Console
) -> Iterator[str]:
    """Yield the lines of a row; a cell that is too wide continues on the next."""
    folded = [
        [text]
        if _width(text) <= width
        else [line.plain for line in Text(text).wrap(console, width, overflow="fold")]
        for text, width in zip(row, widths, strict=True)
    ]

    for line in zip_longest(*folded, fillvalue=""):
        padded = (
            " " * (width - _width(text)) + text
            if is_right
            else text + " " * (width - _width(text))
            for text, width, is_right in zip(line, widths, sides, strict=True)
        )
        yield _GAP.join(padded).rstrip()


def _width(text: str) -> int:
    """Return the columns of a terminal that the text takes."""
    return len(text) if text.isascii() else cell_len(text)


def _escape(char: str) -> str:
    code = ord(char)
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char)
    return short or (f"\\x{code:02x}" if code < 256 else f"\\u{{{code:x}}}")


def _json_escape(found: re.Match[str]) -> str:
    """Escape a character of JSON text that is not printable.

    In JSON text only strings contain such characters.
    """
    char = found[0]

    if char == "\n" or char.isprintable():
        return char

    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def discard_output() -> None:
    """Let the interpreter flush standard output at exit without another error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_on_closed_pipe() -> NoReturn:
    discard_output()
    raise typer.Exit(_BROKEN_PIPE)
