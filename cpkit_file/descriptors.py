"""Writing and syncing files, below all that knows what is in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

try:
    import fcntl
except ImportError:  # Windows; opening a store raises there
    fcntl = None  # type: ignore[assignment]  # absent there, and not used then

__all__ = ["fcntl", "opened", "sync_content", "write_all"]


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
