"""Reads, in a worker thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

from cpkit.driver import Decode, Snapshot, StoredCall, StoredDump, from_micros, span
from cpkit.records import ThreadInfo
from cpkit_file import lines
from cpkit_file.files import locked_file
from cpkit_file.index import Calls, Folder
from cpkit_file.lines import ADD, CALL, EXTRA
from cpkit_file.log import Log
from cpkit_file.schema import LOG_NAME

__all__ = ["calls", "dump", "messages", "reading", "snapshot", "thread_of", "threads"]


@contextmanager
def reading(folder: Folder, name: str, *, sync: bool = True) -> Iterator[Log | None]:
    """Open a log as it is at this moment; ``None`` where it has no first write.

    Without ``sync`` a power loss may take back what is seen.
    """
    log: Log | None = None

    with ExitStack() as stack:
        try:
            opening = locked_file(f"{folder.threads}/{name}", os.O_RDONLY, shared=True)
            file = stack.enter_context(opening)
        except FileNotFoundError:
            pass  # the log is absent
        else:
            log = Log(folder, name, file)
            file.unlock()

            if sync:
                log.sync()

        yield log if log is not None and log.end else None


class _Replay:
    """One pass over a log: its messages one by one, and its extra and calls."""

    def __init__(self, log: Log, offset: int = 0, version: int = 0) -> None:
        self.extra: dict[bytes, bytes] = {}
        self.calls = Calls(log.index.thread_id)
        self._log = log
        self._offset = offset
        self._version = version

    def decoded(self, decode: Decode, first: int, stop: int) -> list[Any]:
        """Decode messages.

        Where ``stop`` is the thread's version, ``extra`` and ``calls`` are set too.
        """
        assert self._log.at is not None
        last = None if stop == self._log.at.version else stop - self._version
        found = decode(islice(self.bodies(), first - self._version, last), first)

        if len(found) != stop - first:
            reason = f"{len(found)} messages are in the log, not {stop - first}"
            raise self._log.corrupt(self._log.end - 1, reason)

        return found

    def bodies(self) -> Iterator[bytes]:
        """Yield the messages from the offset on, and fill ``extra`` and ``calls``."""
        for offset, block in self._log.blocks(self._offset):
            begin = 0

            while stop := block.find(b"\n", begin) + 1:
                # Nearly every line is one message; one that is an array is ambiguous.
                if block.startswith(ADD, begin):
                    cut = block.rfind(lines.AT, begin, stop)

                    if block[cut - 1] != lines.BRACKET:
                        yield block[begin + len(ADD) : cut]
                    else:
                        bodies, items = lines.texts(block[begin:stop])
                        self.extra.update(items)
                        yield from bodies
                elif block.startswith(CALL, begin):
                    self.calls.learn(offset + begin, block[begin:stop])
                elif block.startswith(EXTRA, begin):
                    self.extra.update(lines.texts(block[begin:stop])[1])

                begin = stop


def snapshot(folder: Folder, thread_id: str, decode: Decode) -> Snapshot | None:
    with reading(folder, folder.remember(thread_id)) as log:
        if log is None or log.at is None:
            return None

        replay = _Replay(log)
        found = replay.decoded(decode, 0, log.at.version)
        pending = [
            call
            for call in replay.calls.all(log.read)
            if call.status == "issued" and not call.erased
        ]
        return Snapshot(found, list(replay.extra.items()), pending)


def messages(
    folder: Folder, thread_id: str, start: int, stop: int | None, decode: Decode
) -> list[Any]:
    with reading(folder, folder.remember(thread_id)) as log:
        if log is None or log.at is None:
            return []

        first, end = span(start, stop, log.at.version)

        if first == end:
            return []

        return _Replay(log, *log.start_of(first)).decoded(decode, first, end)


def calls(folder: Folder, thread_id: str) -> list[StoredCall]:
    with reading(folder, folder.remember(thread_id)) as log:
        return [] if log is None else log.calls().all(log.read)


def dump(folder: Folder, thread_id: str) -> StoredDump | None:
    with reading(folder, folder.remember(thread_id)) as log:
        if log is None:
            return None

        if log.at is None:
            found = log.calls().all(log.read)
            return StoredDump([], [], found, None, None) if found else None

        replay = _Replay(log)
        bodies = replay.decoded(lambda rows, _: list(rows), 0, log.at.version)
        items = list(replay.extra.items())
        found = replay.calls.all(log.read)
        return StoredDump(bodies, items, found, log.created_at(), log.at.updated_at)


def threads(
    folder: Folder, prefix: str, after: str | None, limit: int, erased: bool
) -> list[ThreadInfo]:
    """Return a page of threads, from the first and last lines of their logs."""
    names = {
        thread_id: name
        for name in filter(LOG_NAME.fullmatch, os.listdir(folder.threads))
        if (thread_id := thread_of(folder, name)) is not None
        and thread_id.startswith(prefix)
        and (after is None or thread_id > after)
    }
    infos = (
        _info(folder, thread_id, names[thread_id], erased)
        for thread_id in sorted(names)
    )
    return list(islice((info for info in infos if info is not None), limit))


def _info(folder: Folder, thread_id: str, name: str, erased: bool) -> ThreadInfo | None:
    with reading(folder, name, sync=False) as log:
        if log is None:
            return None

        if log.at is not None:
            version, updated_at = log.at
            created_at = log.created_at()
        else:
            found = log.calls().without_content() if erased else []

            if not found:
                return None

            version = 0
            created_at = min(call.issued_at for call in found)
            updated_at = max(
                max(call.issued_at, call.resolved_at or 0) for call in found
            )

        times = from_micros(created_at), from_micros(updated_at)
        return ThreadInfo(thread_id, version, *times)


def thread_of(folder: Folder, name: str) -> str | None:
    """Return whose log a file is; ``None`` where it was never written to."""
    known = folder.ids.get(name)

    if known is not None:
        return known

    with reading(folder, name, sync=False) as log:
        if log is None:
            return None

        folder.remember(log.index.thread_id)
        return log.index.thread_id
