"""Opening, locking and writing files, below all that knows what is in them.

Locks are ``flock``'s. They belong to one opening of a file, so they hold between two
threads of a process as between two processes, and they end with it, however it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # Windows; opening a store raises there
    fcntl = None  # type: ignore[assignment]  # absent there, and not used then

__all__ = [
    "Locked",
    "exclusive_directory",
    "fcntl",
    "let_go",
    "lock_exclusive",
    "lock_shared",
    "opened",
    "sync_content",
    "unlock",
    "write_all",
]


# macOS, where fsync stops at the drive's cache.
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)


@contextmanager
def opened(path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file for the time of the block; no symbolic link is followed.

    What ``O_CREAT`` creates is for its owner alone.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)

    try:
        yield fd
    finally:
        os.close(fd)


class Locked(NamedTuple):
    """A file that is open and locked, and how long it is."""

    fd: int
    size: int


def lock_shared(path: str) -> Locked:
    """Open a file to read it, and keep writers out until `unlock`."""
    return _locked(path, os.O_RDONLY, fcntl.LOCK_SH)


def lock_exclusive(path: str, *, create: bool, wait: bool = True) -> Locked:
    """Open a file to append to it, and keep all others out until `let_go`.

    Raises ``BlockingIOError`` where somebody has it, unless ``wait``.
    """
    return _locked(
        path,
        os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0),
        fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB),
    )


@contextmanager
def exclusive_directory(path: str) -> Iterator[int]:
    """Hold a directory's lock for the time of the block."""
    fd, _ = _locked(path, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_EX)

    try:
        yield fd
    finally:
        let_go(fd)


def unlock(fd: int) -> None:
    """Let go of the lock and keep the file open."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def let_go(fd: int) -> None:
    """Let go of the lock and close the file.

    Closing alone leaves the lock to a child that was forked meanwhile.
    """
    try:
        unlock(fd)
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


def _locked(path: str, flags: int, lock: int) -> Locked:
    while True:
        fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)

        try:
            fcntl.flock(fd, lock)
            ours = os.fstat(fd)
            there = os.lstat(path)
        except FileNotFoundError:
            os.close(fd)
            continue
        except BaseException:
            os.close(fd)
            raise

        if ours.st_ino == there.st_ino and ours.st_dev == there.st_dev:
            return Locked(fd, ours.st_size)

        # Who had the lock before has put another file there.
        os.close(fd)
