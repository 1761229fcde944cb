"""One thread's log, locked for one operation.

Writers hold the file's lock from before they look until what they wrote is on disk.
Readers take it for as long as it takes to see where the log ends: what lies before
that point never changes, because writers only append and ``delete_thread`` puts
another file in its place, so the reading itself goes on without the lock.

A reader that meets bytes of which this handle does not know that they are on disk
syncs them first: their writer may have been killed before it could, and what was shown
must not be gone after a power loss.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from cpkit.errors import CorruptThread
from cpkit_file.folder import Folder
from cpkit_file.index import LogIndex
from cpkit_file.lines import TAIL_BYTES, At, at_end_of
from cpkit_file.openings import Opening

__all__ = ["Log", "reading"]

# More than a first line takes: an id of 512 control characters is 3,072 bytes of JSON.
_HEADER_BYTES = 4096
# Fits a processor's cache: larger ones take longer.
_BLOCK = 128 * 1024
# What a search in the middle of the log reads at each step.
_PROBE = 16 * 1024


class Log:
    """The whole lines of a locked log, from its start to ``end``.

    ``at`` is where the thread stands, or ``None`` where the log holds no thread; an
    ``end`` of 0 is a log that was never written to. ``torn`` counts the bytes after
    the last newline: the line of a writer that was killed, never acknowledged.
    """

    index: LogIndex
    end: int = 0
    at: At | None = None

    def __init__(self, folder: Folder, name: str, file: Opening) -> None:
        self.folder = folder
        self.name = name
        self.file = file
        self.fd = file.fd

        # One that was cut since is looked at anew.
        if file.index is None or file.size < file.index.tail[0]:
            file.index = self._find_index()

        if file.index is not None:
            self.index = file.index
            self.end, self.at = self._find_end(file.size)

        self.torn = file.size - self.end

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def thread_id(self) -> str:
        return self.index.thread_id

    def settle(self) -> None:
        """Return when everything up to ``end`` will survive a power loss."""
        if self.end and self.index.synced < self.end:
            self.folder.sync(self.fd)
            self.index.synced = self.end

    def read(self, start: int, length: int) -> bytes:
        """Return the bytes at an offset, all of them."""
        found = os.pread(self.fd, length, start)

        if len(found) != length:
            raise self.corrupt(start, "the file ends too early")

        return found

    def blocks(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes from ``start``, where a line begins, in large blocks.

        Each with its offset, at which a line begins too. What follows the last newline
        in a block comes again, at the start of the next.
        """
        size = _PROBE  # little at first: who wants one message stops after it
        rest = b""
        position = start

        while position < self.end:
            piece = self.read(position, min(size, self.end - position))
            position += len(piece)
            block = rest + piece
            yield position - len(block), block
            rest = block[block.rfind(b"\n") + 1 :]
            # As much as there is of a long line, so that it is not copied often.
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

        And the version before that line. By halving: each line tells its version.
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

        while piece := os.pread(self.fd, min(_BLOCK, offset - position), position):
            number += piece.count(b"\n")
            position += len(piece)

        thread_id = self.folder.ids.get(self.name, "?")
        return CorruptThread(thread_id, f"{self.path}, line {number}", reason)

    def _find_index(self) -> LogIndex | None:
        if not self.file.size:
            return None

        head = os.pread(self.fd, _HEADER_BYTES, 0)
        cut = head.find(b"\n") + 1

        if cut:
            try:
                return self.folder.index(self.name, head[:cut])
            except ValueError as exc:
                raise self.corrupt(0, str(exc)) from exc

        if self.file.size > _HEADER_BYTES:
            raise self.corrupt(0, "the line is none of ours")

        return None

    def _find_end(self, size: int) -> tuple[int, At | None]:
        """Return the offset after the last newline, and what its line says."""
        known = self.index.tail

        # Of one file only what was never acknowledged is ever cut off.
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

        try:
            return at_end_of(self.read(start, end - 1 - start))
        except ValueError as exc:
            raise self.corrupt(end - 1, str(exc)) from exc

    def _newline_from(self, start: int, stop: int) -> int:
        """Return where the first newline in a range is, or -1."""
        while start < stop:
            piece = self.read(start, min(_PROBE, stop - start))
            cut = piece.find(b"\n")

            if cut >= 0:
                return start + cut

            start += len(piece)

        return -1


@contextmanager
def reading(folder: Folder, name: str, *, settled: bool = True) -> Iterator[Log | None]:
    """Open a log as it stands at this moment; ``None`` where there is none.

    Unless ``settled``, a power loss may still take back what is seen, and the log does
    not stay open: that is for listing many.
    """
    try:
        file = folder.openings.shared(folder.log_path(name))
    except FileNotFoundError:
        file = None

    if file is None:
        yield None
        return

    try:
        log = Log(folder, name, file)
        file.unlock()

        if settled:
            log.settle()

        yield log if log.end else None
    except BaseException:
        file.close()
        raise

    if settled:
        folder.openings.keep(file)
    else:
        os.close(file.fd)
