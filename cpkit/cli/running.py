"""Run a command's work, and turn its errors into exit codes and one line of text.

0 done, 1 the answer is no, 2 bad use, 3 store unavailable; 130 after Ctrl-C, 141 when
the reader of standard output closed the pipe.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

import typer

from cpkit.cli.output import printable, stderr
from cpkit.errors import BackendUnavailable, CheckpointerError, CorruptThread

__all__ = ["BadUse", "Exit", "NoStore", "NotFound", "fail", "print_stderr", "run"]

T = TypeVar("T")


class Exit(IntEnum):
    """The exit codes."""

    DONE = 0
    NO = 1
    BAD_USE = 2
    UNAVAILABLE = 3
    INTERRUPTED = 130


class NotFound(Exception):
    """The thread or session that the command names does not exist."""


class BadUse(Exception):
    """An argument of the command is wrong."""


class NoStore(Exception):
    """There is no store at the URL."""


def run(work: Coroutine[Any, Any, T], interrupted: str = "") -> T:
    """Run a command's work on a new event loop, and return its result.

    An expected error ends the command with one line and an exit code, without a
    traceback. ``interrupted`` is printed after Ctrl-C.
    """
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        if interrupted:
            print_stderr(f"interrupted: {interrupted}")

        raise typer.Exit(Exit.INTERRUPTED) from None
    except NotFound as exc:
        fail(Exit.NO, str(exc))
    except CorruptThread as exc:
        # Without a thread, a file that the command was given is damaged.
        fail(Exit.NO if exc.thread_id else Exit.BAD_USE, str(exc))
    except (BackendUnavailable, NoStore) as exc:
        fail(Exit.UNAVAILABLE, str(exc))
    except (CheckpointerError, BadUse) as exc:
        fail(Exit.BAD_USE, str(exc))
    except OSError as exc:
        fail(Exit.BAD_USE, f"{exc.strerror or exc}: {exc.filename or 'a file'}")


def fail(code: Exit, message: str) -> NoReturn:
    """Print the message to standard error, and end the command."""
    print_stderr(message)
    raise typer.Exit(code)


def print_stderr(message: str) -> None:
    """Print one line to standard error, red on a terminal unless NO_COLOR is set."""
    line = printable(message)
    console = stderr()
    red = console.color_system and not console.no_color
    sys.stderr.write(f"\x1b[31m{line}\x1b[0m\n" if red else f"{line}\n")
