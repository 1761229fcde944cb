"""The operations that read, each one trip to a worker thread.

A log is read up to where it ended when it was locked; see `cpkit_file.log`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from cpkit.driver.codec import Codec, from_micros
from cpkit.driver.ids import span
from cpkit.driver.writes import StoredCall
from cpkit.errors import CorruptThread
from cpkit.records import CheckpointData, ThreadInfo
from cpkit_file import lines
from cpkit_file.folder import Folder
from cpkit_file.index import Calls
from cpkit_file.lines import ADD, CALL, EXTRA, KINDS
from cpkit_file.log import Log, reading
from cpkit_file.names import LOG_NAME

__all__ = ["calls_of", "list_threads", "load", "read_range"]

T = TypeVar("T")


def load(folder: Folder, codec: Codec[T], thread_id: str) -> CheckpointData[T] | None:
    with reading(folder, folder.log_name(thread_id)) as log:
        if log is None or log.at is None:
            return None

        replay = _Replay(log, 0, 0)
        messages = _decoded(log, codec, replay.bodies(), 0, log.at.version)
        return CheckpointData(
            messages,
            codec.extra(replay.extra.items(), thread_id),
            [codec.record(call) for call in replay.calls.all(log, pending=True)],
        )


def read_range(
    folder: Folder, codec: Codec[T], thread_id: str, start: int, stop: int | None
) -> list[T]:
    with reading(folder, folder.log_name(thread_id)) as log:
        if log is None or log.at is None:
            return []

        first, end = span(start, stop, log.at.version)

        if first == end:
            return []

        offset, version = log.start_of(first)
        bodies = _Replay(log, offset, version).bodies()
        wanted = islice(bodies, first - version, end - version)
        return _decoded(log, codec, wanted, first, end)


def list_threads(
    folder: Folder, prefix: str, after: str | None, limit: int
) -> list[ThreadInfo]:
    """Return a page of threads, from the first and last lines of their logs."""
    names = {
        thread_id: name
        for name in filter(LOG_NAME.fullmatch, os.listdir(folder.threads))
        if (thread_id := _thread_of(folder, name)) is not None
        and thread_id.startswith(prefix)
        and (after is None or thread_id > after)
    }
    found: list[ThreadInfo] = []

    for thread_id in sorted(names):
        if len(found) == limit:
            break

        with reading(folder, names[thread_id], settled=False) as log:
            if log is not None and log.at is not None:
                created_at = from_micros(_created_at(log))
                updated_at = from_micros(log.at.updated_at)
                found.append(
                    ThreadInfo(thread_id, log.at.version, created_at, updated_at)
                )

    return found


def calls_of(folder: Folder, thread_id: str) -> list[StoredCall]:
    """Return the thread's calls in the order of claims."""
    with reading(folder, folder.log_name(thread_id)) as log:
        return [] if log is None else log.index.catch_up(log).all(log)


class _Replay:
    """One pass over a log: its messages as they come, and what it says beside them."""

    def __init__(self, log: Log, offset: int, version: int) -> None:
        self.extra: dict[bytes, bytes] = {}
        self.calls = Calls(log.thread_id)
        self._log = log
        self._offset = offset
        self._version = version

    def bodies(self) -> Iterator[bytes]:
        """Yield the messages from the offset on; the rest is complete at the end."""
        version = self._version
        end = lines.end_of_add(version + 1)

        for offset, block in self._log.blocks(self._offset):
            begin = 0

            while (stop := block.find(b"\n", begin)) >= 0:
                cut = stop - len(end) - lines.REST_OF_END

                # Nearly every line is one message, whose end has to be just here.
                if (
                    cut > begin
                    and block.startswith(end, cut)
                    and block.startswith(ADD, begin)
                    and block[cut - 1] != lines.BRACKET
                ):
                    yield block[begin + len(ADD) : cut]
                    version += 1
                    end = lines.end_of_add(version + 1)
                elif texts := self._other(offset + begin, block[begin:stop], version):
                    yield from texts
                    version += len(texts)
                    end = lines.end_of_add(version + 1)

                begin = stop + 1

    def _other(self, offset: int, line: bytes, version: int) -> list[bytes]:
        """Take in a line of any kind; return the messages in it."""
        try:
            if line.startswith(ADD):
                texts, reached = lines.messages(line)

                if reached != version + len(texts):
                    raise ValueError(f"{version + len(texts)} is due, not {reached}")

                return texts

            if line.startswith(CALL):
                self.calls.learn(offset, line)
            elif line.startswith(EXTRA):
                self.extra.update(lines.pairs(line))
            elif line[: len(ADD)] not in KINDS:
                raise ValueError("the line is none of ours")
        except ValueError as exc:
            raise self._log.corrupt(offset, str(exc)) from exc

        return []


def _decoded(
    log: Log, codec: Codec[T], bodies: Iterable[bytes], first: int, end: int
) -> list[T]:
    """Decode messages; damage is reported with its line."""
    try:
        found = codec.messages(bodies, log.thread_id, first)
    except CorruptThread as exc:
        if log.path in exc.where:
            raise

        raise _located(log, codec, exc) from exc

    if len(found) != end - first:
        raise CorruptThread(log.thread_id, log.path, "messages are missing")

    return found


def _located(log: Log, codec: Codec[T], exc: CorruptThread) -> CorruptThread:
    """Find the line of the first message that cannot be decoded."""
    for offset, line in log.lines(0):
        if line.startswith(ADD):
            texts, _ = lines.messages(line)

            try:
                codec.messages(texts, log.thread_id)
            except CorruptThread:
                return log.corrupt(offset, f"{exc.where}: {exc.reason}")

    return exc


def _thread_of(folder: Folder, name: str) -> str | None:
    """Return whose log a file is; ``None`` where it was never written to."""
    known = folder.ids.get(name)

    if known is not None:
        return known

    with reading(folder, name, settled=False) as log:
        if log is None:
            return None

        folder.remember(name, log.thread_id)
        return log.thread_id


def _created_at(log: Log) -> int:
    """Return when the thread's life began: in the log's head, before any payload."""
    size = 4096

    while True:
        created_at = lines.created_in(log.read(0, min(size, log.end)))

        if created_at is not None:
            return created_at

        if size >= log.end:
            raise log.corrupt(0, "no line says when the thread was created")

        size *= 8
