"""How a verb ends: with an exit code, and where it could not, one line that says why.

0 done, 1 the answer is no, 2 bad use, 3 store unavailable; 130 after Ctrl-C, 141 where
the reader of a pipe has gone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

import typer

from cpkit.cli.output import plain
from cpkit.errors import BackendUnavailable, CheckpointerError

__all__ = ["BadUse", "Exit", "No", "NoStore", "give_up", "run", "say"]

T = TypeVar("T")


class Exit(IntEnum):
    """The exit codes."""

    DONE = 0
    NO = 1
    BAD_USE = 2
    UNAVAILABLE = 3
    INTERRUPTED = 130


class No(Exception):
    """What was asked for is not there, or not so."""


class BadUse(Exception):
    """The words of the command cannot be used."""


class NoStore(Exception):
    """There is no store where the URL says."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a verb's work on a loop of its own; end the command where it cannot be done.

    No traceback is for the user of a command: each error becomes its one line.
    """
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    except No as exc:
        give_up(Exit.NO, str(exc))
    except (BackendUnavailable, NoStore) as exc:
        give_up(Exit.UNAVAILABLE, str(exc))
    except (CheckpointerError, BadUse) as exc:
        give_up(Exit.BAD_USE, str(exc))
    except OSError as exc:
        give_up(Exit.BAD_USE, f"{exc.strerror or exc}: {exc.filename or 'a file'}")


def give_up(code: Exit, message: str) -> NoReturn:
    """Say why in one line, and end the command."""
    say(message)
    raise typer.Exit(code)


def say(message: str) -> None:
    """Tell a person something on standard error, in one line."""
    line = plain(message)
    red = sys.stderr.isatty()
    sys.stderr.write(f"\x1b[31m{line}\x1b[0m\n" if red else f"{line}\n")
