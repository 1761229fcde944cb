"""Files and folders of a simulated disk: what is synced, and what is not.

The model is the least that POSIX promises. A sync of a file makes its content and its
size durable, and not its name. A sync of a folder makes its names durable. What is not
synced may reach the disk in any part: each sector of a file by itself. A rename is
atomic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from random import Random
from typing import NamedTuple, TypeAlias

__all__ = ["Change", "File", "Folder", "Link", "Names", "Node"]

SECTOR = 512
"""Bytes that a disk writes as a whole."""


class Change(NamedTuple):
    """A write at an offset, or where ``data`` is ``None`` a new size."""

    offset: int
    data: bytes | None
    ended: int
    """The number of the call that made it."""
    durable: bool = False
    """Whether it is on disk, while an earlier change may not be."""
    dropped: bool = False
    """Whether a sync of it failed: a later sync does not write it again."""

    def apply(self, content: bytearray) -> None:
        end = self.offset + len(self.data or b"")

        if end > len(content):
            content.extend(bytes(end - len(content)))

        if self.data is None:
            del content[self.offset :]
        else:
            content[self.offset : end] = self.data

    def __str__(self) -> str:
        if self.data is None:
            return f"the size {self.offset}"

        return f"{len(self.data)} bytes at {self.offset}"


class File:
    """A file: its synced content, and the changes since, in order.

    ``mapped`` is set while the writer may change it in memory. ``synced`` is set when
    it was synced at least once.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.durable = b""
        self.pending: list[Change] = []
        self.size = 0
        self.mapped = False
        self.synced = False

    def change(self, change: Change) -> None:
        self.pending.append(change)

        if change.data is None:
            self.size = change.offset
        else:
            self.size = max(self.size, change.offset + len(change.data))

    def sync(self, began: int, *, fails: bool = False) -> None:
        """Make durable what had been changed when the sync began.

        After a sync that failed, the kernel takes the changes for written, and they may
        be lost for good.
        """
        self.synced = True

        for number, change in enumerate(self.pending):
            if change.ended <= began and not (change.durable or change.dropped):
                self.pending[number] = change._replace(durable=not fails, dropped=fails)

        first = list(takewhile(lambda change: change.durable, self.pending))
        del self.pending[: len(first)]
        self.durable = _after(self.durable, first)

    def lost(self) -> bytes:
        """Return the least that a disk may hold."""
        return _after(self.durable, [one for one in self.pending if one.durable])

    def kept(self) -> bytes:
        """Return the content with every change."""
        return _after(self.durable, self.pending)

    def torn(self, random: Random) -> bytes:
        """Return a content that has some changes, some sectors of others, and holes."""
        early, late = sorted(random.choices(range(len(self.pending) + 1), k=2))
        older, newer = self._after_some(early), self._after_some(late)

        if random.random() < 0.3:
            return newer

        size = len(random.choice((older, newer)))

        # The file system may have written the size of a file that grew in part only.
        if len(older) < len(newer) and random.random() < 0.3:
            size = random.randint(len(older), len(newer))

        content = bytearray(newer[:size].ljust(size, b"\0"))
        share = random.choice((0.1, 0.5, 0.9))

        for start in self._dirty_sectors(early, late):
            if start < size and random.random() < share:
                end = min(start + SECTOR, size)
                content[start:end] = older[start:end].ljust(end - start, b"\0")

        return bytes(content)

    def cut(self, random: Random) -> bytes:
        """Return a content that has the first changes, and some bytes of the next."""
        count = random.randint(0, len(self.pending))
        content = bytearray(self._after_some(count))

        for change in self.pending[count : count + 1]:
            if change.data is not None and not change.durable:
                part = change.data[: random.randint(0, len(change.data))]
                change._replace(data=part).apply(content)

        return bytes(content)

    def _after_some(self, count: int) -> bytes:
        changes = [c for i, c in enumerate(self.pending) if i < count or c.durable]
        return _after(self.durable, changes)

    def _dirty_sectors(self, early: int, late: int) -> list[int]:
        found: set[int] = set()

        for change in self.pending[early:late]:
            if change.data is not None and not change.durable:
                end = change.offset + len(change.data)
                found.update(range(change.offset // SECTOR, -(-end // SECTOR)))

        return [number * SECTOR for number in sorted(found)]


def _after(content: bytes, changes: Sequence[Change]) -> bytes:
    if not changes:
        return content

    changed = bytearray(content)

    for change in changes:
        change.apply(changed)

    return bytes(changed)


class Link:
    """A symbolic link."""

    def __init__(self, target: str) -> None:
        self.target = target


class Folder:
    """A folder: its names as the writer sees them, and as they are synced."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.now: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}


Node: TypeAlias = File | Folder | Link


class Names(NamedTuple):
    """A change of names, atomic: a creation, a removal, or a rename.

    ``entries`` are folders, names in them, and the new nodes. A sync of the first
    folder makes the change durable.
    """

    what: str
    ended: int
    entries: Sequence[tuple[Folder, str, Node | None]]

    @property
    def folder(self) -> Folder:
        return self.entries[0][0]

    @property
    def places(self) -> set[tuple[int, str]]:
        return {(id(folder), name) for folder, name, _ in self.entries}
