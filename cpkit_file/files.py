"""Files that are locked, kept open, written and synced.

Locks are ``flock``'s. A lock belongs to one opening of a file, so it holds between two
threads of a process as between two processes, and it ends with the process.
"""

from __future__ import annotations

import errno
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cpkit.driver import StoreFailure

try:
    import fcntl
except ImportError:  # Windows; opening a store raises there
    fcntl = None  # type: ignore[assignment]  # absent there, and not used then

__all__ = [
    "File",
    "FileCache",
    "LockHeld",
    "failure",
    "fcntl",
    "opened",
    "sync_content",
    "sync_names",
    "write_all",
]

# Seconds that a worker thread polls for a lock. A commit of another process is shorter,
# and a process that is stopped must not block worker threads.
_POLL = 0.02
# macOS, where fsync stops at the drive's cache.
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)


class LockHeld(Exception):
    """Another process holds the lock of this file; nothing was done."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def failure(exc: OSError, *, unknown: bool = False) -> StoreFailure:
    """Return the driver kit's error for one of the operating system.

    ``unknown`` says that the write may have been applied.
    """
    failed = StoreFailure("unknown" if unknown else "rejected", str(exc))
    failed.__cause__ = exc
    return failed


@contextmanager
def opened(path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file for the time of the block; a symbolic link is not followed.

    ``O_CREAT`` creates it for its owner alone.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)

    try:
        yield fd
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write everything; one call may write less, on a disk that is nearly full."""
    done = os.write(fd, data)

    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])


def sync_content(fd: int) -> None:
    """Return when the file's content will survive a power loss."""
    if _FULL_SYNC is None:
        os.fdatasync(fd)
    else:
        fcntl.fcntl(fd, _FULL_SYNC)


def sync_names(directory: str) -> None:
    """Return when the names in the directory will survive a power loss."""
    with opened(directory) as fd:
        os.fsync(fd)


class File:
    """An open file that can be locked; a symbolic link is not followed.

    ``size`` is from the moment when the file was locked. ``index`` is for the user of
    the file: while the file is open, no other file has its inode.
    """

    __slots__ = ("_inode", "fd", "index", "path", "size", "writable")

    def __init__(self, path: str, flags: int) -> None:
        self.fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)
        self.path = path
        self.writable = bool(flags & os.O_RDWR)
        self.size = 0
        self.index: Any = None
        self._inode: tuple[int, int] | None = None

    def lock(self, how: int) -> bool:
        """Lock the file; return ``False`` if the path leads to another file by now.

        The file is closed then, and also where this raises.
        """
        try:
            self._flock(how)

            if self._inode is None:
                mine = os.fstat(self.fd)
                self._inode = mine.st_dev, mine.st_ino

            found = os.lstat(self.path)
        except FileNotFoundError:
            self.close()
            return False
        except BaseException:
            self.close()
            raise

        if (found.st_dev, found.st_ino) != self._inode:
            self.close()
            return False

        self.size = found.st_size
        return True

    def unlock(self) -> None:
        """Release the lock and keep the file open."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the lock and close the file.

        Closing alone leaves the lock to a child process that was forked meanwhile.
        """
        try:
            self.unlock()
        finally:
            os.close(self.fd)

    def _flock(self, how: int) -> None:
        """Lock, or raise `LockHeld`: ``flock`` itself has no time limit."""
        deadline = 0.0
        pause = 0.0001

        while True:
            try:
                fcntl.flock(self.fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                deadline = deadline or time.monotonic() + _POLL

                if time.monotonic() > deadline:
                    raise LockHeld(self.path) from None
            else:
                return

            time.sleep(pause)
            pause = min(2 * pause, 0.002)


class FileCache:
    """Opens files, and keeps up to ``limit`` of them open between operations.

    A file in use is not in the cache, so that no other thread shares its lock: another
    thread that needs the file meanwhile opens it again. Several threads may use the
    cache at once: each step is a single operation of the dictionary.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: OrderedDict[str, File] = OrderedDict()

    def shared(self, path: str) -> File:
        """Open a file to read it, and lock writers out."""
        return self._locked(path, os.O_RDONLY, fcntl.LOCK_SH)

    def exclusive(self, path: str, *, create: bool = False) -> File:
        """Open a file to append to it, and lock readers and writers out."""
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0)
        return self._locked(path, flags, fcntl.LOCK_EX)

    @contextmanager
    def exclusive_directory(self, path: str) -> Iterator[int]:
        """Lock a directory for the time of the block; yield its descriptor."""
        directory = self._locked(path, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_EX)

        try:
            yield directory.fd
            directory.unlock()
        except BaseException:
            directory.close()
            raise

        self.keep(directory)

    def keep(self, file: File) -> None:
        """Keep an unlocked file open for its next user."""
        if self._idle.setdefault(file.path, file) is not file:
            os.close(file.fd)
        elif len(self._idle) > self._limit:
            self._close_oldest()

    def close(self) -> None:
        """Close the files that are not in use."""
        while self._idle:
            self._close_oldest()

    def __del__(self) -> None:
        self.close()  # of a handle that was not closed

    def _close_oldest(self) -> None:
        with suppress(KeyError):  # another thread took it
            os.close(self._idle.popitem(last=False)[1].fd)

    def _locked(self, path: str, flags: int, how: int) -> File:
        while True:
            file = self._idle.pop(path, None)

            if file is not None and flags & os.O_RDWR and not file.writable:
                os.close(file.fd)
                file = None

            file = file or self._opened(path, flags)

            if file.lock(how):
                return file

    def _opened(self, path: str, flags: int) -> File:
        try:
            return File(path, flags)
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE) or not self._idle:
                raise

        self.close()
        return File(path, flags)
