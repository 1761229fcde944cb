"""Which store a command is about, and opening it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Protocol

import typer

from cpkit.cli.output import plain
from cpkit.cli.peek import peek
from cpkit.cli.running import BadUse, NoStore
from cpkit.errors import InvalidURL
from cpkit.protocol import (
    Checkpointer,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    ReadsRanges,
    StatesDurability,
)
from cpkit.registry import DEFAULT_URL, open_checkpointer, redacted

__all__ = [
    "Json",
    "Store",
    "Url",
    "destination",
    "has",
    "opened",
    "shown",
    "store_url",
    "url_and",
]

Url = Annotated[
    str | None,
    typer.Argument(
        help="Where the store is.", metavar="[URL]", show_default="CPKIT_URL"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def destination(metavar: str) -> Any:
    """Return the argument of a verb that writes into a store, new or not."""
    return typer.Argument(
        help="A store's URL; it is created if it is not there.",
        metavar=metavar,
        show_default=False,
    )


_ABILITIES: dict[type, str] = {
    ListsThreads: "list its threads",
    KeepsReceipts: "list its calls",
    ReadsRanges: "read a part of a thread",
    ErasesThreads: "delete threads",
}


class Store(
    Checkpointer[Any],
    ListsThreads,
    ReadsRanges[Any],
    KeepsReceipts,
    ErasesThreads,
    StatesDurability,
    Protocol,
):
    """A store with every ability; which of them one has, `has` tells."""


def store_url(given: str | None) -> str:
    """Return the URL that a command is about, as the library reads it."""
    return given or os.environ.get("CPKIT_URL") or DEFAULT_URL


def url_and(words: Sequence[str], *names: str) -> tuple[str, ...]:
    """Divide a command's words into the URL, which may be left out, and the rest."""
    if len(words) == len(names):
        return (store_url(None), *words)

    if len(words) == len(names) + 1:
        return tuple(words)

    raise BadUse(
        f"expected [URL] {' '.join(names)}, got {len(words)} words; "
        "without a URL, CPKIT_URL counts"
    )


def shown(url: str) -> str:
    """Return a URL for people to read: no password, no control characters."""
    return plain(redacted(url))


@asynccontextmanager
async def opened(
    url: str, *abilities: type, create: bool = False, volatile: bool = False
) -> AsyncIterator[Store]:
    """Open a store that is there already, with messages as plain JSON of any kind.

    Only with ``create`` is one made where there is none. A store in memory, which no
    other process sees, is refused unless ``volatile``. ``abilities`` are the optional
    protocols that the command cannot do without.
    """
    handle = open_checkpointer(url, message_type=Any)

    if not volatile and url.lower().startswith(("memory:", "sqlite:///:memory:")):
        raise InvalidURL(
            f"{shown(url)} lives in its own process, where this command cannot see it; "
            "name a store that is shared"
        )

    if not create:
        found = await peek(url)

        if found is not None and not found.exists:
            what = f"{found.path} holds no store" if found.path else "there is no store"
            raise NoStore(
                f"{shown(url)}: {what} (nothing was created); look at the URL, or "
                "make one there with: cpkit doctor --create"
            )

    async with handle as cp:
        for ability in abilities:
            if not has(cp, ability):
                raise BadUse(f"{shown(url)} cannot {_ABILITIES[ability]}")

        yield cp  # type: ignore[misc]  # of the optional methods, those asked for


def has(cp: object, *abilities: type) -> bool:
    """Tell whether a store has the methods of some optional protocols."""
    return all(isinstance(cp, one) for one in abilities)
