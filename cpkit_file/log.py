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
from collections.abc import Iterator
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
from cpkit_file.lines import ADD, CALL, EXTRA, KINDS, TAIL_BYTES, At
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
]

_logger = logging.getLogger("cpkit_file")

# Few beside the 1,024 that a process may open by default.
FILES_KEPT_OPEN = 128
# Logs whose calls a handle remembers, at some hundred bytes a call.
_LOGS_REMEMBERED = 512
# Ids for listing threads, at some hundred bytes each.
_IDS_REMEMBERED = 100_000
# More than a first line takes: an id of 512 control characters is 3,072 bytes of JSON.
_HEADER_BYTES = 4096
# Fits a processor's cache: larger blocks were measured to take longer.
_BLOCK = 128 * 1024
# What a search in the middle of the log reads at each step.
_PROBE = 16 * 1024


class Folder:
    """Where a store lies, and what a handle remembers of it.

    Unless ``durable``, appends are not synced. ``ids`` has thread ids by the names of
    their logs, which never change.
    """

    def __init__(self, path: str, *, durable: bool) -> None:
        self.path = path
        self.durable = durable
        self.threads = os.path.join(path, "threads")
        self.claims = os.path.join(path, "claims")
        self.files = FileCache(FILES_KEPT_OPEN)
        self.index = lru_cache(_LOGS_REMEMBERED)(_LogIndex)
        self.ids: dict[str, str] = {}

    def log_path(self, name: str) -> str:
        return f"{self.threads}/{name}"

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
        """Take in a ``call`` line; raises ``ValueError`` where it is damaged."""
        facts, start, stop = lines.call_line(line)
        span = (offset + start, stop - start)

        try:
            if "idempotency_key" in facts:
                self._add(facts, span)
            else:
                call, args, _ = self._places[facts["call_id"]]
                call = call._replace(
                    status=facts["status"], resolved_at=facts["resolved_at"]
                )
                result = None if call.erased else span
                self._places[call.call_id] = _Place(call, args, result)
        except (KeyError, TypeError) as exc:
            raise ValueError(f"the call lacks {exc}") from exc

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

    def _add(self, facts: dict[str, Any], span: tuple[int, int]) -> None:
        call = StoredCall(
            self._thread_id,
            facts["call_id"],
            facts["tool_name"],
            b"{}",
            facts["idempotency_key"],
            facts["status"],
            facts["attempt"],
            facts["issued_at"],
            None,
            facts.get("resolved_at"),
            facts.get("erased", False),
        )
        self._places[call.call_id] = _Place(call, span, None)
        self._attempts[call.idempotency_key, call.attempt] = call.call_id


def _fetch(log: Log, place: _Place) -> StoredCall:
    call, args, result = place

    if call.erased:
        return call

    found = None if result is None else log.read(*result)
    return call._replace(args=log.read(*args), result=found)


class _LogIndex:
    """What a handle remembers of one file, so that it reads only what is new.

    The first line has the thread id and a random word, which no other file has. The
    file is on disk up to ``synced``, and no call beyond that is in the index. ``tail``
    is an end that the log had, and where the thread stood there. Several worker threads
    may use an index at once.

    Raises ``ValueError`` for a damaged first line, or one of another thread.
    """

    def __init__(self, name: str, header: bytes) -> None:
        self.thread_id = lines.thread_of(header)

        if log_name(self.thread_id) != name:
            raise ValueError(f"it is the log of thread {self.thread_id!r}")

        self.synced = 0
        self.tail: tuple[int, At | None] = (0, None)
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
                        with log.checked(offset):
                            self._calls.learn(offset, line)
                    elif line[: len(ADD)] not in KINDS:
                        # It may have been a call, so every key could be concerned.
                        raise log.corrupt(offset, "the line's kind is unknown")

                self._scanned = log.end

        return self._calls


class Log:
    """The whole lines of a locked log, from its start to ``end``.

    ``at`` is where the thread stands, or ``None`` where the log holds no thread. An
    ``end`` of 0 is a log that was never written to. ``torn`` counts the bytes after
    the last newline: the line of a writer that was killed, never acknowledged.
    """

    index: _LogIndex
    end: int = 0
    at: At | None = None

    def __init__(self, folder: Folder, name: str, file: File) -> None:
        self.folder = folder
        self.name = name
        self.file = file

        # A file that was truncated since is looked at again.
        if file.index is None or file.size < file.index.tail[0]:
            file.index = self._find_index()

        if file.index is not None:
            self.index = file.index
            self.end, self.at = self._find_end(file.size)

        self.torn = file.size - self.end

    @property
    def path(self) -> str:
        return self.file.path

    def calls(self) -> Calls:
        return self.index.calls(self) if self.end else Calls("")

    def sync(self) -> None:
        """Return when everything up to ``end`` will survive a power loss."""
        if self.end and self.index.synced < self.end:
            if self.folder.durable:
                sync_content(self.file.fd)

            self.index.synced = self.end

    def created_at(self) -> int:
        """Return when the thread was created: in the log's head, before any payload."""
        size = _HEADER_BYTES

        while True:
            created_at = lines.created_in(self.read(0, min(size, self.end)))

            if created_at is not None:
                return created_at

            if size >= self.end:
                raise self.corrupt(0, "no line says when the thread was created")

            size *= 8

    def read(self, start: int, length: int) -> bytes:
        """Return the bytes at an offset, all of them."""
        found = os.pread(self.file.fd, length, start)

        if len(found) != length:
            raise self.corrupt(start, "the file ends too early")

        return found

    def blocks(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes from ``start``, where a line begins, in large blocks.

        A line begins at the offset of each block too. What follows the last newline of
        a block comes again, at the start of the next.
        """
        size = _PROBE  # small at first: a reader of one message stops after it
        rest = b""
        position = start

        while position < self.end:
            piece = self.read(position, min(size, self.end - position))
            position += len(piece)
            block = rest + piece
            yield position - len(block), block
            rest = block[block.rfind(b"\n") + 1 :]
            # As much again of a long line, so that it is not copied often.
            size = max(min(2 * size, _BLOCK), len(rest))

    def lines(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines from ``start``, where one begins, each with its offset."""
        for offset, block in self.blocks(start):
            begin = 0

            while (stop := block.find(b"\n", begin)) >= 0:
                yield offset + begin, block[begin:stop]
                begin = stop + 1

    def start_of(self, position: int) -> tuple[int, int]:
        """Return where a line at or shortly before a message starts.

        And the version before that line. By halving: each line has its version.
        """
        low, high = 0, self.end
        version = 0

        while high - low > _PROBE:
            middle = (low + high) // 2
            newline = self._newline_from(middle, high)

            if newline < 0:
                high = middle
                continue

            at = self._at_line_end(newline + 1)
            reached = 0 if at is None else at.version

            if reached <= position:
                low, version = newline + 1, reached
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
        return CorruptThread(thread_id, f"{self.path}, line {number}", reason)

    @contextmanager
    def checked(self, offset: int) -> Iterator[None]:
        """Turn the ``ValueError`` of a damaged line at an offset into its error."""
        try:
            yield
        except ValueError as exc:
            raise self.corrupt(offset, str(exc)) from exc

    def _find_index(self) -> _LogIndex | None:
        if not self.file.size:
            return None

        head = os.pread(self.file.fd, _HEADER_BYTES, 0)
        cut = head.find(b"\n") + 1

        if cut:
            with self.checked(0):
                return self.folder.index(self.name, head[:cut])

        if self.file.size > _HEADER_BYTES:
            raise self.corrupt(0, "the first line is not a log's")

        return None

    def _find_end(self, size: int) -> tuple[int, At | None]:
        """Return the offset after the last newline, and the ``at`` of its line."""
        known = self.index.tail

        # Only bytes that were never acknowledged are ever cut off one file.
        if known[0] == size:
            return known

        stop, length, cut = size, TAIL_BYTES, -1

        while cut < 0:
            start = max(0, stop - length)
            cut = self.read(start, stop - start).rfind(b"\n")
            stop, length = start, _BLOCK

        end = stop + cut + 1
        self.index.tail = end, self._at_line_end(end)
        return self.index.tail

    def _at_line_end(self, end: int) -> At | None:
        start = max(0, end - TAIL_BYTES)

        with self.checked(end - 1):
            return lines.at_end_of(self.read(start, end - 1 - start))

    def _newline_from(self, start: int, stop: int) -> int:
        """Return where the first newline in a range is, or -1."""
        while start < stop:
            piece = self.read(start, min(_PROBE, stop - start))
            cut = piece.find(b"\n")

            if cut >= 0:
                return start + cut

            start += len(piece)

        return -1


class Replay:
    """One pass over a log: its messages one by one, and its extra and calls."""

    def __init__(self, log: Log, offset: int = 0, version: int = 0) -> None:
        self.extra: dict[bytes, bytes] = {}
        self.calls = Calls(log.index.thread_id)
        self._log = log
        self._offset = offset
        self._version = version

    def decoded(self, decode: Decode, first: int, stop: int) -> list[Any]:
        """Decode messages; the error for a damaged one names its line.

        Where ``stop`` is the thread's version, ``extra`` and ``calls`` are set too.
        """
        assert self._log.at is not None
        last = None if stop == self._log.at.version else stop - self._version
        wanted = islice(self.bodies(), first - self._version, last)

        try:
            found = decode(wanted, first)
        except CorruptThread as exc:
            raise self._with_line(exc, decode) from exc

        if len(found) != stop - first:
            raise self._log.corrupt(self._log.end - 1, "messages are missing")

        return found

    def bodies(self) -> Iterator[bytes]:
        """Yield the messages from the offset on, and fill ``extra`` and ``calls``."""
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
                else:
                    with self._log.checked(offset + begin):
                        texts = self._other(offset + begin, block[begin:stop], version)

                    if texts:
                        yield from texts
                        version += len(texts)
                        end = lines.end_of_add(version + 1)

                begin = stop + 1

    def _other(self, offset: int, line: bytes, version: int) -> list[bytes]:
        """Take in a line of any kind; return the messages in it."""
        if line.startswith(ADD):
            texts, items, reached = lines.messages(line)

            if reached != version + len(texts):
                raise ValueError(
                    f"its version is {reached}, not {version + len(texts)}"
                )

            self.extra.update(items)
            return texts

        if line.startswith(CALL):
            self.calls.learn(offset, line)
        elif line.startswith(EXTRA):
            self.extra.update(lines.pairs(line))
        elif line[: len(ADD)] not in KINDS:
            raise ValueError("the line's kind is unknown")

        return []

    def _with_line(self, exc: CorruptThread, decode: Decode) -> CorruptThread:
        """Find the line of the first message that cannot be decoded."""
        if self._log.path in exc.where:
            return exc

        for offset, line in self._log.lines(0):
            if line.startswith(ADD):
                try:
                    decode(lines.messages(line)[0], 0)
                except CorruptThread as one:
                    return self._log.corrupt(offset, one.reason)

        return exc


@contextmanager
def reading(
    folder: Folder, name: str, *, listing: bool = False
) -> Iterator[Log | None]:
    """Open a log as it is at this moment; ``None`` where there is none.

    With ``listing`` the log does not stay open and is not synced, so that a power loss
    may take back what is seen.
    """
    try:
        file = folder.files.shared(folder.log_path(name))
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
    """Lock a thread's log for writing, and set a torn line aside.

    A log that stays empty is removed again.
    """
    name = folder.remember(thread_id)
    file = folder.files.exclusive(folder.log_path(name), create=create)
    keep = False

    try:
        log = Log(folder, name, file)

        if log.torn:
            _set_aside(log)

        yield log
        keep = True
    finally:
        try:
            # Another file is in its place after `replace`.
            if file.index is None and not os.fstat(file.fd).st_size:
                _unlink_own(file)
                keep = False

            keep = keep and os.fstat(file.fd).st_nlink > 0
            file.unlock()
        except BaseException:
            file.close()
            raise

        if keep:
            folder.files.keep(file)
        else:
            os.close(file.fd)


def replace(log: Log, thread_id: str, kept: list[bytes]) -> None:
    """Put a log with these lines in the log's place; without lines it is removed.

    The new file is locked from before it can be found until its name is on disk, so
    that no process builds on a replacement that a power loss could undo.
    """
    folder = log.folder
    draft = f"{log.path}.tmp"
    header = lines.header(thread_id, secrets.token_hex(8))
    data = b"".join([header, *kept])

    # Left by a process that died here; no other process writes it without the lock.
    with suppress(FileNotFoundError):
        os.unlink(draft)

    file = folder.files.exclusive(draft, create=True)

    try:
        write_all(file.fd, data)
        sync_content(file.fd)
        os.rename(draft, log.path)

        try:
            sync_names(folder.threads)

            if not kept:
                os.unlink(log.path)
        except OSError as exc:
            raise failure(exc, unknown=True) from exc
    finally:
        file.close()

    folder.index(log.name, header).synced = len(data)


class LogWriter:
    """A locked log, and lines for its end, which get there together or not at all.

    ``at`` is where the thread stands after the lines.
    """

    def __init__(self, log: Log, thread_id: str) -> None:
        self.log = log
        self.thread_id = thread_id
        self.at = log.at
        self.now = time.time_ns() // 1000
        self._changed: dict[str, StoredCall] = {}
        self._lines: list[bytes] = []
        self._end = 0

        if self.at is not None:
            self.now = max(self.now, self.at.updated_at)

    @property
    def version(self) -> int:
        return 0 if self.at is None else self.at.version

    def find(self, call_id: str) -> StoredCall | None:
        """Return a call of the thread."""
        return self._changed.get(call_id) or self.log.calls().by_id(self.log, call_id)

    def advance(self, messages: int = 0) -> At:
        """Return where the thread stands after an operation that changes it."""
        if self.at is None:
            self._lines.append(lines.created(At(0, self.now)))

        self.at = At(self.version + messages, self.now)
        return self.at

    def add(self, line: bytes) -> None:
        self._lines.append(line)

    def add_call(self, call: StoredCall, line: bytes) -> None:
        self._changed[call.call_id] = call
        self._lines.append(line)

    def write(self) -> None:
        """Write the lines, for `sync` to put them on disk.

        Both raise ``StoreFailure`` where that fails, with the log as it was before.
        """
        log = self.log

        if not self._lines:
            log.sync()
            return

        folder = log.folder

        # The process that created the file may have died before it synced its name.
        if log.at is None and folder.durable:
            sync_names(folder.threads)

        if not log.end:
            header = lines.header(self.thread_id, secrets.token_hex(8))
            log.index = folder.index(log.name, header)
            self._lines.insert(0, header)

        data = b"".join(self._lines)
        self._end = log.end + len(data)

        try:
            write_all(log.file.fd, data)
        except OSError as exc:
            self._take_back(exc, unknown=False)

    def sync(self) -> None:
        """Put what was written on disk."""
        if not self._lines:
            return

        log = self.log

        try:
            if log.folder.durable:
                sync_content(log.file.fd)
        except OSError as exc:  # it may be on disk all the same
            self._take_back(exc, unknown=True)

        log.index.synced = self._end
        log.index.tail = self._end, self.at
        log.file.index = log.index

    def _take_back(self, cause: OSError, *, unknown: bool) -> None:
        """Cut off what was written, and raise the failure."""
        try:
            os.ftruncate(self.log.file.fd, self.log.end)

            if self.log.folder.durable:
                sync_content(self.log.file.fd)
        except OSError:
            unknown = True

        raise failure(cause, unknown=unknown) from cause


def torn_path(log: Log) -> str:
    """Return the file in which torn lines of the log are kept for a person to see."""
    return f"{log.path}.torn"


def _set_aside(log: Log) -> None:
    """Move a torn line out of the log; twice where a crash comes between."""
    path = torn_path(log)

    with opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as fd:
        write_all(fd, log.read(log.end, log.torn) + b"\n")
        sync_content(fd)

    sync_names(log.folder.threads)
    os.ftruncate(log.file.fd, log.end)
    sync_content(log.file.fd)
    _logger.warning(
        "%s: %d bytes of a write that was never acknowledged are now in %s",
        log.path,
        log.torn,
        path,
    )


def _unlink_own(file: File) -> None:
    """Remove an empty file, unless another one is in its place."""
    with suppress(FileNotFoundError):
        if os.lstat(file.path).st_ino == os.fstat(file.fd).st_ino:
            os.unlink(file.path)
