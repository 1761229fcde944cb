"""A log as it is at one moment, read without a lock, and what a handle remembers of it.

A log's file only grows: a deletion or a trim puts another file in its place, and what
is cut off was never acknowledged. So a handle reads only what is new.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, Self, TypeAlias

from pydantic_core import from_json

from cpkit.driver import Restore, StoredCall, StoreFailure, span
from cpkit.errors import CorruptThread
from cpkit.records import ThreadInfo
from cpkit_file import lines
from cpkit_file.lines import SEAL
from cpkit_file.schema import KEYS, MARK, THREADS, log_name, register_name

# Files that a handle remembers, at a few hundred bytes a call.
_FILES = 2000
# Bytes of a block: it fits a processor's cache. Larger ones were measured to be slower.
_BLOCK = 128 * 1024
_DAMAGE = "the bytes do not fit the line's seal"
_NO_CALL = StoredCall("", "", "", b"{}", "", "issued", 0, 0, None, None, False)

_Place: TypeAlias = tuple[int, int]
"""The offset and the length of a JSON text in a file."""


class Tail(NamedTuple):
    """Where the whole lines of a file end, and what the last one says."""

    inode: int = 0
    end: int = 0
    seal: bytes = b""
    version: int = 0
    updated_at: int = 0


class Folder:
    """A store's folder, and what a handle remembers of its files."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.mark = os.path.join(path, MARK)
        self.threads = os.path.join(path, THREADS)
        self.keys = os.path.join(path, KEYS)
        self.failed: set[str] = set()  # files whose sync failed
        self.ids: dict[str, str] = {}  # thread ids by the names of logs
        # What a list shows of a thread, with its log's marker, and if it is erased.
        self.infos: dict[str, tuple[object, ThreadInfo | None, bool]] = {}
        self.index = lru_cache(_FILES)(lambda path: Index())
        self.log = lru_cache(_FILES)(lambda one: f"{self.threads}/{log_name(one)}")

    def register(self, key: str) -> str:
        """Return the path of the register that has a key."""
        return f"{self.keys}/{register_name(key)}"


class Log:
    """A log or register, open to be read; a missing file is an empty one.

    ``owner`` is the id of a log's thread; empty for a register and a draft, whose names
    are put on disk elsewhere.
    """

    def __init__(self, folder: Folder, path: str, owner: str = "") -> None:
        self.folder = folder
        self.path = path
        self.owner = owner
        self.index = folder.index(path)
        self.fd = -1

        if path in folder.failed:
            reason = f"a sync of {path} failed: open the store again"
            raise StoreFailure("rejected", reason)

    def __enter__(self) -> Self:
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            os.stat(os.path.dirname(self.path))  # raises if the folder is missing
            self.fd = os.open(os.devnull, os.O_RDONLY)

        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self.fd)

    def claims(self, key: str) -> list[tuple[int, str, str]]:
        """Return a register's claims of a key, the newest attempt first."""
        with self.index.lock:
            self.index.catch_up(self)
            return sorted(self.index.claims.get(key, ()), reverse=True)

    def call(self, call_id: str) -> StoredCall | None:
        """Return a call on record."""
        with self.index.lock:
            self.index.catch_up(self)
            found = self.index.calls.get(call_id)
            return self._whole(*found) if found else None

    def calls(self) -> list[StoredCall]:
        """Return all calls, without args and results."""
        with self.index.lock:
            self.index.catch_up(self)
            return [call for call, *_ in self.index.calls.values()]

    def state(
        self, start: int = 0, stop: int | None = None, *, pending: bool = False
    ) -> tuple[int, Restore]:
        """Return a thread's version, and the thread with a slice of its messages.

        Of the calls it has those that wait for an outcome, or all of them.
        """
        index = self.index

        with index.lock:
            bodies = index.catch_up(self, keep=start == 0 and stop is None)
            version = index.learned.version
            first, last = span(start, stop, version, index.first)

            if len(bodies) < last - first:
                bodies = self._messages(first, last)

            items = [(key, self.read(*place)) for key, place in index.extra.items()]
            calls = [
                self._whole(call, *places)
                for call, *places in index.calls.values()
                if not pending or (call.status == "issued" and not call.erased)
            ]
            times = index.created_at or None, index.learned.updated_at or None

        return version, Restore(self.owner, bodies, items, calls, *times, first=first)

    def _messages(self, first: int, last: int) -> list[bytes]:
        """Read the messages of a range."""
        found: list[bytes] = []
        marks = self.index.marks
        offset, version = marks[bisect_right(marks, first, key=itemgetter(1)) - 1]

        for _, block in self.blocks(offset, self.index.learned.end):
            found += lines.take_apart(block)[0]

            if version + len(found) >= last:
                break

        return found[first - version : last - version]

    def _whole(
        self, call: StoredCall, args: _Place | None, result: _Place | None
    ) -> StoredCall:
        if args:
            call = call._replace(args=self.read(*args))

        return call._replace(result=self.read(*result)) if result else call

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
        """Find the last whole write from ``start`` on; ``None`` if it begins before.

        A power loss can tear the last write, and nothing before it: its end is missing,
        so that it has no newline there, or it has zeros in the middle.
        """
        data = self.read(start, size - start)
        end = data.rfind(b"\n") + 1
        last = data.rfind(b"\n", 0, max(0, end - 1)) + 1
        said = lines.end_of(data[last:end])
        first = last - said[2] if said else 0

        if start and first < SEAL:
            return None

        if not lines.fits(data[first - SEAL : first], data[first:end]):
            if start:  # all lines are looked at
                return None

            stop, end = end, lines.intact(b"", data[:end])

            # Damage, if a hole has no zeros or lies before the last write.
            if end < stop and (
                b"\0" not in data[end : data.index(b"\n", end)]
                or (said and first > end)
            ):
                raise self.corrupt(end)

            last = data.rfind(b"\n", 0, max(0, end - 1)) + 1
            said = lines.end_of(data[last:end])

        if data.startswith(lines.HEAD, last):  # the first operation is missing
            end, said = last, None

        version, updated_at, _ = said or (0, 0, 0)
        return Tail(inode, start + end, data[end - SEAL : end], version, updated_at)

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the file; fewer where it ends."""
        return os.pread(self.fd, length, start)

    def header(self) -> dict[str, Any]:
        """Return what the first line says; nothing if the first write is torn."""
        head = self.read(0, 4096)  # an id has at most 512 bytes, as JSON 3072
        line = head[: head.find(b"\n") + 1]

        if lines.fits(b"", line):
            return dict(from_json(line))

        if line and b"\0" not in line:
            raise self.corrupt(0)

        return {}

    def blocks(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines between two offsets in blocks, which fit their seals."""
        seal = self.read(start - SEAL, SEAL) if start else b""
        length = _BLOCK

        while start < end:
            block = self.read(start, min(length, end - start))
            cut = block.rfind(b"\n") + 1

            if not cut and len(block) == length:  # a line that is longer
                length *= 2
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

    All but the tail is used under the ``lock``. ``first`` is the position of the first
    message, ``marks`` are offsets of lines with the version before them. ``calls`` have
    the places of their args and results.
    """

    def __init__(self) -> None:
        self.tail = Tail()
        self.lock = threading.Lock()
        self._begin_again()

    def _begin_again(self) -> None:
        self.learned = Tail()
        self.created_at = self.first = 0
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
        elif kind.startswith(lines.HEAD):
            head = from_json(kind)
            self.created_at = head.get("created", 0)
            self.first = head.get("trimmed", 0)
            self.marks = [(0, self.first)]

            if head["thread"] != owner:
                raise ValueError(f"it is the log of thread {head['thread']!r}")
        elif kind.startswith((lines.ADD, b"{" + lines.EXTRA)):
            firsts = (n for n, one in enumerate(parts, 1) if one.endswith(lines.EXTRA))

            for n in range(next(firsts, len(parts)), len(parts) - 1, 4):
                self.extra[parts[n]] = place(n + 2)
        else:
            raise ValueError(f"{kind[:20]!r} is not a kind of line")
