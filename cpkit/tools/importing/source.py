"""What a source yields: conversations, and parts that cannot be imported."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from json import loads
from typing import Any, BinaryIO, Protocol, TypeAlias

from cpkit.driver.jsontext import encode_json
from cpkit.errors import VersionConflict
from cpkit.fenced import append_once, read_range
from cpkit.fitting import (
    append_what_fits,
    same_but_missing,
    storable,
)
from cpkit.foreign_json import parse_foreign_json
from cpkit.protocol import Checkpointer
from cpkit.records import JsonValue
from cpkit.tools.copying.compare import are_equal

__all__ = [
    "BadSource",
    "Brought",
    "Conversation",
    "Differs",
    "Found",
    "Left",
    "Thread",
    "bring",
    "numbered_lines",
    "parsed",
]


# The JSON of one append. A store takes at least a message of 16 MiB and its neighbours.
_MOST_BYTES = 16 * 1024 * 1024


class BadSource(Exception):
    """The source cannot be read as its kind; the message says what to do."""


class Differs(Exception):
    """The stored thread is different; the message says how, without naming it.

    A report counts equal messages.
    """


@dataclass(frozen=True)
class Left:
    """A part of the source that is not imported, and why.

    ``is_thread`` if the part is a whole conversation.
    """

    name: str
    reason: str
    is_thread: bool = False


@dataclass(frozen=True)
class Brought:
    """How many messages of a thread the store had, and how many were written.

    ``missing`` says which parts of them the store refuses, and has a text for.
    """

    before: int
    written: int
    missing: list[str] = field(default_factory=list)


class Conversation(Protocol):
    """A conversation that was read completely and can be stored."""

    @property
    def name(self) -> str:
        """Its name in the source, for people."""
        ...

    @property
    def thread_id(self) -> str:
        """The thread that it becomes."""
        ...

    @property
    def size(self) -> int:
        """The number of its messages, items, entries or checkpoints."""
        ...

    async def bring(self, cp: Checkpointer[Any], *, dry_run: bool) -> Brought:
        """Append what the store does not have yet.

        A dry run writes nothing and returns what would be written. Raises `Differs`
        if the stored thread does not fit.
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
        async def missing(stored: list[Any]) -> list[dict[str, Any]]:
            common = min(len(stored), len(self.messages))
            found, wanted = stored[:common], self.messages[:common]

            # Messages of another type than dict are never equal, and have no text.
            if (found != wanted or not are_equal(found, wanted)) and not (
                same_but_missing(found, wanted)
            ):
                raise Differs("the thread in the store has other messages")

            return self.messages[common:]

        refused: list[str] = []
        before, written = await bring(
            cp, self.thread_id, missing, dry_run=dry_run, report=refused.extend
        )
        return Brought(min(before, self.size), written, refused)


async def bring(
    cp: Checkpointer[Any],
    thread_id: str,
    missing: Callable[[list[Any]], Awaitable[list[Any]]],
    *,
    dry_run: bool,
    extra: Mapping[str, JsonValue] | None = None,
    report: Callable[[list[str]], None] | None = None,
) -> tuple[int, int]:
    """Append the messages that ``missing`` returns for the stored ones.

    Returns the number of stored messages and of appended ones. The appends are fenced:
    if another writer appended first, such as a second import, ``missing`` is called
    again. A long conversation takes several appends; if the process dies, the next
    import goes on. A new thread gets the ``extra``. If there is a ``report``, a text
    replaces what the store refuses, and the reasons are reported.
    """
    version = 0

    async def append(part: list[Any]) -> None:
        nonlocal version
        await append_once(
            cp,
            thread_id,
            part,
            expected_version=version,
            extra=None if version else extra,
        )
        version += len(part)

    while True:
        stored = await read_range(cp, thread_id)
        rest = await missing(stored)
        version = len(stored)

        if dry_run:
            return version, len(rest)

        try:
            for part in _parts(rest):
                await append_what_fits(append, part, report)
        except VersionConflict:
            continue

        return len(stored), len(rest)


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers, from 1."""
    for number, text in enumerate(file, 1):
        if number == 1:
            text = text.removeprefix(BOM_UTF8)  # as programs on Windows write it

        if text.strip():
            yield number, text


def parsed(text: bytes | str) -> tuple[Any, list[str]]:
    """Parse a JSON text of another program; return it, and what is missing in it.

    Python's NaN and infinities, and what is nested too deep for a store, are replaced
    by a text. Raises ``ValueError`` or ``TypeError`` for anything else.
    """
    missing: list[str] = []

    try:
        value = parse_foreign_json(text)
    except ValueError:
        try:
            value = loads(text)
        except RecursionError as exc:
            raise ValueError(str(exc)) from exc

    return storable(value, missing), missing


def _parts(messages: list[Any]) -> Iterator[list[Any]]:
    """Yield the messages in parts that a store takes in one append."""
    part: list[Any] = []
    size = 0

    for message in messages:
        length = len(encode_json(message, ()))

        if part and size + length > _MOST_BYTES:
            yield part
            part, size = [], 0

        part.append(message)
        size += length

    if part:
        yield part
