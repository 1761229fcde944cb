"""The folder: the names in it, its creation, and how its files are locked and synced.

::

    cpkit.json                  the mark: {"cpkit":"file","version":1}
    threads/NAME~HASH.jsonl     a thread's log
    threads/NAME~HASH.jsonl.torn    unacknowledged bytes that a crash left in the log
    claims/D/HASH.SLOT          a link from a key to a log; see `cpkit_file.claims`

A log's ``HASH`` is the SHA-256 of the thread id, so that two ids never have one name,
on case-insensitive file systems either. ``NAME`` is for people: the start of the id,
with a dash for all but ``a-z0-9``.
A claim's ``HASH`` is of the idempotency key, and ``D`` is its first digit.

Locks are ``flock``'s. A lock belongs to one opening of a file, so it holds between two
threads of a process as between two processes, and it ends with the process.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from cpkit.driver import StoreFailure, StoreInfo, sync_folder
from cpkit.errors import SchemaMismatch

try:
    import fcntl
except ImportError:  # Windows; opening a store raises there
    fcntl = None  # type: ignore[assignment]  # absent there, and not used then

FORMAT_VERSION = 1
_MARK = "cpkit.json"
LOG_NAME = re.compile(r"[a-z0-9-]{1,40}~[0-9a-f]{64}\.jsonl")

# Keeps a file's name below 143 bytes, the limit of eCryptfs, the lowest in use.
_NAME_LENGTH = 40
# Claims in one subfolder wait for each other; the disk allows no more at once anyway.
_SHARDS = "0123456789abcdef"
# Seconds that a worker thread polls for a lock. Most commits of other processes take
# less. A process that is stopped must not block worker threads for longer.
_POLL = 0.02
# macOS, where fsync stops at the drive's cache.
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)


@lru_cache(8192)
def log_name(thread_id: str) -> str:
    """Return the file name of the thread's log."""
    words = words_of(thread_id) or "thread"
    return f"{words}~{sha256(thread_id.encode()).hexdigest()}.jsonl"


def words_of(thread_id: str) -> str:
    """Return what the log's name starts with; the same for a start of the id."""
    words = re.sub(r"[^a-z0-9]+", "-", thread_id.lower())
    return words[:_NAME_LENGTH].strip("-")


def claim_stem(key: str) -> str:
    """Return what the names of all links of the key start with."""
    return sha256(key.encode()).hexdigest()


def prepare(path: str, store: str) -> None:
    """Create what is missing; a complete folder is only read.

    Raises ``SchemaMismatch`` for a folder of another version.
    """
    if not hasattr(fcntl, "flock"):
        reason = "this platform has no POSIX file locks; use sqlite:///"
        raise StoreFailure("rejected", reason)

    mark, claims = os.path.join(path, _MARK), os.path.join(path, "claims")
    shards = [os.path.join(claims, shard) for shard in _SHARDS]
    folders = [os.path.join(path, "threads"), claims, *shards]

    if all(map(os.path.exists, (mark, *folders))):
        _check_version(mark, store)
        return

    above = [path, *map(str, Path(path).parents)]

    with (
        _created(reversed(above)),
        # The lock keeps an older cpkit from overwriting the mark of a newer one, and
        # other processes from relying on folders that are removed again. It fails on a
        # file system without locks.
        locked_file(os.path.realpath(path), os.O_RDONLY | os.O_DIRECTORY),
    ):
        if is_marked := os.path.exists(mark):
            _check_version(mark, store)

        _check_links(path)

        with _created(folders):
            # Another process may have created some of them, and not synced them yet.
            for folder in (claims, *above):
                with suppress(PermissionError):
                    sync_folder(folder)

            if not is_marked:
                _write_mark(mark)


@contextmanager
def _created(folders: Iterable[str]) -> Iterator[None]:
    """Create missing folders for the owner alone.

    They are removed again where the block raises ``OSError``.
    """
    made: list[str] = []

    try:
        for folder in folders:
            if not os.path.isdir(folder):
                with suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
                    made.append(folder)

        yield
    except OSError:
        for folder in reversed(made):
            with suppress(OSError):
                os.rmdir(folder)

        raise


def inspect(path: str) -> StoreInfo | None:
    """Tell whether a folder is a store; ``None`` where that is unclear."""
    try:
        version = _version(os.path.join(path, _MARK))
    except (FileNotFoundError, NotADirectoryError):
        return StoreInfo(False, path=path if os.path.exists(path) else None)
    except OSError:
        return None

    if not isinstance(version, int):
        return None

    size = 0

    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # removed since it was listed
                size += os.lstat(os.path.join(folder, name)).st_size

    return StoreInfo(True, version, size, path)


def _check_links(path: str) -> None:
    """Raise ``OSError`` on a file system without symbolic links: claims need them."""
    probe = os.path.join(path, "cpkit.probe")

    with suppress(FileNotFoundError):
        os.unlink(probe)

    os.symlink("probe", probe)
    os.unlink(probe)


def _write_mark(mark: str) -> None:
    """Write the mark, last: a folder with a mark is complete."""
    draft = f"{mark}.tmp"

    with opened(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        write_all(fd, b'{"cpkit":"file","version":%d}\n' % FORMAT_VERSION)
        sync_content(fd)

    os.rename(draft, mark)
    sync_folder(os.path.dirname(mark))


def _check_version(mark: str, store: str) -> None:
    if (found := _version(mark)) != FORMAT_VERSION:
        raise SchemaMismatch(store, found, FORMAT_VERSION)


def _version(mark: str) -> object:
    """Return the version in a mark, or a text that says what the mark has."""
    with opened(mark) as fd:
        found = os.read(fd, 1000)

    try:
        return json.loads(found)["version"]
    except (ValueError, TypeError, LookupError):
        return f"in {found!r}"


# Files that are locked, written and synced

_open: set[int] = set()


class File(NamedTuple):
    """An open file; ``size`` is from the moment when it was locked."""

    fd: int
    path: str
    size: int

    @property
    def is_writable(self) -> bool:
        """Whether the descriptor is a writer's."""
        return bool(fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_RDWR)

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
    """Open a file or folder for the time of the block; ``O_CREAT`` creates a file for
    its owner alone.

    A symbolic link is not followed, and a pipe is refused: a read would wait for ever.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    _open.add(fd)

    try:
        mode = os.fstat(fd).st_mode

        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "neither a file nor a folder", path)

        yield fd
    finally:
        _open.discard(fd)
        os.close(fd)


def _close_in_child() -> None:
    while _open:
        os.close(_open.pop())


# A forked child would keep the locks of a process that is killed.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked_file(path: str, flags: int, *, shared: bool = False) -> Iterator[File]:
    """Open and lock a file or folder for the time of the block."""
    while True:
        with opened(path, flags) as fd:
            try:
                _lock(fd, path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
                status = os.fstat(fd)

                # Deleted or replaced before the lock: try again.
                if is_at(path, status):
                    yield File(fd, path, status.st_size)
                    return
            finally:
                # Closing alone leaves the lock to a child that was forked meanwhile.
                fcntl.flock(fd, fcntl.LOCK_UN)


def locked_names(threads: str, *, shared: bool = False) -> AbstractContextManager[File]:
    """Lock the folder of the logs against renames, or ``shared`` for a list of it.

    On btrfs and tmpfs, a list made during a rename may lack the name. The lock is the
    last one that an operation takes.
    """
    # With the dot, the folder may be a symbolic link.
    return locked_file(f"{threads}/.", os.O_RDONLY | os.O_DIRECTORY, shared=shared)


def is_at(path: str, status: os.stat_result) -> bool:
    """Return whether the path leads to this file; another hard link may lead there."""
    try:
        return os.path.samestat(status, os.lstat(path))
    except FileNotFoundError:
        return False


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
