"""Threads as lines of JSON: to keep, to read, and to copy from.

::

    {"cpkit_export":2,"exported_at":"…"}
    {"thread":"…","version":2,"created_at":"…","updated_at":"…","erased":false}
    {"message":{…}}                    one line each, in order
    {"extra":{…}}
    {"call":{"call_id":"…", …}}        one line each, in the order of claims
    {"end":"…","messages":2,"calls":1}
    {"threads":1}

A thread's lines are everything that a `ThreadDump` has, at one moment. The first line
of a trimmed thread has ``"first"``, the position of its first message. An ``erased``
thread has nothing but erased calls, and its times are those of its calls. A file
without the last line is truncated.

Lone surrogates are written as escapes. Where a high surrogate is followed by a low one,
readers of JSON take the two escapes for one character. Such a line has
``"escapes":"single"`` as its last member, and `ExportFile` reads each escape in it as
one character.

`cpkit export` seals each line of an encrypted store: it is bound to its number, and to
the data key of the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from cpkit.driver.seal import SEALED, LineSeal
from cpkit.errors import CorruptThread, KeyMissing, SchemaMismatch
from cpkit.foreign_json import encode_text
from cpkit.keyring import Keyring
from cpkit.protocol import ListsThreads
from cpkit.records import (
    CallRecord,
    CallStatus,
    JsonValue,
    ThreadDump,
    ThreadInfo,
    ToolCall,
)
from cpkit.tools.copying.report import Problem
from cpkit.tools.paging import thread_pages

__all__ = ["EXPORT_VERSION", "ExportFile", "Source", "call_as_json", "export_lines"]

EXPORT_VERSION = 2

L = TypeVar("L", bound="_Line")

_KINDS = (b"thread", b"message", b"extra", b"call", b"end", b"threads")

# Not pydantic's: a line nests its message one level deeper, and pydantic's parser may
# have accepted the message at its own limit of nesting.
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")

_SINGLE = {"escapes": "single"}

_ESCAPES = re.compile(r"\\(?:u(d[89a-f][0-9a-f]{2})|.)")


class Source(ListsThreads, Protocol):
    """What can be copied from: a store, or an export."""

    async def dump_thread(self, thread_id: str) -> ThreadDump | None: ...


async def export_lines(
    source: Source,
    thread_ids: Sequence[str] | None = None,
    *,
    on_damage: Callable[[Problem], object] | None = None,
) -> AsyncIterator[bytes]:
    """Yield the lines of the named threads, or of every thread, deleted ones included.

    Leaves out a thread that does not exist. Also leaves out one that is damaged or
    whose key is missing, with a call of ``on_damage``; without it, raises the error.
    One thread is in memory at a time.
    """
    exported_at = datetime.now(UTC).isoformat()
    yield _line({"cpkit_export": EXPORT_VERSION, "exported_at": exported_at})
    count = 0

    async for thread_id in _ids(source, thread_ids):
        try:
            dump = await source.dump_thread(thread_id)
        except (CorruptThread, KeyMissing) as exc:
            if on_damage is None:
                raise

            reason = (
                f"corrupt at {exc.where}: {exc.reason}"
                if isinstance(exc, CorruptThread)
                else f"{exc.where}: key {exc.key_id!r} {exc.fault}"
            )
            on_damage(Problem(thread_id, reason))
            continue

        if dump is None:
            continue

        for line in _thread_lines(dump):
            yield line

        count += 1

    yield _line({"threads": count})


async def _ids(source: Source, named: Sequence[str] | None) -> AsyncIterator[str]:
    if named is not None:
        for thread_id in named:
            yield thread_id

        return

    async for page in thread_pages(source, erased=True):
        for info in page:
            yield info.thread_id


def _thread_lines(dump: ThreadDump) -> Iterator[bytes]:
    info = _info_of(dump)
    yield _line(
        {
            "thread": dump.thread_id,
            "version": info.version,
            "created_at": info.created_at.isoformat(),
            "updated_at": info.updated_at.isoformat(),
            "erased": dump.created_at is None,
            **({"first": dump.first} if dump.first else {}),
        }
    )

    for message in dump.messages:
        yield _line({"message": message})

    yield _line({"extra": dict(dump.extra)})

    for record in dump.calls:
        yield _line({"call": call_as_json(record)})

    counts = {"messages": len(dump.messages), "calls": len(dump.calls)}
    yield _line({"end": dump.thread_id, **counts})


def _info_of(dump: ThreadDump) -> ThreadInfo:
    """Return how a store lists the thread; an erased one has the times of its calls."""
    created_at, updated_at = dump.created_at, dump.updated_at

    if created_at is None or updated_at is None:
        times = [one.issued_at for one in dump.calls]
        created_at = min(times)
        times += [one.resolved_at for one in dump.calls if one.resolved_at is not None]
        updated_at = max(times)

    version = dump.first + len(dump.messages)
    return ThreadInfo(dump.thread_id, version, created_at, updated_at)


def call_as_json(record: CallRecord) -> dict[str, JsonValue]:
    """Return everything on record of a call, without its thread's id."""
    call = record.call
    resolved_at = record.resolved_at
    return {
        "call_id": call.call_id,
        "tool_name": call.tool_name,
        "args": dict(call.args),
        "idempotency_key": call.idempotency_key,
        "status": record.status,
        "attempt": record.attempt,
        "issued_at": record.issued_at.isoformat(),
        "result": record.result,
        "resolved_at": None if resolved_at is None else resolved_at.isoformat(),
        "erased": record.erased,
    }


def _time(value: object) -> datetime:
    if isinstance(value, str):
        found = datetime.fromisoformat(value)

        if found.tzinfo is not None:
            return found

    raise ValueError("not a time with a zone")


_Time = Annotated[datetime, BeforeValidator(_time)]


class _Line(BaseModel):
    """What is in a line; a file may have been edited."""

    model_config = ConfigDict(strict=True)


class _Thread(_Line):
    thread: str
    version: int
    created_at: _Time
    updated_at: _Time
    erased: bool
    first: int = 0


class _Call(_Line):
    call_id: str
    tool_name: str
    args: dict[str, Any]
    idempotency_key: str
    status: CallStatus
    attempt: int
    issued_at: _Time
    result: Any
    resolved_at: _Time | None
    erased: bool


class _Extra(_Line):
    extra: dict[str, Any]


class _Place(NamedTuple):
    """Where a thread starts in the file: the offset and the number of its line."""

    info: ThreadInfo
    is_erased: bool
    first: int
    start: int
    line: int


class ExportFile:
    """An export as a source to copy from.

    The constructor reads the file once and keeps the place of each thread; a thread is
    read when it is asked for. An encrypted file needs a ``keyring``, and with one that
    is ``sealed_only`` the file must be encrypted.

    Raises ``CorruptThread``, with the line, for a file that is truncated or not an
    export, ``SchemaMismatch`` for another version, ``KeyMissing`` where the keyring
    lacks the key, and ``OSError`` as `open` does.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keyring: Keyring | None = None
    ) -> None:
        self._path = os.fspath(path)
        self._seal = None if keyring is None else LineSeal(keyring)
        self._sealed_only = keyring is not None and keyring.sealed_only
        self._threads: dict[str, _Place] = {}
        self._scan()
        self._order = sorted(self._threads)

    async def list_threads(
        self,
        *,
        prefix: str = "",
        after: str | None = None,
        limit: int = 100,
        erased: bool = False,
    ) -> list[ThreadInfo]:
        order = self._order

        if not erased:
            order = [one for one in order if not self._threads[one].is_erased]

        first = bisect_left(order, prefix)

        if after is not None:
            first = max(first, bisect_right(order, after))

        page = order[first : first + limit]
        return [self._threads[one].info for one in page if one.startswith(prefix)]

    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        place = self._threads.get(thread_id)
        return None if place is None else await asyncio.to_thread(self._read, place)

    def _scan(self) -> None:
        """Find where each thread starts, and check that every thread is complete."""
        offset, number, ended = 0, 0, False
        messages = calls = 0
        thread: str | None = None  # whose lines these are

        for number, text, size in self._lines(0):
            kind = text[2 : text.find(b'"', 2)]

            if number == 1:
                self._check_header(text)
            elif kind not in _KINDS:
                raise self._corrupt(number, "not a line of an export")
            elif kind == b"thread" and thread is None and not ended:
                place = self._place(self._parsed(text, number), offset, number)
                thread, messages, calls = place.info.thread_id, 0, 0

                if thread in self._threads:
                    raise self._corrupt(number, "the thread is in the file twice")

                self._threads[thread] = place
            elif kind == b"threads" and thread is None:
                ended = self._parsed(text, number) == {"threads": len(self._threads)}
            elif thread is None or kind in (b"thread", b"threads"):
                raise self._corrupt(number, "not the line that comes here in an export")
            elif kind == b"message":
                messages += 1
            elif kind == b"call":
                calls += 1
            elif kind == b"end":
                line = self._parsed(text, number)

                counts = {"messages": messages, "calls": calls}
                known = self._threads[thread]
                version = known.first + messages

                if line != {"end": thread, **counts} or version != known.info.version:
                    raise self._corrupt(number, "the thread is not complete")

                thread = None

            offset += size

        if not ended:
            raise self._corrupt(number, "the file is truncated after this line")

    def _read(self, place: _Place) -> ThreadDump:
        info = place.info
        messages: list[JsonValue] = []
        extra: dict[str, JsonValue] = {}
        calls: list[CallRecord] = []

        for number, text, _ in self._lines(place.start, place.line - 1):
            line = self._parsed(text, number)

            if "end" in line:
                break

            if "message" in line:
                messages.append(line["message"])
            elif "extra" in line:
                extra = self._checked(_Extra, line, "extra", number).extra
            elif "call" in line:
                calls.append(self._call(info.thread_id, line["call"], number))

        return ThreadDump(
            info.thread_id,
            messages,
            extra,
            calls,
            None if place.is_erased else info.created_at,
            None if place.is_erased else info.updated_at,
            place.first,
        )

    def _lines(self, start: int, number: int = 0) -> Iterator[tuple[int, bytes, int]]:
        """Yield each line with its number, and its bytes in the file."""
        with open(self._path, "rb") as file:
            is_sealed = file.read(len(SEALED)) == SEALED
            file.seek(start)

            for place, text in enumerate(file, number + 1):
                if not is_sealed and self._sealed_only:
                    fault = "it is not encrypted, and the keyring is sealed_only"
                    raise self._corrupt(place, fault)

                if not is_sealed:
                    yield place, text, len(text)
                elif self._seal is None:
                    raise self._corrupt(place, "it is encrypted: set CPKIT_KEYRING")
                else:
                    where = f"{self._path} line {place}"
                    yield place, self._seal.opened(text, place, where), len(text)

    def _check_header(self, text: bytes) -> None:
        found = self._parsed(text, 1).get("cpkit_export", "another file")

        if found != EXPORT_VERSION:
            raise SchemaMismatch(self._path, found, EXPORT_VERSION)

    def _parsed(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(text)

            if isinstance(line, dict) and line.get("escapes") == "single":
                line = json.loads(_ESCAPES.sub(_surrogate, text.decode()))
        except (ValueError, RecursionError) as exc:
            raise self._corrupt(number, f"not JSON: {exc}") from exc

        if not isinstance(line, dict):
            raise self._corrupt(number, "not a line of an export")

        return line

    def _place(self, line: dict[str, Any], start: int, number: int) -> _Place:
        found = self._checked(_Thread, line, "a thread", number)
        times = (found.created_at, found.updated_at)
        info = ThreadInfo(found.thread, found.version, *times)
        return _Place(info, found.erased, found.first, start, number)

    def _call(self, thread_id: str, line: Any, number: int) -> CallRecord:
        found = self._checked(_Call, line, "a call", number)
        return CallRecord(
            thread_id,
            ToolCall(found.call_id, found.tool_name, found.args, found.idempotency_key),
            found.status,
            found.attempt,
            found.issued_at,
            found.result,
            found.resolved_at,
            found.erased,
        )

    def _checked(self, model: type[L], line: Any, what: str, number: int) -> L:
        try:
            return model.model_validate(line)
        except ValidationError as exc:
            error = exc.errors()[0]
            field = ".".join(map(str, error["loc"])) or "line"
            reason = f"not {what} ({field}: {error['msg']})"
            raise self._corrupt(number, reason) from exc

    def _corrupt(self, number: int, reason: str) -> CorruptThread:
        return CorruptThread("", f"{self._path} line {number}", reason)


def _surrogate(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] is None else chr(int(escape[1], 16))


def _line(value: dict[str, Any]) -> bytes:
    text = _ENCODE(value)

    if not text.isascii() and _PAIR.search(text):
        text = _ENCODE(value | _SINGLE)

    return encode_text(text) + b"\n"
