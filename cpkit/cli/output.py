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
from typing import Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

__all__ = [
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

_BROKEN_PIPE = 141  # like a program that SIGPIPE ended

# A column of at most this width is folded only if the terminal is too narrow.
_SHORT = 22
_GAP = 2


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


def print_json(document: Any) -> None:
    """Print one JSON document, indented on a terminal."""
    text = json.dumps(
        document,
        ensure_ascii=not (sys.stdout.encoding or "").lower().startswith("utf"),
        indent=2 if sys.stdout.isatty() else None,
    )
    write(_CONTROL.sub(_json_escape, text) + "\n")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: str = ""
) -> None:
    """Print a table that fits the terminal; ``right`` names right-aligned columns.

    Nothing is truncated. Wide columns are folded first, and narrow ones such as ids
    only if the narrow columns alone do not fit.
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


def _cell(value: object) -> Text:
    return value if isinstance(value, Text) else Text(printable(str(value)))


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

    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def _exit_on_closed_pipe() -> NoReturn:
    # Otherwise the interpreter raises again when it flushes the buffer at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(_BROKEN_PIPE)
