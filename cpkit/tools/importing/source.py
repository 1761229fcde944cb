"""What a source yields: conversations, and what cannot be brought over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from cpkit.errors import VersionConflict
from cpkit.protocol import Checkpointer
from cpkit.sessions.fenced import append_once, read_range

__all__ = [
    "BadSource",
    "Brought",
    "Conversation",
    "Differs",
    "Found",
    "Left",
    "Thread",
    "bring",
]


class BadSource(Exception):
    """The source cannot be read as what it is taken for; the message says the mend."""


class Differs(Exception):
    """The thread has something else; the message says what, for people to count."""


@dataclass(frozen=True)
class Left:
    """Something in the source that stays there, and why.

    ``is_thread`` where that is a whole conversation, which somebody will miss.
    """

    name: str
    reason: str
    is_thread: bool = False


@dataclass(frozen=True)
class Brought:
    """How much of a thread was there before and how much is new, in messages."""

    before: int
    written: int


class Conversation(Protocol):
    """A conversation that was read whole, and knows how it is stored."""

    @property
    def name(self) -> str:
        """What it is in the source, for people."""
        ...

    @property
    def thread_id(self) -> str:
        """The thread that it becomes."""
        ...

    @property
    def size(self) -> int:
        """How much it has, in messages, items, entries or checkpoints."""
        ...

    async def bring(self, cp: Checkpointer[Any], *, dry_run: bool) -> Brought:
        """Append what the store does not have yet; raise `Differs` where that is none.

        A dry run writes nothing and returns what would be.
        """
        ...


Found: TypeAlias = Conversation | Left


@dataclass(frozen=True)
class Thread:
    """A conversation that is stored as these messages."""

    name: str
    thread_id: str
    messages: list[dict[str, Any]]

    @property
    def size(self) -> int:
        return len(self.messages)

    async def bring(self, cp: Checkpointer[Any], *, dry_run: bool) -> Brought:
        async def missing(there: list[Any]) -> list[dict[str, Any]]:
            common = min(len(there), len(self.messages))

            if there[:common] != self.messages[:common]:
                raise Differs("the thread in the store has other messages")

            return self.messages[common:]

        before, written = await bring(cp, self.thread_id, missing, dry_run=dry_run)
        return Brought(min(before, self.size), written)


async def bring(
    cp: Checkpointer[Any],
    thread_id: str,
    missing: Callable[[list[Any]], Awaitable[list[Any]]],
    *,
    dry_run: bool,
) -> tuple[int, int]:
    """Append what ``missing`` makes of the messages that are there.

    Returns how many were there and how many were appended. The append is fenced: where
    another writer was first, who may be another import, it is asked again.
    """
    while True:
        there = await read_range(cp, thread_id)
        rest = await missing(there)

        if not rest or dry_run:
            return len(there), len(rest)

        try:
            await append_once(cp, thread_id, rest, expected_version=len(there))
        except VersionConflict:
            continue

        return len(there), len(rest)
