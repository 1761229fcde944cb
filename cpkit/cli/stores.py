"""Find and open the store that a command works on."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Protocol

import typer

from cpkit.cli.output import printable
from cpkit.cli.running import BadUse, NoStore, NotFound
from cpkit.errors import InvalidURL
from cpkit.protocol import (
    Checkpointer,
    ErasesCalls,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    MovesThreads,
    ReadsRanges,
    SearchesThreads,
    StatesDurability,
    TrimsThreads,
)
from cpkit.registry import DEFAULT_URL, inspect_store, open_checkpointer, redacted
from cpkit.tools.formats import counted

__all__ = [
    "Internal",
    "Json",
    "Store",
    "Url",
    "command_line",
    "destination",
    "display_url",
    "is_volatile",
    "no_thread",
    "open_store",
    "split_words",
    "store_url",
    "supports",
]

Url = Annotated[
    str | None,
    typer.Argument(help="The store's URL.", metavar="[URL]", show_default="CPKIT_URL"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Internal = Annotated[
    bool,
    typer.Option(
        "--internal", help="Include cpkit's own threads (cpkit:…), such as leases."
    ),
]


def destination(metavar: str) -> Any:
    """Return the argument for a store that the command may create."""
    return typer.Argument(
        help="A store's URL; a missing store is created.",
        metavar=metavar,
        show_default=False,
    )


# A thread's id could look like this too; then the URL must be given.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|file:")

_ABILITIES: dict[type, str] = {
    ListsThreads: "list its threads",
    KeepsReceipts: "list its calls",
    ReadsRanges: "read a part of a thread",
    SearchesThreads: "search messages",
    ErasesThreads: "delete threads",
    TrimsThreads: "trim threads",
    ErasesCalls: "erase the content of calls",
    MovesThreads: "dump and restore threads",
}


class Store(
    Checkpointer[Any],
    ListsThreads,
    ReadsRanges[Any],
    KeepsReceipts,
    ErasesThreads,
    TrimsThreads,
    ErasesCalls,
    MovesThreads,
    StatesDurability,
    Protocol,
):
    """A store with every optional protocol; check with `supports` before a call."""


def store_url(given: str | None) -> str:
    """Return the given URL, or CPKIT_URL, or the default.

    An empty word is an unset variable of a script; another store must not take its
    place.
    """
    if given == "":
        raise BadUse("the store's URL is empty; is a variable not set?")

    return given or os.environ.get("CPKIT_URL") or DEFAULT_URL


def split_words(words: Sequence[str], *names: str) -> tuple[str, ...]:
    """Split a command's words into the URL, which is optional, and the named rest."""
    expected = f"expected [URL] {' '.join(names)}"

    if len(words) == len(names) + 1:
        return tuple(words)

    if words and len(words) <= len(names) and _URL.match(words[0]):
        missing = names[len(words) - 1 :]
        verb = "is" if len(missing) == 1 else "are"
        raise BadUse(
            f"{expected}: {' and '.join(missing)} {verb} missing after "
            + shlex.join(map(display_url, words))
        )

    if len(words) == len(names):
        return (store_url(None), *words)

    count = counted(len(words), "word")
    raise BadUse(f"{expected}, got {count}; without a URL, CPKIT_URL is used")


def display_url(url: str) -> str:
    """Return a URL without its password and without control characters."""
    return printable(redacted(url))


def command_line(command: str, url: str, *words: str) -> str:
    """Return the command for a hint, to paste into a shell; without a password."""
    return shlex.join(["cpkit", command, display_url(url), *map(printable, words)])


def no_thread(url: str, thread_id: str) -> NotFound:
    """Return the error for a thread that the store does not have."""
    return NotFound(
        f"there is no thread {thread_id!r}; list all: {command_line('threads', url)}"
    )


def is_volatile(url: str) -> bool:
    """Return whether only the process that opens the store can see it."""
    return url.lower().startswith(("memory:", "sqlite:///:memory:"))


@asynccontextmanager
async def open_store(
    url: str, *abilities: type, create: bool = False, volatile: bool = False
) -> AsyncIterator[Store]:
    """Open an existing store, with messages of any JSON type.

    ``create`` also creates a missing store. ``volatile`` accepts a store in memory,
    which other processes cannot see. ``abilities`` are the optional protocols that the
    command needs.

    Raises ``NoStore`` for a missing store, and ``BadUse`` for a missing ability.
    """
    handle = open_checkpointer(url, message_type=Any)

    if not volatile and is_volatile(url):
        raise InvalidURL(
            f"{display_url(url)} lives in its own process, and this command cannot "
            "see it; use the URL of a store that processes share"
        )

    if not create:
        found = await inspect_store(url)

        if found is not None and not found.exists:
            what = f"{found.path} is not a store" if found.path else "there is no store"
            raise NoStore(
                f"{display_url(url)}: {what} (nothing was created); check the URL, or "
                f"create a store: {command_line('doctor', url, '--create')}"
            )

    async with handle as cp:
        for ability in abilities:
            if not supports(cp, ability):
                raise BadUse(f"{display_url(url)} cannot {_ABILITIES[ability]}")

        yield cp


def supports(cp: object, *abilities: type) -> bool:
    """Return whether a store has all of these optional protocols."""
    return all(isinstance(cp, one) for one in abilities)
