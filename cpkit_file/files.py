"""Files that are locked, written and synced.

Locks are ``flock``'s. A lock belongs to one opening of a file, so it holds between two
threads of a process as between two processes, and it ends with the process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from cpkit.driver import StoreFailure

try:
    import fcntl
except ImportError:  # Windows; opening a store raises there
    fcntl = None  # type: ignore[assignment]  # absent there, and not used then

__all__ = [
    "File",
    "failure",
    "fcntl",
    "lock_held",
    "locked_file",
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


class File(NamedTuple):
    """An open file; ``size`` is from the moment when it was locked."""

    fd: int
    path: str
    size: int

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)


def failure(exc: OSError, *, unknown: bool = False) -> StoreFailure:
    """Return the driver kit's error for one of the operating system.

    ``unknown`` says that the write may have been applied.
    """
    failed = StoreFailure("unknown" if unknown else "rejected", str(exc))
    failed.__cause__ = exc
    return failed


def lock_held(path: str) -> StoreFailure:
    """Return the failure of an operation that met a lock and did nothing."""
    return StoreFailure("not sent", f"another process holds the lock of {path}")


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


@contextmanager
def locked_file(path: str, flags: int, *, shared: bool = False) -> Iterator[File]:
    """Open and lock a file or folder for the time of the block."""
    while True:
        with opened(path, flags) as fd:
            try:
                _lock(fd, path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
                status = os.fstat(fd)

                # Without a name it was deleted or replaced before it was locked.
                if status.st_nlink:
                    yield File(fd, path, status.st_size)
                    return
            finally:
                # Closing alone leaves the lock to a child that was forked meanwhile.
                fcntl.flock(fd, fcntl.LOCK_UN)


def _lock(fd: int, path: str, how: int) -> None:
    """Lock a file; ``flock`` itself has no time limit."""
    deadline, pause = 0.0, 0.0001

    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            deadline = deadline or time.monotonic() + _POLL

        if time.monotonic() > deadline:
            raise lock_held(path)

        time.sleep(pause)
        pause = min(2 * pause, 0.002)


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
