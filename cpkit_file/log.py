"""A log as it is at one moment, read without a lock, and what a handle remembers of it.

Logs only grow: a deletion or a trim puts another file in a log's place, and what is cut
off was never acknowledged. So a handle reads only what is new.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from pydantic_core import from_json

from cpkit.driver import Restore, StoredCall, StoreFailure
from cpkit.errors import CorruptThread
from cpkit.records import ThreadInfo
from cpkit_file import lines
from cpkit_file.lines import SEAL
from cpkit_file.schema import KEYS, THREADS, log_name

# Files that a handle remembers, at a few hundred bytes a call.
_FILES = 2000
# Bytes of a block: it fits a processor's cache. Larger ones were measured to be slower.
_BLOCK = 128 * 1024
_DAMAGE = "the bytes do not fit the line's seal"
_NO_CALL = StoredCall("", "", "", b"{}", "", "issued", 0, 0, None, None, False)

_Place: TypeAlias = tuple[int, int]
"""The offset and the length of a JSON text in a file."""


class Tail(NamedTuple):
    """Where the whole lines of a file end, and what the last one says.

    ``inode`` tells which file, ``sum`` is the checksum of all its bytes.
    """

    inode: int = 0
    end: int = 0
    seal: bytes = b""
    sum: int = 0
    version: int = 0
    updated_at: int = 0


class Folder:
    """A store's folder, and what a handle remembers of its files.

    ``failed`` are files whose sync failed, ``ids`` thread ids by the names of logs, and
    ``infos`` what a list shows of a thread, with its log's marker and if it is erased.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.threads = os.path.join(path, THREADS)
        self.keys = os.path.join(path, KEYS)
        self.failed: set[str] = set()
        self.ids: dict[str, str] = {}
        self.infos: dict[str, tuple[object, ThreadInfo | None, bool]] = {}
        self.index = lru_cache(_FILES)(lambda path: Index())


class Log:
    """An open log, or an open register; ``owner`` is the thread's id."""

    def __init__(self, folder: Folder, path: str, owner: str = "") -> None:
        self.folder = folder
        self.path = path
        self.owner = owner
        self.index = folder.index(path)
        self.fd = -1

        if path in folder.failed:
            reason = f"a sync of {path} failed: open the store again"
            raise StoreFailure("rejected", reason)

    def find_tail(self, status: os.stat_result | None = None) -> Tail:
        """Return where the file ends, at its ``status`` if that is known."""
        status, known = status or os.fstat(self.fd), self.index.tail
        size = status.st_size

        if (known.inode, known.end) == (status.st_ino, size) and (
            not size or os.pread(self.fd, SEAL, size - SEAL) == known.seal
        ):
            return known

        start = max(0, size - 2048)  # the last write of most files fits

        while (tail := self._tail_in(status.st_ino, start, size)) is None:
            start = max(0, size - 4 * (size - start))

        self.index.tail = tail
        return tail

    def _tail_in(self, inode: int, start: int, size: int) -> Tail | None:
        """Find the last whole line from ``start`` on; ``None`` if its write is longer.

        A power loss can tear the last write, and nothing before it: its end is missing,
        so that it has no newline there, or it has zeros in the middle.
        """
        data = self.read(start, size - start)
        # The whole lines are data[first:stop], and those up to ``end`` fit their seals.
        first = data.find(b"\n", SEAL) + 1 if start else 0
        stop = data.rfind(b"\n") + 1
        end = first + lines.intact(data[max(0, first - SEAL) : first], data[first:stop])

        if start and end == first:
            return None

        if end < stop:
            is_torn = b"\0" in data[end : data.index(b"\n", end)]
            last = data.rfind(b"\n", 0, stop - 1) + 1
            said = lines.end_of(data[last:stop])

            # Or else the last line says that its write began behind ``end``.
            if not is_torn or (said and last - said[2] > end):
                raise self.corrupt(start + end)

        begin = data.rfind(b"\n", 0, max(0, end - 1)) + 1

        if data.startswith(lines.HEAD, begin):  # its first operation is missing
            return Tail(inode)

        seal = data[end - SEAL : end] if end else b""
        version, updated_at, together = lines.end_of(data[begin:end]) or (0, 0, 0)

        if start and begin - together < first:  # the write may be torn before ``start``
            return None

        sum_ = lines.sum_after(seal)
        return Tail(inode, start + end, seal, sum_, version, updated_at)

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the file; fewer where it ends."""
        return os.pread(self.fd, length, start)

    def header(self) -> dict[str, Any]:
        """Return what the first line says; nothing if the first write is torn."""
        head = self.read(0, lines.LONGEST_HEADER)
        line = head[: head.find(b"\n") + 1]

        if line and b"\0" not in line and not lines.fits(b"", line):
            raise self.corrupt(0)

        return dict(from_json(line)) if lines.fits(b"", line) else {}

    def blocks(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines between two offsets in blocks, which fit their seals."""
        seal = self.read(start - SEAL, SEAL) if start else b""
        length = _BLOCK

        while start < end:
            block = self.read(start, min(length, end - start))
            cut = block.rfind(b"\n") + 1

            if not cut and len(block) == length:  # a line that is longer
                length *= 8
                continue

            block = block[:cut]

            if not block or not lines.fits(seal, block):
                raise self.corrupt(start + lines.intact(seal, block))

            yield start, block
            start, seal, length = start + cut, block[-SEAL:], _BLOCK

    def corrupt(self, offset: int, reason: str = _DAMAGE) -> CorruptThread:
        """Return the error for the line at an offset."""
        number = 1 + self.read(0, offset).count(b"\n")
        return CorruptThread(self.owner, f"{self.path}, line {number}", reason)


class Index:
    """What a handle knows of a log or a register: its ``tail``, and where it has what.

    All but the tail is used under the ``lock``. ``marks`` are offsets of lines, with
    the version before them: the first mark has the position of the first message.
    ``calls`` have the places of their args and results.
    """

    def __init__(self) -> None:
        self.tail = Tail()
        self.lock = threading.Lock()
        self._begin_again()

    def _begin_again(self) -> None:
        self.learned = Tail()
        self.created_at = 0
        self.marks: list[tuple[int, int]] = [(0, 0)]
        self.extra: dict[bytes, _Place] = {}
        self.calls: dict[str, tuple[StoredCall, _Place | None, _Place | None]] = {}
        self.claims: dict[str, set[tuple[int, str, str]]] = {}

    def catch_up(self, log: Log, *, keep: bool = False) -> list[bytes]:
        """Learn what was added to the file; return the messages, to ``keep`` them."""
        tail, known = log.find_tail(), self.learned
        bodies: list[bytes] = []

        if known is tail:
            return bodies

        # Another file may be in its place, or bytes were cut off.
        if known.end and (
            known.inode != tail.inode or log.read(known.end - SEAL, SEAL) != known.seal
        ):
            self._begin_again()

        for offset, block in log.blocks(self.learned.end, tail.end):
            found, others = lines.take_apart(block)

            for start, parts in others:
                try:
                    self._learn(log.owner, offset + start, parts)
                except (ValueError, LookupError, TypeError) as exc:
                    raise log.corrupt(offset + start, str(exc)) from exc

            self.created_at = self.created_at or lines.first_time(block)

            if offset + len(block) >= self.marks[-1][0] + _BLOCK // 2:
                version, *_ = lines.end_of(block) or (0,)
                self.marks.append((offset + len(block), version))

            if keep:
                bodies += found

        self.learned = tail
        return bodies

    def _learn(self, owner: str, offset: int, parts: list[bytes]) -> None:
        """Learn from a line, which is split at its tabs."""

        def place(number: int) -> _Place:
            before = sum(map(len, parts[:number])) + number
            return offset + before, len(parts[number])

        kind = parts[0]

        if kind == lines.CALL:
            facts = from_json(parts[1])
            texts = {parts[n - 1]: place(n) for n in range(3, len(parts), 2)}
            blank = _NO_CALL._replace(thread_id=owner), None, None
            call, args, _ = self.calls.get(facts["call_id"], blank)
            places = texts.get(lines.ARGS, args), texts.get(lines.RESULT)
            self.calls[facts["call_id"]] = call._replace(**facts), *places
        elif kind.startswith(lines.KEY):
            key, attempt, thread_id, call_id, _ = from_json(kind).values()
            self.claims.setdefault(key, set()).add((attempt, thread_id, call_id))
        elif kind.startswith((lines.HEAD, lines.TRIMMED)):
            head = from_json(kind)
            self.created_at = head.get("created", 0)
            self.marks = [(0, head.get("trimmed", 0))]

            if head["thread"] != owner:
                raise ValueError(f"it is the log of thread {head['thread']!r}")
        elif kind.startswith((lines.ADD, b"{" + lines.EXTRA)):
            firsts = (n for n, one in enumerate(parts, 1) if one.endswith(lines.EXTRA))

            for n in range(next(firsts, len(parts)), len(parts) - 1, 4):
                self.extra[parts[n]] = place(n + 2)
        else:
            raise ValueError(f"{kind[:20]!r} is not a kind of line")

    @property
    def first(self) -> int:
        """The position of the first message that was not trimmed."""
        return self.marks[0][1]

    def state(self, log: Log, before: int = 0) -> Restore:
        """Read all of the thread but the messages below the position ``before``."""
        self.catch_up(log)
        version, first = self.learned.version, max(self.first, before)
        bodies = self.messages(log, first, version)
        items, calls = self.items(log), self.read_calls(log)
        times = self.created_at or None, self.learned.updated_at or None
        return Restore(log.owner, bodies, items, calls, *times, first=first)

    def items(self, log: Log) -> list[tuple[bytes, bytes]]:
        """Read the extra."""
        return [(key, log.read(*place)) for key, place in self.extra.items()]

    def messages(self, log: Log, first: int, last: int) -> list[bytes]:
        """Read the messages of a range."""
        found: list[bytes] = []
        mark = bisect_right(self.marks, first, key=lambda one: one[1]) - 1
        offset, version = self.marks[mark]

        for _, block in log.blocks(offset, self.learned.end):
            found += lines.take_apart(block)[0]

            if version + len(found) >= last:
                break

        return found[first - version : last - version]

    def call(self, log: Log, call_id: str) -> StoredCall | None:
        """Read a call, with its args and its result."""
        placed = self.calls.get(call_id)
        return None if placed is None else _read(log, *placed)

    def read_calls(self, log: Log, *, pending: bool = False) -> list[StoredCall]:
        """Read every call, or those that wait for an outcome."""
        return [
            _read(log, call, *places)
            for call, *places in self.calls.values()
            if not pending or (call.status == "issued" and not call.erased)
        ]


def _read(
    log: Log, call: StoredCall, args: _Place | None, result: _Place | None
) -> StoredCall:
    if args:
        call = call._replace(args=log.read(*args))

    return call._replace(result=log.read(*result)) if result else call


@contextmanager
def opened(folder: Folder, path: str, owner: str = "") -> Iterator[Log]:
    """Open a log or register to read it; a missing file is an empty one."""
    log = Log(folder, path, owner)

    try:
        log.fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        os.stat(os.path.dirname(path))  # raises if the whole folder is missing
        log.fd = os.open(os.devnull, os.O_RDONLY)

    try:
        yield log
    finally:
        os.close(log.fd)


@contextmanager
def reading(folder: Folder, thread_id: str) -> Iterator[tuple[Log, Index]]:
    """Open a thread's log to read it, and lock what the handle knows of it."""
    path = f"{folder.threads}/{log_name(thread_id)}"

    with opened(folder, path, thread_id) as log, log.index.lock:
        yield log, log.index
