"""After a failed sync, a later sync that succeeds proves that the bytes are on disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpkit import BackendUnavailable, CorruptThread
from cpkit_file import FileCheckpointer
from cpkit_file.lines import SEAL_LENGTH
from cpkit_file.log import Log

Store = FileCheckpointer[Any]


class FailingDisk:
    """What is on disk of each file, below the calls of this process.

    The next ``failures`` syncs fail. As on Linux, a failed sync writes nothing, and
    what it was to write counts as written from then on. With ``is_full`` nothing can
    be written at an offset.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.failures = 0
        self.is_full = False
        self._dirty: dict[int, set[int]] = {}
        self._disk: dict[int, dict[int, int]] = {}
        self._pwrite, self._fdatasync = os.pwrite, os.fdatasync
        self._write = os.write
        patch.setattr(os, "write", self.write)
        patch.setattr(os, "pwrite", self.pwrite)
        patch.setattr(os, "fdatasync", self.fdatasync)

    def holds(self, path: Path) -> bool:
        """Return whether the whole file is on disk."""
        disk = self._disk[path.stat().st_ino]
        content = path.read_bytes()
        return bytes(disk.get(n, 0) for n in range(len(content))) == content

    def write(self, fd: int, data: Any) -> int:
        done = self._write(fd, data)
        end = os.fstat(fd).st_size  # logs are opened with O_APPEND
        self._changed(fd, end - done, done)
        return done

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")

        done = self._pwrite(fd, data, offset)
        self._changed(fd, offset, done)
        return done

    def fdatasync(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        dirty = self._dirty.pop(inode, set())

        if self.failures:
            self.failures -= 1
            raise OSError(5, "Input/output error")

        self._fdatasync(fd)
        content = Path(f"/proc/self/fd/{fd}").read_bytes()
        disk = self._disk.setdefault(inode, {})
        disk.update((n, content[n]) for n in dirty if n < len(content))

    def _changed(self, fd: int, start: int, count: int) -> None:
        inode = os.fstat(fd).st_ino
        self._dirty.setdefault(inode, set()).update(range(start, start + count))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingDisk]:
    with monkeypatch.context() as patch:
        yield FailingDisk(patch)


async def leave_unsynced(home: Path) -> None:
    """Write a message that is on disk, and one whose writer died before its sync."""
    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}])

    async with Store(home, durability="normal") as cp:
        await cp.append("t", [{"n": 2}])


@pytest.mark.parametrize("failures", [1, 2])
async def test_a_read_after_a_failed_one_is_on_disk(
    home: Path, log: Path, disk: FailingDisk, failures: int
) -> None:
    """Of the same handle, and of another process, which did not see the failure."""
    await leave_unsynced(home)
    assert not disk.holds(log)

    async with Store(home) as cp, Store(home) as other:
        for reader in (cp, other)[:failures]:
            disk.failures = 1

            with pytest.raises(BackendUnavailable):
                await reader.load("t")

        assert not disk.holds(log)
        assert await other.read("t") == [{"n": 1}, {"n": 2}]
        assert disk.holds(log)
        assert await cp.read("t") == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_a_failed_append_does_not_hide_what_was_not_synced(
    home: Path, log: Path, disk: FailingDisk, failures: int
) -> None:
    """Its sync was that of the message before, too."""
    await leave_unsynced(home)

    async with Store(home) as cp:
        disk.failures = failures

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{"n": 3}])

    disk.failures = 0

    async with Store(home) as other:
        assert await other.read("t") == [{"n": 1}, {"n": 2}]
        assert disk.holds(log)
        assert await other.append("t", [{"n": 3}]) == 3
        assert disk.holds(log)


@pytest.mark.parametrize("kept", [0, SEAL_LENGTH])
async def test_no_append_is_acknowledged_behind_lost_bytes(
    home: Path, log: Path, disk: FailingDisk, kept: int
) -> None:
    """The kernel may drop a block that it could not write, and read the old one.

    Before it writes, a handle looks at the last bytes only: they may be in another
    block, which was kept.
    """
    await leave_unsynced(home)

    async with Store(home) as cp:
        disk.failures, disk.is_full = 2, True

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{"n": 3}])

        disk.failures, disk.is_full = 0, False
        content = log.read_bytes()
        start = content.index(b'{"n":2}')
        end = len(content) - kept
        log.write_bytes(content[:start] + bytes(end - start) + content[end:])

        if kept:
            with pytest.raises(BackendUnavailable, match="lost"):
                await cp.append("t", [{"n": 4}])

        assert await cp.append("t", [{"n": 5}]) == 2

    async with Store(home) as other:
        assert await other.read("t") == [{"n": 1}, {"n": 5}]
        assert await other.append("t", [{"n": 6}]) == 3


async def test_damage_that_a_sync_finds_is_of_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other threads of the batch are written, and their callers are told so."""
    write_again = Log.write_again

    def damaged(log: Log) -> None:
        if log.name.startswith("bad"):
            raise log.corrupt(0, "another program changed it")

        write_again(log)

    monkeypatch.setattr(Log, "write_again", damaged)
    threads = ["first", "good", "bad", "well"]

    async with Store(tmp_path) as cp:
        outcomes = await asyncio.gather(
            *(cp.append(thread, [{}]) for thread in threads), return_exceptions=True
        )

    assert isinstance(outcomes.pop(2), CorruptThread)
    assert outcomes == [1, 1, 1]
