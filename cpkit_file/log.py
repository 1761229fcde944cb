"""One thread's log: read as it was at one moment, appended to, replaced.

Writers hold the file's lock from before they look until what they wrote is on disk.
Readers hold it only while they look where the log ends. What lies before that point
never changes, because writers only append, and ``delete_thread`` puts another file in
the log's place. So reading itself goes on without the lock.

A reader syncs bytes of which this handle does not know that they are on disk: their
writer may have been killed before it could, and what was shown must survive a power
loss.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from cpkit.driver import Decode, StoredCall
from cpkit.errors import CorruptThread
from cpkit_file import lines
from cpkit_file.files import (
    File,
    FileCache,
    failure,
    opened,
    sync_content,
    sync_names,
    write_all,
)
from cpkit_file.lines import ADD, CALL, SEAL, At, End
from cpkit_file.schema import log_name

__all__ = [
    "Calls",
    "Folder",
    "Log",
    "LogWriter",
    "Replay",
    "locked",
    "reading",
    "replace",
    "torn_path",
]

_logger = logging.getLogger("cpkit_file")

# Few beside the 1,024 that a process may open by default.
FILES_KEPT_OPEN = 128
# Logs whose calls a handle remembers, at some hundred bytes a call.
_LOGS_REMEMBERED = 512
# Ids for listing threads, at some hundred bytes each.
_IDS_REMEMBERED = 100_000
# Bytes that durability=normal leaves unsynced: a first look at a log checks them all.
_UNSYNCED = 1024 * 1024
# What is read of a log's head: nearly every first line, and the longest one.
_HEADS = (256, 4096)
# Fits a processor's cache: larger blocks were measured to take longer.
_BLOCK = 128 * 1024
_DAMAGE = "the bytes do not fit the line's checksum"
# What a search in the middle of the log reads at each step.
_PROBE = 16 * 1024


class Folder:
    """Where a store lies, and what a handle remembers of it.

    Unless ``durable``, appends are not synced one by one. ``ids`` has thread ids by the
    names of their logs, which never change.
    """

    def __init__(self, path: str, *, durable: bool) -> None:
        self.path = path
        self.durable = durable
        self.threads = os.path.join(path, "threads")
        self.claims = os.path.join(path, "claims")
        self.files = FileCache(FILES_KEPT_OPEN)
        self.index = lru_cache(_LOGS_REMEMBERED)(_LogIndex)
        self.ids: dict[str, str] = {}

    def remember(self, thread_id: str) -> str:
        """Return the name of the thread's log, and remember whose log that is."""
        if len(self.ids) >= _IDS_REMEMBERED:
            self.ids.clear()

        name = log_name(thread_id)
        self.ids[name] = thread_id
        return name


class _Place(NamedTuple):
    """A call without its content, and where in the log that is."""

    call: StoredCall
    args: tuple[int, int]
    result: tuple[int, int] | None


class Calls:
    """The calls of a log, learned line by line, in the order of claims."""

    def __init__(self, thread_id: str) -> None:
        self._thread_id = thread_id
        self._places: dict[str, _Place] = {}
        self._attempts: dict[tuple[str, int], str] = {}

    def learn(self, offset: int, line: bytes) -> None:
        """Take in a ``call`` line."""
        facts, start, stop = lines.call_line(line)
        span = (offset + start, stop - start)
        call_id = facts["call_id"]

        if "idempotency_key" not in facts:
            call, args, _ = self._places[call_id]
            call = call._replace(**facts)
            result = None if call.erased else span
            self._places[call_id] = _Place(call, args, result)
            return

        known = {"args": b"{}", "result": None, "resolved_at": None, "erased": False}
        call = StoredCall(thread_id=self._thread_id, **(known | facts))
        self._places[call_id] = _Place(call, span, None)
        self._attempts[call.idempotency_key, call.attempt] = call_id

    def by_id(self, log: Log, call_id: str) -> StoredCall | None:
        place = self._places.get(call_id)
        return None if place is None else _fetch(log, place)

    def by_attempt(self, log: Log, key: str, attempt: int) -> StoredCall | None:
        call_id = self._attempts.get((key, attempt))
        return None if call_id is None else _fetch(log, self._places[call_id])

    def all(self, log: Log) -> list[StoredCall]:
        return [_fetch(log, place) for place in list(self._places.values())]

    def pending(self, log: Log) -> list[StoredCall]:
        """Return the calls that are issued and not erased."""
        return [
            _fetch(log, place)
            for place in self._places.values()
            if place.call.status == "issued" and not place.call.erased
        ]

    def without_content(self) -> list[StoredCall]:
        return [place.call for place in list(self._places.values())]


def _fetch(log: Log, place: _Place) -> StoredCall:
    call, args, result = place

    if call.erased:
        return call

    found = None if result is None else log.read(*result)
    return call._replace(args=log.read(*args), result=found)


class _Tail(NamedTuple):
    """Where intact lines end, where the thread stands there, the last line's seal."""

    end: int = 0
    at: At | None = None
    seal: bytes = b""


class _LogIndex:
    """What a handle remembers of one file, so that it reads only what is new.

    The first line has the thread id and a random word, which no other file has. The
    file is on disk up to ``synced``, and no call beyond that is in the index. ``tail``
    is an end that the log had. Several worker threads may use an index at once.
    """

    def __init__(self, name: str, header: bytes) -> None:
        self.thread_id = lines.thread_of(header)

        if log_name(self.thread_id) != name:
            raise ValueError(f"it is the log of thread {self.thread_id!r}")

        self.synced = 0
        self.tail = _Tail()
        self._lock = threading.Lock()
        self._scanned = len(header)
        self._calls = Calls(self.thread_id)

    def calls(self, log: Log) -> Calls:
        """Return the calls, with those that were added to the log since."""
        with self._lock:
            if self._scanned < log.end:
                log.sync()

                for offset, line in log.lines(self._scanned):
                    if line.startswith(CALL):
                        self._calls.learn(offset, line)

                self._scanned = log.end

        return self._calls


class Log:
    """The intact lines of a locked log, from its start to ``end``.

    ``at`` is where the thread stands, or ``None`` where the log holds no thread. An
    ``end`` of 0 is a log without a first write. ``torn`` counts the bytes after the
    end: of a write that was cut short by a kill or a power loss, never acknowledged.
    """

    index: _LogIndex

    def __init__(self, folder: Folder, name: str, file: File) -> None:
        self.folder = folder
        self.name = name
        self.file = file
        index: _LogIndex | None = file.index

        # Only bytes that were never acknowledged are ever cut off one file.
        if index is None or file.size < index.tail.end:
            index = file.index = self._find_index()

        if index is None or file.size != index.tail.end:
            tail, synced = self._find_tail(file.size)

            if index is not None:
                index.tail, index.synced = tail, max(index.synced, synced)
            elif tail.end:
                raise self.corrupt(0, _DAMAGE)

        if index is not None:
            self.index = index

        self.end, self.at, self.seal = _Tail() if index is None else index.tail
        self.torn = file.size - self.end

    def calls(self) -> Calls:
        return self.index.calls(self) if self.end else Calls("")

    def sync(self, *, always: bool = False) -> None:
        """Return when everything up to ``end`` will survive a power loss.

        With durability=normal only where it is asked for ``always``.
        """
        if (
            (self.folder.durable or always)
            and self.end
            and self.index.synced < self.end
        ):
            sync_content(self.file.fd)
            self.index.synced = self.end

    def created_at(self) -> int:
        """Return when the thread was created: in the log's head, before any payload."""
        size = _HEADS[-1]

        while (found := lines.created_in(self.read(0, min(size, self.end)))) is None:
            if size >= self.end:
                raise self.corrupt(0, "no line says when the thread was created")

            size *= 8

        return found

    def read(self, start: int, length: int) -> bytes:
        """Return the bytes at an offset, all of them."""
        found = os.pread(self.file.fd, length, start)

        if len(found) != length:
            raise self.corrupt(start, "the file ends too early")

        return found

    def blocks(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield whole lines from ``start``, where one begins, in large checked blocks.

        Each with its offset. Raises ``CorruptThread`` for a block that was damaged.
        """
        size = _PROBE  # small at first: a reader of one message stops after it
        seal = self.read(start - SEAL, SEAL) if start else b""
        rest = b""
        position = start

        while position < self.end:
            piece = self.read(position, min(size, self.end - position))
            position += len(piece)
            block = rest + piece
            cut = block.rfind(b"\n") + 1
            block, rest = block[:cut], block[cut:]
            # As much again of a long line, so that it is not copied often.
            size = max(min(2 * size, _BLOCK), len(rest))

            if not block:
                continue

            offset = position - len(rest) - len(block)

            if not lines.follows(seal, block):
                broken = lines.first_broken(seal, block)
                yield offset, block[:broken]
                raise self.corrupt(offset + broken, _DAMAGE)

            seal = block[-SEAL:]
            yield offset, block

        if rest:
            raise self.corrupt(position - len(rest), "the line has no end")

    def lines(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines from ``start``, where one begins, each with its offset."""
        for offset, block in self.blocks(start):
            begin = 0

            while stop := block.find(b"\n", begin) + 1:
                yield offset + begin, block[begin:stop]
                begin = stop

    def start_of(self, position: int) -> tuple[int, int]:
        """Return where a line at or shortly before a message starts.

        And the version before that line. By halving: each line has its version.
        """
        low, high = 0, self.end
        version = 0

        while high - low > _PROBE:
            middle = (low + high) // 2
            stop = self._next_line(middle, high)

            if stop == high:
                high = middle
                continue

            at = self._at(stop)
            reached = 0 if at is None else at.version

            if reached <= position:
                low, version = stop, reached
            else:
                high = middle

        return low, version

    def corrupt(self, offset: int, reason: str) -> CorruptThread:
        """Return the error for the line at an offset."""
        number = 1
        position = 0

        while piece := os.pread(self.file.fd, min(_BLOCK, offset - position), position):
            number += piece.count(b"\n")
            position += len(piece)

        thread_id = self.folder.ids.get(self.name, "?")
        return CorruptThread(thread_id, f"{self.file.path}, line {number}", reason)

    def _find_index(self) -> _LogIndex | None:
        """Read the first line; return ``None`` where it is not intact."""
        for size in _HEADS:
            head = os.pread(self.file.fd, size, 0)
            header = head[: head.find(b"\n") + 1]

            if header and lines.follows(b"", header):
                try:
                    return self.folder.index(self.name, header)
                except ValueError as exc:
                    raise self.corrupt(0, str(exc)) from exc

        return None

    def _find_tail(self, size: int) -> tuple[_Tail, int]:
        """Return the last intact line's end, and up to where the log was synced before.

        A line is intact if it and the bytes that were unsynced before it fit their
        checksums. What follows the last one is torn, or else damaged.
        """
        low, data = size, b""  # the bytes from low on
        stop = size  # lines from here on are not intact
        tail, synced = _Tail(), 0

        while stop:
            end = data.rfind(b"\n", 0, max(0, stop - low)) + 1
            start = data.rfind(b"\n", 0, max(0, end - 1)) + 1
            first = -1

            if end and (start >= SEAL or not low):
                seal, line = data[max(0, start - SEAL) : start], data[start:end]

                if not lines.follows(seal, line):
                    stop = low + start
                    continue

                found = self._parsed(low + start, line)
                first = start - found.unsynced

                if first >= SEAL or not low:
                    seal, batch = data[max(0, first - SEAL) : first], data[first:start]

                    if not batch or lines.follows(seal, batch):
                        tail = _Tail(low + end, found.at, line[-SEAL:])
                        synced = low + first
                        break

                    stop = low + first + lines.first_broken(seal, batch)
                    continue

            if not low:
                break

            more = min(low, max(2048, len(data)) if first < 0 else SEAL - first)
            low -= more
            data = self.read(low, more) + data

        rest = self.read(tail.end, size - tail.end)

        if rest and not lines.is_torn(tail.seal, rest, tail.end):
            raise self.corrupt(tail.end, _DAMAGE)

        return tail, synced

    def _at(self, end: int) -> At | None:
        """Return where the thread stands after the line that ends at an offset."""
        start = max(0, end - 96)
        return self._parsed(end - 1, self.read(start, end - start)).at

    def _parsed(self, offset: int, line: bytes) -> End:
        try:
            return lines.end_of(line)
        except ValueError as exc:
            raise self.corrupt(offset, str(exc)) from exc

    def _next_line(self, start: int, stop: int) -> int:
        """Return where the next line begins after an offset, or ``stop``."""
        while start < stop:
            piece = self.read(start, min(_PROBE, stop - start))

            if cut := piece.find(b"\n") + 1:
                return start + cut

            start += len(piece)

        return stop


class Replay:
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
        self.check(len(found), stop - first)
        return found

    def check(self, found: int, expected: int) -> None:
        if found != expected:
            reason = f"{found} messages are in the log, not {expected}"
            raise self._log.corrupt(self._log.end - 1, reason)

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
                elif block.startswith(b'{"extra":', begin):
                    self.extra.update(lines.texts(block[begin:stop])[1])

                begin = stop


@contextmanager
def reading(
    folder: Folder, name: str, *, listing: bool = False
) -> Iterator[Log | None]:
    """Open a log as it is at this moment; ``None`` where it has no first write.

    With ``listing`` the log does not stay open and is not synced, so that a power loss
    may take back what is seen.
    """
    try:
        file = folder.files.shared(f"{folder.threads}/{name}")
    except FileNotFoundError:
        file = None

    if file is None:
        yield None
        return

    try:
        log = Log(folder, name, file)
        file.unlock()

        if not listing:
            log.sync()

        yield log if log.end else None
    except BaseException:
        file.close()
        raise

    if listing:
        os.close(file.fd)
    else:
        folder.files.keep(file)


@contextmanager
def locked(folder: Folder, thread_id: str, *, create: bool = True) -> Iterator[Log]:
    """Lock a thread's log for writing, and set a torn write aside.

    A log that stays empty is removed again.
    """
    name = folder.remember(thread_id)
    file = folder.files.exclusive(f"{folder.threads}/{name}", create=create)
    keep = False

    try:
        log = Log(folder, name, file)

        if log.torn:
            _set_aside(log)

        yield log
        keep = True
    finally:
        try:
            status = os.fstat(file.fd)

            # After `replace` the name is another file's.
            if not status.st_size and status.st_nlink:
                os.unlink(file.path)

            keep = keep and bool(status.st_size and status.st_nlink)
            file.unlock()
        except BaseException:
            file.close()
            raise

        if keep:
            folder.files.keep(file)
        else:
            os.close(file.fd)


def replace(log: Log, thread_id: str, kept: Iterable[tuple[bytes, At | None]]) -> None:
    """Put a log with these lines in the log's place; without lines it is removed.

    The new file is locked from before it can be found until its name is on disk, so
    that no process builds on a replacement that a power loss could undo.
    """
    folder = log.folder
    path = log.file.path
    draft = f"{path}.tmp"
    header = lines.seal(b"", lines.header(thread_id, secrets.token_hex(8)), None)
    written = [header]

    for content, at in kept:
        written.append(lines.seal(written[-1][-SEAL:], content, at))

    # Left by a process that died here; no other process writes it without the lock.
    with suppress(FileNotFoundError):
        os.unlink(draft)

    file = folder.files.exclusive(draft, create=True)

    try:
        write_all(file.fd, b"".join(written))
        sync_content(file.fd)
        os.rename(draft, path)

        try:
            sync_names(folder.threads)

            if len(written) == 1:
                os.unlink(path)
        except OSError as exc:
            raise failure(exc, unknown=True) from exc
    finally:
        file.close()

    folder.index(log.name, header).synced = sum(map(len, written))


class LogWriter:
    """A locked log, and lines for its end, which get there together or not at all.

    ``at`` is where the thread stands after the lines.
    """

    def __init__(self, log: Log, thread_id: str) -> None:
        self.log = log
        self.at = log.at
        self.now = max(time.time_ns() // 1000, log.at.updated_at if log.at else 0)
        self._thread_id = thread_id
        self._changed: dict[str, StoredCall] = {}
        self._lines: list[bytes] = []
        self._end, self._seal = log.end, log.seal

    @property
    def version(self) -> int:
        return 0 if self.at is None else self.at.version

    def find(self, call_id: str) -> StoredCall | None:
        """Return a call of the thread."""
        return self._changed.get(call_id) or self.log.calls().by_id(self.log, call_id)

    def change(self, content: bytes, messages: int = 0) -> None:
        """Add the line of an operation that changes the thread."""
        if self.at is None:
            self._add(lines.created(self.now), None)

        self.at = At(self.version + messages, self.now)
        self._add(content, self.at)

    def put(self, call: StoredCall) -> None:
        """Add the line of a claim, or of an outcome."""
        self._changed[call.call_id] = call

        if call.status == "issued":
            self.change(lines.issued(call))
        elif call.erased:  # its outcome does not change the thread
            self._add(lines.resolved(call), self.at)
        else:
            self.change(lines.resolved(call))

    def write(self) -> None:
        """Write the lines, for `sync` to put them on disk.

        Both raise ``StoreFailure`` where that fails, with the log as it was before.
        """
        if not self._lines:
            self.log.sync()
            return

        # The process that created the file may have died before it synced its name.
        if self.log.at is None and self.log.folder.durable:
            sync_names(self.log.folder.threads)

        try:
            write_all(self.log.file.fd, b"".join(self._lines))
        except OSError as exc:
            self._take_back(exc, unknown=False)

    def sync(self) -> None:
        """Put what was written on disk."""
        if not self._lines:
            return

        log = self.log

        if log.folder.durable or self._end - log.index.synced > _UNSYNCED:
            try:
                sync_content(log.file.fd)
            except OSError as exc:  # it may be on disk all the same
                self._take_back(exc, unknown=True)

            log.index.synced = self._end

        log.index.tail = _Tail(self._end, self.at, self._seal)
        log.file.index = log.index

    def _add(self, content: bytes, at: At | None) -> None:
        log = self.log

        if not self._end:
            header = lines.header(self._thread_id, secrets.token_hex(8))
            self._append(lines.seal(b"", header, None))
            log.index = log.folder.index(log.name, self._lines[0])

        unsynced = self._end - log.index.synced
        self._append(lines.seal(self._seal, content, at, unsynced))

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._end += len(line)
        self._seal = line[-SEAL:]

    def _take_back(self, cause: OSError, *, unknown: bool) -> None:
        """Cut off what was written, and raise the failure."""
        try:
            os.ftruncate(self.log.file.fd, self.log.end)
            sync_content(self.log.file.fd)
        except OSError:
            unknown = True

        raise failure(cause, unknown=unknown) from cause


def torn_path(log: Log) -> str:
    """Return the file that keeps torn writes of the log for a person to see."""
    return f"{log.file.path}.torn"


def _set_aside(log: Log) -> None:
    """Move a torn write out of the log; twice where a crash comes between."""
    path = torn_path(log)

    with opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as fd:
        write_all(fd, log.read(log.end, log.torn) + b"\n")
        sync_content(fd)

    sync_names(log.folder.threads)
    os.ftruncate(log.file.fd, log.end)
    sync_content(log.file.fd)
    message = "%s: %d bytes of a write that was never acknowledged are now in %s"
    _logger.warning(message, log.file.path, log.torn, path)
