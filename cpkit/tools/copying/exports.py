"""A store as lines of JSON: to keep, to read, and to copy from again.

::

    {"cpkit_export":1,"exported_at":"…"}
    {"thread":"…","version":2,"created_at":"…","updated_at":"…"}
    {"message":{…}}                    one a line, in order
    {"extra":{…}}
    {"call":{"call_id":"…", …}}        one a line, in the order of claims
    {"end":"…","messages":2,"calls":1}
    {"threads":1}

Threads come one after the other; the last line is missing where the file was cut.
"""

from __future__ import annotations

import asyncio
import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from cpkit.errors import CorruptThread, SchemaMismatch
from cpkit.records import CallRecord, CheckpointData, JsonValue, ThreadInfo, ToolCall
from cpkit.tools.copying.calls import GRAVES, Source
from cpkit.tools.copying.copier import every_thread

__all__ = ["EXPORT_VERSION", "ExportFile", "call_as_json", "export_lines"]

EXPORT_VERSION = 1

# Not pydantic's: a message nested as deep as its parser goes is one level deeper here.
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


async def export_lines(
    source: Source, threads: list[ThreadInfo] | None = None
) -> AsyncIterator[bytes]:
    """Give a store's lines; all of its threads, or those that are given.

    Each thread is what one load shows, and its calls right after; one that is deleted
    has only its calls, one that is not there is left out. One thread is in memory at a
    time.
    """
    yield _line(
        {"cpkit_export": EXPORT_VERSION, "exported_at": datetime.now(UTC).isoformat()}
    )
    count = 0

    if threads is None:
        now = datetime.now(UTC)
        threads = await every_thread(source)
        threads.append(ThreadInfo(GRAVES, 0, now, now))

    for info in threads:
        data = await source.load(info.thread_id)
        calls = await source.list_calls(info.thread_id)

        if data is None:
            if not calls:
                continue

            data = CheckpointData([], {}, [])

        yield _line(
            {
                "thread": info.thread_id,
                "version": data.version,
                "created_at": info.created_at.isoformat(),
                "updated_at": info.updated_at.isoformat(),
            }
        )

        for message in data.messages:
            yield _line({"message": message})

        yield _line({"extra": data.extra})

        for record in calls:
            yield _line({"call": call_as_json(record)})

        yield _line(
            {"end": info.thread_id, "messages": data.version, "calls": len(calls)}
        )
        count += 1

    yield _line({"threads": count})


def call_as_json(record: CallRecord) -> dict[str, JsonValue]:
    """Return all that is on record of a call, but its thread."""
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


class _Place(NamedTuple):
    info: ThreadInfo
    start: int
    line: int


class ExportFile:
    """An export as a source to copy from.

    The file is read through once when it is opened, and a thread when it is asked for.
    Raises ``CorruptThread`` for a file that was cut short or is no export, with the
    line, and ``SchemaMismatch`` for one of a newer version; ``OSError`` as `open` does.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._threads: dict[str, _Place] = {}
        self._scan()
        self._order = sorted(self._threads)

    async def list_threads(
        self, *, prefix: str = "", after: str | None = None, limit: int = 100
    ) -> list[ThreadInfo]:
        first = bisect_left(self._order, prefix)

        if after is not None:
            first = max(first, bisect_right(self._order, after))

        page = self._order[first : first + limit]
        return [self._threads[one].info for one in page if one.startswith(prefix)]

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        if thread_id not in self._threads:
            return None

        messages, extra, _ = await asyncio.to_thread(self._read, thread_id)
        return CheckpointData(messages, extra, [])

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        if thread_id not in self._threads:
            return []

        _, _, calls = await asyncio.to_thread(self._read, thread_id)
        return calls

    def _scan(self) -> None:
        """Find where each thread starts, and that none is cut short."""
        offset, number, ended = 0, 0, False
        messages = calls = 0
        open_thread: str | None = None

        for number, text in self._lines(0):
            kind = text[2 : text.find(b'"', 2)]

            if number == 1:
                self._check_header(text)
            elif kind == b"message":
                messages += 1
            elif kind == b"call":
                calls += 1
            elif kind == b"thread":
                info = self._info(self._parsed(text, number), number)
                open_thread, messages, calls = info.thread_id, 0, 0
                self._threads[info.thread_id] = _Place(info, offset, number)
            elif kind == b"end":
                line = self._parsed(text, number)

                if line != {"end": open_thread, "messages": messages, "calls": calls}:
                    raise self._corrupt(number, "the thread is not whole")
            elif kind == b"threads":
                ended = self._parsed(text, number) == {"threads": len(self._threads)}
            elif kind != b"extra":
                raise self._corrupt(number, "it is no line of an export")

            offset += len(text)

        if not ended:
            raise self._corrupt(number, "the file ends here, before its last line")

    def _read(
        self, thread_id: str
    ) -> tuple[list[Any], dict[str, JsonValue], list[CallRecord]]:
        place = self._threads[thread_id]
        messages: list[Any] = []
        extra: dict[str, JsonValue] = {}
        calls: list[CallRecord] = []

        for number, text in self._lines(place.start, place.line - 1):
            line = self._parsed(text, number)

            if "end" in line:
                break

            if "message" in line:
                messages.append(line["message"])
            elif "extra" in line:
                extra = line["extra"]
            elif "call" in line:
                calls.append(self._call(thread_id, line["call"], number))

        return messages, extra, calls

    def _lines(self, start: int, number: int = 0) -> Iterator[tuple[int, bytes]]:
        with open(self._path, "rb") as file:
            file.seek(start)

            yield from enumerate(file, number + 1)

    def _check_header(self, text: bytes) -> None:
        found = self._parsed(text, 1).get("cpkit_export", "another file")

        if found != EXPORT_VERSION:
            raise SchemaMismatch(self._path, found, EXPORT_VERSION)

    def _parsed(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except ValueError as exc:
            raise self._corrupt(number, f"no JSON: {exc}") from exc

        if not isinstance(line, dict):
            raise self._corrupt(number, "it is no line of an export")

        return line

    def _info(self, line: dict[str, Any], number: int) -> ThreadInfo:
        try:
            return ThreadInfo(
                line["thread"],
                line["version"],
                datetime.fromisoformat(line["created_at"]),
                datetime.fromisoformat(line["updated_at"]),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise self._corrupt(number, f"it is no thread ({exc})") from exc

    def _call(self, thread_id: str, line: dict[str, Any], number: int) -> CallRecord:
        try:
            resolved_at = line["resolved_at"]
            return CallRecord(
                thread_id,
                ToolCall(
                    line["call_id"],
                    line["tool_name"],
                    line["args"],
                    line["idempotency_key"],
                ),
                line["status"],
                line["attempt"],
                datetime.fromisoformat(line["issued_at"]),
                line["result"],
                None if resolved_at is None else datetime.fromisoformat(resolved_at),
                line["erased"],
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise self._corrupt(number, f"it is no call ({exc})") from exc

    def _corrupt(self, number: int, reason: str) -> CorruptThread:
        return CorruptThread("of the export", f"{self._path} line {number}", reason)


def _line(value: dict[str, Any]) -> bytes:
    return _ENCODE(value).encode() + b"\n"
