"""One thread's log as it was at one moment, checked and read.

What lies before a log's end never changes, because writers only append, and
``delete_thread`` puts another file in the log's place. So a reader holds the file's
lock only while it looks where the log ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from cpkit.errors import CorruptThread
from cpkit_file import lines
from cpkit_file.files import File, sync_content
from cpkit_file.index import Calls, Folder, LogIndex, Tail
from cpkit_file.lines import CALL, SEAL, End

__all__ = ["Log"]

# What is read of a log's head: nearly every first line, and the longest one.
_HEADS = (256, 4096)
# What is read of a log's end at first: the last line of most.
_END = 2048
# Fits a processor's cache: larger blocks were measured to take longer.
_BLOCK = 128 * 1024
# What a search in the middle of the log reads at each step.
_PROBE = 16 * 1024
_DAMAGE = "the bytes do not fit the line's checksum"


class Log:
    """The intact lines of a locked log, from its start to ``end``.

    ``at`` is where the thread stands, or ``None`` where the log holds no thread. An
    ``end`` of 0 is a log without a first write. ``torn`` counts the bytes after the
    end: of a write that was cut short by a kill or a power loss, never acknowledged.
    """

    index: LogIndex

    def __init__(self, folder: Folder, name: str, file: File) -> None:
        self.folder = folder
        self.name = name
        self.file = file
        index = self._find_index()

        if index is None:
            tail = self._find_tail()[0]

            if tail.end:
                raise self.corrupt(0, _DAMAGE)
        else:
            self.index = index

            if file.size != index.tail.end:
                index.tail, synced = self._find_tail()
                index.synced = max(index.synced, synced)

            tail = index.tail

        self.end, self.at, self.seal = tail
        self.torn = file.size - self.end

    def calls(self) -> Calls:
        """Return the calls, with those that were added to the log since."""
        if not self.end:
            return Calls("")

        index = self.index

        with index.lock:
            if index.scanned < self.end:
                self.sync()

                for offset, line in self.lines(index.scanned):
                    if line.startswith(CALL):
                        index.calls.learn(offset, line)

                index.scanned = self.end

        return index.calls

    def sync(self, *, always: bool = False) -> None:
        """Return when everything up to ``end`` will survive a power loss.

        A writer may have been killed before its sync, and what was shown must survive.
        With durability=normal only where it is asked for ``always``.
        """
        wanted = self.folder.durable or always

        if wanted and self.end and self.index.synced < self.end:
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
        seal = self._seal_before(start)
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
            for line in block.splitlines(keepends=True):
                yield offset, line
                offset += len(line)

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
        number = 1
        position = 0

        while piece := os.pread(self.file.fd, min(_BLOCK, offset - position), position):
            number += piece.count(b"\n")
            position += len(piece)

        thread_id = self.folder.ids.get(self.name, "?")
        return CorruptThread(thread_id, f"{self.file.path}, line {number}", reason)

    def _find_index(self) -> LogIndex | None:
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

    def _find_tail(self) -> tuple[Tail, int]:
        """Return the last intact line's end, and up to where the log was synced before.

        A line is intact if it and the bytes that were unsynced before it fit their
        checksums. What follows the last one is torn, or else damaged.
        """
        stop = self.file.size
        tail, synced = Tail(), 0

        while stop:
            start, line = self._last_line(stop)

            if not lines.follows(self._seal_before(start), line):
                stop = start
                continue

            found = self._end_of(start, line)
            first = max(0, start - found.unsynced)
            batch = self.read(first, start - first)
            broken = lines.first_broken(self._seal_before(first), batch)

            if broken == len(batch):
                tail, synced = Tail(start + len(line), found.at, line[-SEAL:]), first
                break

            stop = first + broken

        rest = self.read(tail.end, self.file.size - tail.end)

        if rest and not lines.is_torn(tail.seal, rest, tail.end):
            raise self.corrupt(tail.end, _DAMAGE)

        return tail, synced

    def _last_line(self, stop: int) -> tuple[int, bytes]:
        """Return the last whole line before an offset, and where it starts."""
        low, start, data = stop, 0, b""

        while low and not start:
            more = min(low, max(_END, len(data)))
            low -= more
            data = self.read(low, more) + data
            end = data.rfind(b"\n") + 1
            start = data.rfind(b"\n", 0, max(0, end - 1)) + 1

        return low + start, data[start:end]

    def _seal_before(self, offset: int) -> bytes:
        start = max(0, offset - SEAL)
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
