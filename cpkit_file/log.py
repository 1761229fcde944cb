"""One thread's log as it was at one moment, checked and read.

Bytes before a log's end never change: writers only append, and ``delete_thread``
replaces the file. So a reader holds the file's lock only until it has found the end.
A handle remembers what it read of each log, and reads only what is new.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from cpkit.driver import StoredCall, StoreFailure, sync_folder
from cpkit.errors import CorruptThread
from cpkit_file import lines
from cpkit_file.lines import CALL, SEAL_LENGTH, At, End
from cpkit_file.schema import File, locked_file, log_name, opened, sync_content

# Logs that a handle remembers, at a few hundred bytes a call.
_LOGS = 512
# Ids that a handle remembers to list threads, at a few hundred bytes each.
_IDS = 100_000

Read: TypeAlias = Callable[[int, int], bytes]
"""``read(offset, length)`` reads one line of a log and checks it."""
_Span: TypeAlias = tuple[int, int, slice]
"""The offset and the length of a line, and where in it args or a result are."""
_Place: TypeAlias = tuple[StoredCall, _Span, _Span | None]
"""A call without its content, and where in the log its args and its result are."""

# Bytes to read of a log's head: enough for nearly every first line, then for any.
_HEADS = (256, 4096)
# Bytes to read of a log's end at first: the last line of most logs fits.
_LAST = 2048
# Bytes of one block: fits a processor's cache. Larger ones were measured to be slower.
_BLOCK = 128 * 1024
# Bytes that a search in the middle of a log reads at each step.
_PROBE = 16 * 1024
_DAMAGE = "the bytes do not fit the line's checksum"


class Folder:
    """A store's folder, and what a handle remembers of it.

    With ``durable`` each write is synced before it is acknowledged. ``ids`` has the
    thread ids by the names of their logs.
    """

    def __init__(self, path: str, *, durable: bool) -> None:
        self.path = path
        self.durable = durable
        self.threads = os.path.join(path, "threads")
        self.claims = os.path.join(path, "claims")
        self.index = lru_cache(_LOGS)(LogIndex)
        self.ids: dict[str, str] = {}

    def remember(self, thread_id: str) -> str:
        """Return the name of the thread's log, and remember the id for that name."""
        if len(self.ids) >= _IDS:
            self.ids.clear()

        name = log_name(thread_id)
        self.ids[name] = thread_id
        return name


class Tail(NamedTuple):
    """The offset where the intact lines end, and the last line's `At` and seal."""

    end: int = 0
    at: At | None = None
    seal: bytes = b""


class LogIndex:
    """What a handle remembers of one file; the random word in its header tells which.

    The file's bytes are on disk up to the offset ``synced``; its name is on disk if
    ``is_named``. ``sync_failed`` is true until the bytes from ``synced`` on were
    written again. ``tail`` is the last one that was read or written. ``calls`` has the
    calls up to the offset ``scanned``; it is filled under ``lock``.
    """

    def __init__(self, name: str, header: bytes) -> None:
        self.thread_id = lines.thread_of(header)

        if log_name(self.thread_id) != name:
            raise ValueError(f"it is the log of thread {self.thread_id!r}")

        self.sync_failed = False
        self.lock = threading.Lock()
        self._start = len(header)
        self.forget()

    def forget(self) -> None:
        """Forget what was read, because another program changed the file."""
        with self.lock:
            self.synced = 0
            self.is_named = False
            self.tail = Tail()
            self.scanned = self._start
            self.calls = Calls(self.thread_id)


class Calls:
    """The calls of a log, learned line by line, in the order of claims."""

    def __init__(self, thread_id: str) -> None:
        self._thread_id = thread_id
        self._places: dict[str, _Place] = {}
        self._attempts: dict[tuple[str, int], str] = {}

    def learn(self, offset: int, line: bytes) -> None:
        """Add what a ``call`` line says."""
        facts, start, stop = lines.call_line(line)
        span = offset, len(line), slice(start, stop)
        call_id = facts["call_id"]

        if "idempotency_key" not in facts:
            call, args, _ = self._places[call_id]
            call = call._replace(**facts)
            self._places[call_id] = call, args, None if call.erased else span
            return

        known = {"args": b"{}", "result": None, "resolved_at": None, "erased": False}
        call = StoredCall(thread_id=self._thread_id, **(known | facts))
        self._places[call_id] = call, span, None
        self._attempts[call.idempotency_key, call.attempt] = call_id

    def by_id(self, read: Read, call_id: str | None) -> StoredCall | None:
        place = self._places.get(call_id or "")
        return None if place is None else _fetch(read, place)

    def by_attempt(self, read: Read, key: str, attempt: int) -> StoredCall | None:
        return self.by_id(read, self._attempts.get((key, attempt)))

    def all(self, read: Read) -> list[StoredCall]:
        return [_fetch(read, place) for place in list(self._places.values())]

    def pending(self, read: Read) -> list[StoredCall]:
        places = list(self._places.values())
        return [
            _fetch(read, place)
            for place in places
            if place[0].status == "issued" and not place[0].erased
        ]

    def without_content(self) -> list[StoredCall]:
        return [call for call, *_ in list(self._places.values())]


def _fetch(read: Read, place: _Place) -> StoredCall:
    call, args, result = place

    if call.erased:
        return call

    def content(span: _Span) -> bytes:
        offset, length, part = span
        return read(offset, length)[part]

    found = None if result is None else content(result)
    return call._replace(args=content(args), result=found)


class Log:
    """The intact lines of a locked log, from its start to ``end``.

    ``at`` has the thread's version and time, or is ``None`` if the log holds no thread.
    ``end`` is 0 if no write to the log was ever complete. ``torn`` counts the bytes
    after the end: a kill or a power loss cut their write short, so it was never
    acknowledged.

    Damage raises ``CorruptThread``. A list of threads reads no content, so with
    ``listing`` the error is put into ``damage`` instead, if the thread's id is known.
    ``index`` is not set if the first line is damaged.
    """

    index: LogIndex

    def __init__(
        self, folder: Folder, name: str, file: File, *, listing: bool = False
    ) -> None:
        self.folder = folder
        self.name = name
        self.file = file
        self.damage: CorruptThread | None = None
        self.thread_id: str | None = None
        index = self._find_index() if file.size else None
        tail = Tail() if index is None else index.tail

        # A person may have cut bytes off, or copied a backup over the log.
        if index is not None and tail.end:
            if os.pread(file.fd, SEAL_LENGTH, tail.end - SEAL_LENGTH) != tail.seal:
                index.forget()
                tail = Tail()

        if file.size != tail.end:
            tail, synced, is_named = self._find_tail()

            if index is not None:
                index.tail, index.synced = tail, max(index.synced, synced)
                index.is_named |= is_named
            elif tail.end:
                self.damage = self.corrupt(0, _DAMAGE)

        if index is not None:
            self.index = index
            self.thread_id = index.thread_id
        elif self.damage is not None:
            self.thread_id = self._find_id()

        if self.damage is not None and not (listing and self.thread_id is not None):
            raise self.damage

        self.tail = tail
        self.end, self.at, _ = tail
        self.torn = file.size - self.end

    @property
    def version(self) -> int:
        """The thread's number of messages."""
        return 0 if self.at is None else self.at.version

    def calls(self) -> Calls:
        """Return the calls, after reading what was added to the log since last time."""
        if not self.end:
            return Calls("")

        index = self.index

        with index.lock:
            if index.scanned < self.end:
                self.sync()

                for offset, line in self.each_line(index.scanned):
                    if line.startswith(CALL):
                        index.calls.learn(offset, line)

                index.scanned = self.end

        return index.calls

    def sync(self, *, always: bool = False) -> None:
        """Return when everything up to ``end`` will survive a power loss.

        Readers call it too: what a read returns must survive, and a writer may have
        been killed before its sync. With durability=normal nothing is synced unless
        ``always`` is set.
        """
        wanted = self.folder.durable or always

        if not wanted or not self.end or self.index.synced >= self.end:
            return

        self.write_again()
        self.sync_name()

        try:
            sync_content(self.file.fd)
        except OSError:
            self.index.sync_failed = True

            # Write again now: other processes do not know that a sync failed.
            with suppress(OSError, StoreFailure, CorruptThread):
                self.write_again()

            raise

        self.index.synced = self.end

    def sync_name(self) -> None:
        """Return when the log's name is on disk.

        The process that created or replaced the log has usually done this already. It
        may have been killed before, or run with durability=normal.
        """
        if not self.index.is_named:
            sync_folder(self.folder.threads)
            self.index.is_named = True

    def created_at(self) -> int:
        """Return when the thread was created, from the first lines of the log."""
        size = _HEADS[-1]

        while (found := lines.created_in(self.read(0, min(size, self.end)))) is None:
            if size >= self.end:
                raise self.corrupt(0, "no line says when the thread was created")

            size *= 8

        return found

    def read(self, start: int, length: int) -> bytes:
        """Return the bytes at an offset, all of them."""
        found = b""

        # Linux reads less than 2 GiB at once.
        while len(found) < length and (
            piece := os.pread(self.file.fd, length - len(found), start + len(found))
        ):
            found += piece

        if len(found) != length:
            raise self.corrupt(start, "the file ends too early")

        return found

    def line(self, start: int, length: int) -> bytes:
        """Return a line after the first one; it may have been damaged by now."""
        found = self.read(start - SEAL_LENGTH, SEAL_LENGTH + length)
        before, line = found[:SEAL_LENGTH], found[SEAL_LENGTH:]

        if not lines.follows(before, line):
            raise self.corrupt(start, _DAMAGE)

        return line

    def blocks(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield whole lines in large blocks with right checksums, each with its offset.

        A line must begin at ``start``. Raises ``CorruptThread`` for a damaged block,
        after its intact lines.
        """
        size = _PROBE  # small at first, for a reader of one message
        seal = self._seal_before(start)
        rest = b""
        position = start

        while position < self.end:
            piece = self.read(position, min(size, self.end - position))
            position += len(piece)
            block = rest + piece
            cut = block.rfind(b"\n") + 1
            block, rest = block[:cut], block[cut:]
            # While a line is longer than a block, read twice as much each time: so its
            # bytes are copied only a few times.
            size = max(min(2 * size, _BLOCK), len(rest))

            if not block:
                continue

            offset = position - len(rest) - len(block)

            if not lines.follows(seal, block):
                broken = lines.first_broken(seal, block)
                yield offset, block[:broken]
                raise self.corrupt(offset + broken, _DAMAGE)

            seal = block[-SEAL_LENGTH:]
            yield offset, block

        if rest:
            raise self.corrupt(position - len(rest), "the line has no end")

    def each_line(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines with their offsets; a line must begin at ``start``."""
        for offset, block in self.blocks(start):
            for line in block.splitlines(keepends=True):
                yield offset, line
                offset += len(line)

    def start_of(self, position: int) -> tuple[int, int]:
        """Find a line at or shortly before a message, by binary search.

        Returns the line's offset, and the thread's version before it.
        """
        low, high = 0, self.end
        version = 0

        while high - low > _PROBE:
            middle = (low + high) // 2
            stop = self._next_line(middle, high)

            if stop == high:
                high = middle
                continue

            start = max(0, stop - lines.LONGEST_END)
            at = self._end_of(stop - 1, self.read(start, stop - start)).at
            reached = 0 if at is None else at.version

            if reached <= position:
                low, version = stop, reached
            else:
                high = middle

        return low, version

    def corrupt(self, offset: int, reason: str) -> CorruptThread:
        """Return the error for the line at an offset."""
        number, position = 1, 0

        while piece := os.pread(self.file.fd, min(_BLOCK, offset - position), position):
            number += piece.count(b"\n")
            position += len(piece)

        thread_id = self.folder.ids.get(self.name, "?")
        return CorruptThread(thread_id, f"{self.file.path}, line {number}", reason)

    def write_again(self) -> None:
        """After a failed sync, write the bytes again that may not be on disk.

        Linux marks bytes as written even if it could not write them. So without this
        the next sync, in any process, would succeed and write nothing. Raises
        ``OSError`` if the bytes are lost: the kernel has read old ones from the disk.
        """
        if not self.index.sync_failed:
            return

        start = self.index.synced
        data = self.read(start, max(0, self.end - start))

        # Nothing may be appended behind lost bytes. Without a tail, the next operation
        # looks for the last intact line again.
        if data and not lines.follows(self._seal_before(start), data):
            self.index.tail = Tail()
            raise OSError(errno.EIO, "bytes of a failed sync are lost", self.file.path)

        with ExitStack() as stack:
            # A new descriptor, because pwrite ignores its offset if O_APPEND is set. A
            # writer holds the lock. A reader takes it, because a writer may cut bytes
            # off.
            if self.file.is_writable:
                fd = stack.enter_context(opened(self.file.path, os.O_RDWR))
            else:
                fd = stack.enter_context(locked_file(self.file.path, os.O_RDWR)).fd

            now = os.fstat(fd)
            is_same = os.path.samestat(now, os.fstat(self.file.fd))

            # Not if a deletion replaced the file, or a writer cut the bytes off.
            if is_same and now.st_size >= self.end:
                while data:
                    done = os.pwrite(fd, data, start)
                    data, start = data[done:], start + done

        self.index.sync_failed = False

    def _find_index(self) -> LogIndex | None:
        """Find the index by the first line; ``None`` if that line is not intact."""
        if header := _header(self.file.fd):
            try:
                return self.folder.index(self.name, header)
            except ValueError as exc:
                raise self.corrupt(0, str(exc)) from exc

        return None

    def _find_id(self) -> str | None:
        """Return the thread's id in spite of a damaged first line, if it can be found.

        An id is right if the log's name is made from it.
        """
        head = os.pread(self.file.fd, _HEADS[-1], 0)
        found = [self.folder.ids.get(self.name), self.name.partition("~")[0]]

        with suppress(ValueError):
            found.append(lines.thread_of(head))

        for thread_id in filter(None, found):
            if log_name(thread_id) == self.name:
                return thread_id

        return None

    def _find_tail(self) -> tuple[Tail, int, bool]:
        """Return the end of the last intact line, an offset that is on disk, and
        whether the name is on disk.

        A line is intact if its checksum is right, and so are the checksums of the lines
        before it that may not have been on disk when it was written. Bytes after the
        last intact line are torn or damaged.
        """
        stop = self.file.size
        tail, synced, is_named = Tail(), 0, False

        while stop:
            start, line = self._last_line(stop)

            if not lines.follows(self._seal_before(start), line):
                stop = start
                continue

            found = self._end_of(start, line)
            first = max(0, start - (found.unsynced or 0))
            batch = self.read(first, start - first)
            broken = lines.first_broken(self._seal_before(first), batch)

            if broken == len(batch):
                tail, synced = (
                    Tail(start + len(line), found.at, line[-SEAL_LENGTH:]),
                    first,
                )
                # Bytes are on disk only after the name, except in a replacement.
                is_named = first > 0 and found.unsynced != lines.NAME_UNSYNCED
                break

            stop = first + broken

        rest = self.read(tail.end, self.file.size - tail.end)

        if rest and not lines.is_torn(tail.seal, rest, tail.end):
            self.damage = self.corrupt(tail.end, _DAMAGE)

        return tail, synced, is_named

    def _last_line(self, stop: int) -> tuple[int, bytes]:
        """Return the last whole line before an offset, and where it starts."""
        low, start, data = stop, 0, b""

        while low and not start:
            more = min(low, max(_LAST, len(data)))
            low -= more
            data = self.read(low, more) + data
            end = data.rfind(b"\n") + 1
            start = data.rfind(b"\n", 0, max(0, end - 1)) + 1

        return low + start, data[start:end]

    def _seal_before(self, offset: int) -> bytes:
        start = max(0, offset - SEAL_LENGTH)
        return self.read(start, offset - start)

    def _end_of(self, offset: int, line: bytes) -> End:
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


def _header(fd: int) -> bytes:
    """Return a log's first line, or nothing if it is not intact."""
    for size in _HEADS:
        head = os.pread(fd, size, 0)
        header = head[: head.find(b"\n") + 1]

        if header and lines.follows(b"", header):
            return header

    return b""


def thread_id_of(folder: Folder, name: str) -> str | None:
    """Return the thread's id of a log, or ``None`` if the log has no first write.

    An intact first line never changes. It is read without a lock, so that a stopped
    writer does not end the lists of other threads.
    """
    with suppress(FileNotFoundError, ValueError):
        with opened(f"{folder.threads}/{name}") as fd:
            if header := _header(fd):
                return folder.index(name, header).thread_id

    with reading(folder, name, listing=True) as log:
        return log.thread_id


@contextmanager
def reading(folder: Folder, name: str, *, listing: bool = False) -> Iterator[Log]:
    """Open a log as it is at this moment; a missing file is an empty log.

    The log is synced first, so that what the caller reads survives a power loss. With
    ``listing`` it is not, and damage is as for `Log`.
    """
    path = f"{folder.threads}/{name}"

    with ExitStack() as stack:
        try:
            file = stack.enter_context(locked_file(path, os.O_RDONLY, shared=True))
        except FileNotFoundError:
            os.stat(folder.threads)  # raises if the whole folder is missing
            file = File(-1, path, 0)

        log = Log(folder, name, file, listing=listing)

        # Of an empty log nothing will be read, and a missing file has no lock.
        if log.end:
            file.unlock()

        if not listing:
            log.sync()

        yield log
