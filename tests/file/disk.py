"""A disk that can lose its power at any step of an operation.

`Disk` watches a folder while a store works in it. At every change of a file or a
directory, and in the middle of every write, it records the contents, which a killed
process leaves, and what has been synced, which is the least that a power loss leaves.
A file system may have written more: any file or directory can be in its newer state
while another is in its older one, and what was appended to a file can have holes or be
cut short. `Crash.outcomes` yields each such combination.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Crash", "Disk", "Tree", "make_tree", "torn_states", "tree_of"]

Entry = tuple[str, int]
"""``("file", inode)`` or ``("dir", inode)``."""

Tree = tuple[tuple[str, bytes | None], ...]
"""The paths below a folder, parents first: the content of a file, None for a folder."""


def make_tree(folder: Path, tree: Tree) -> None:
    """Let the folder have this below it, and nothing else.

    Empty files that are there stay: a store has 256, and most are never written.
    """
    wanted = dict(tree)

    for path, content in reversed(tree_of(folder)):
        if content is None:
            if path not in wanted:
                os.rmdir(f"{folder}/{path}")
        elif content or path not in wanted:
            os.unlink(f"{folder}/{path}")

    folder.mkdir(mode=0o700, exist_ok=True)

    for path, content in tree:
        place = folder / path

        if content is None:
            place.mkdir(mode=0o700, exist_ok=True)
        elif content or not place.exists():
            place.write_bytes(content)


def tree_of(folder: Path) -> Tree:
    """Return what is below the folder."""
    found: list[tuple[str, bytes | None]] = []

    for above, folders, files in os.walk(folder):
        place = os.path.relpath(above, folder)
        prefix = "" if place == "." else f"{place}/"
        found += [(f"{prefix}{name}", None) for name in folders]

        for name in files:
            path = f"{above}/{name}"
            content = Path(path).read_bytes() if os.stat(path).st_size else b""
            found.append((f"{prefix}{name}", content))

    return tuple(found)


def torn_states(before: bytes, after: bytes, sector: int = 512) -> Iterator[bytes]:
    """Yield what a power loss can leave of a file that was synced as ``before``.

    Of the bytes after that, any sectors did not reach the disk, and their bytes are
    zeros. The file has its new length or a shorter one.
    """
    first = len(before) // sector
    count = -(-len(after) // sector) - first
    assert count <= 6, "too many states"

    for lost in itertools.product([False, True], repeat=count):
        state = bytearray(after)

        for number, is_lost in enumerate(lost, first):
            if is_lost:
                start = max(len(before), number * sector)
                stop = min(len(after), (number + 1) * sector)
                state[start:stop] = bytes(stop - start)

        yield bytes(state)

    for length in {*range(len(before), len(after), 97), len(after) - 1}:
        yield after[:length]


@dataclass
class Snapshot:
    """Contents of files and entries of directories, by inode."""

    files: dict[int, bytes] = field(default_factory=dict)
    directories: dict[int, dict[str, Entry]] = field(default_factory=dict)

    def copy(self) -> Snapshot:
        return Snapshot(dict(self.files), dict(self.directories))


@dataclass
class Crash:
    """What was written and what was synced after one step; ``after`` names the step."""

    after: str
    root: int
    there: Snapshot
    synced: Snapshot

    def outcomes(self) -> Iterator[Tree]:
        """Yield each state that a crash at this step can leave."""
        files = [i for i in self.there.files if self._differs("files", i)]
        directories = [
            i for i in self.there.directories if self._differs("directories", i)
        ]
        unsure = [("files", i) for i in files] + [
            ("directories", i) for i in directories
        ]
        choices = [self._states(kind, inode) for kind, inode in unsure]
        assert math.prod(map(len, choices)) < 600, "too many mixtures"

        for chosen in itertools.product(*choices):
            state = self.there.copy()

            for (kind, inode), content in zip(unsure, chosen, strict=True):
                getattr(state, kind)[inode] = content

            yield tuple(self._tree("", self.root, state))

    def _states(self, kind: str, inode: int) -> list[Any]:
        """Return what can be left of a file or directory."""
        newer, older = getattr(self.there, kind)[inode], self._synced(kind, inode)
        states = [newer, older]
        added = len(newer) - len(older)

        if kind == "files" and newer.startswith(older) and added > 32:
            half = len(older) + added // 2
            states.append(older + bytes(added // 2) + newer[half:])
            states.append(newer[:half] + bytes(added - added // 2))
            states.append(older + bytes(added))
            lines = newer[len(older) :].splitlines(keepends=True)
            ends = itertools.accumulate(map(len, lines[:-1]))
            states += [newer[: len(older) + end] for end in ends if end > added // 3]

        if kind == "files" and not newer.startswith(older):  # it was cut meanwhile
            sectors = range(512, len(newer), 512)
            states += [older[:cut] + newer[cut:] for cut in sectors]

        return states

    def _differs(self, kind: str, inode: int) -> bool:
        return bool(getattr(self.there, kind)[inode] != self._synced(kind, inode))

    def _synced(self, kind: str, inode: int) -> Any:
        return getattr(self.synced, kind).get(inode, b"" if kind == "files" else {})

    def _tree(
        self, above: str, inode: int, state: Snapshot
    ) -> Iterator[tuple[str, bytes | None]]:
        entries = state.directories.get(inode)

        if entries is None:  # it was removed, and the removal is lost
            entries = self._synced("directories", inode)

        for name, (kind, what) in entries.items():
            if kind == "dir":
                yield f"{above}{name}", None
                yield from self._tree(f"{above}{name}/", what, state)
            else:
                # A file that was removed has only what was synced of it.
                content = state.files.get(what, self._synced("files", what))
                yield f"{above}{name}", content


class Disk:
    """Records each step that writes below a folder, in `crashes`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.crashes: list[Crash] = []
        self._monkeypatch = monkeypatch
        self._synced = Snapshot()
        # Kept open, so that no inode's number is used again.
        self._held: dict[int, int] = {}
        self._open = os.open

    def __enter__(self) -> Disk:
        self._synced = self._look()

        for name in ("rename", "unlink", "ftruncate", "mkdir"):
            self._watch(name)

        self._watch("open", lambda _, flags, *__: bool(flags & os.O_CREAT))
        self._watch("fsync", then=self._sync)
        self._watch("fdatasync", then=self._sync)
        self._halve_writes()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._monkeypatch.undo()

        for fd in self._held.values():
            os.close(fd)

    def end(self) -> None:
        """Record the state after the last step, when everything is acknowledged."""
        self._note("the end")

    def _watch(
        self,
        name: str,
        wanted: Callable[..., bool] = lambda *_: True,
        then: Callable[[int], None] | None = None,
    ) -> None:
        original = getattr(os, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)

            if wanted(*args):
                if then is not None:
                    then(args[0])

                self._note(name)

            return result

        self._monkeypatch.setattr(os, name, watched)

    def _halve_writes(self) -> None:
        original = os.write

        def write(fd: int, data: Any) -> int:
            data = memoryview(data)
            half = original(fd, data[: len(data) // 2])
            self._note("half of write")
            rest = original(fd, data[half:])
            self._note("write")
            return half + rest

        self._monkeypatch.setattr(os, "write", write)

    def _note(self, after: str) -> None:
        root = os.stat(self.folder).st_ino
        self.crashes.append(Crash(after, root, self._look(), self._synced.copy()))

    def _sync(self, fd: int) -> None:
        status = os.fstat(fd)
        now = self._look()
        kind = "directories" if stat.S_ISDIR(status.st_mode) else "files"
        found = getattr(now, kind).get(status.st_ino)

        # A file that was removed from the folder does not count.
        if found is not None:
            getattr(self._synced, kind)[status.st_ino] = found

    def _look(self) -> Snapshot:
        seen = Snapshot()
        pending = [str(self.folder)]

        while pending:
            directory = pending.pop()
            entries: dict[str, Entry] = {}

            for one in os.scandir(directory):
                inode = one.inode()

                if one.is_dir():
                    entries[one.name] = ("dir", inode)
                    pending.append(one.path)
                else:
                    entries[one.name] = ("file", inode)

                    if inode not in seen.files:
                        seen.files[inode] = self._content(one.path, inode)

            seen.directories[os.stat(directory).st_ino] = entries

        return seen

    def _content(self, path: str, inode: int) -> bytes:
        if inode not in self._held:
            self._held[inode] = self._open(path, os.O_RDONLY)

        fd = self._held[inode]
        return os.pread(fd, os.fstat(fd).st_size, 0)
