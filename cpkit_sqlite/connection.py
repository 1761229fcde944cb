"""Functions in aiosqlite's worker thread, and checkpoints of the write-ahead log."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import aiosqlite

from cpkit.driver import StoreFailure, sync_folder
from cpkit_sqlite.schema import IN_MEMORY, File

T = TypeVar("T")

_FORK = "open it after the fork only, or start the process with spawn"
# Open connections with their files, and the files that were open at the last fork.
_open: WeakKeyDictionary[Connection, str] = WeakKeyDictionary()
_inherited: set[str] = set()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _inherited.update(_open.values()))

# The log is copied into the file at this size. At 4 MB, many concurrent appends were
# measured to be a tenth to a fifth slower. At 16 MB, zeros double what is written for
# longer.
LOG_BYTES = 8 * 1024 * 1024

# Seconds to wait for the write lock before a checkpoint is left to the next commit.
_LOCK_TIMEOUT = 0.05

# Seconds for which a log that is far too large waits for its readers.
_READERS_TIMEOUT = 1.0


class Connection(sqlite3.Connection):
    """Opens no file before `open`; runs a function where aiosqlite runs a statement.

    If ``aiosqlite.connect`` fails or is cancelled, its thread goes on, and raises where
    the event loop ends first. So the file is opened by a function that `run` calls.

    A child of ``os.fork`` cannot open a file that its parent had open. SQLite would
    take the parent's locks for its own there. So the parent, when it closes, would
    delete the log that the child writes to (sqlite.org/howtocorrupt.html, 2.6).
    """

    log: WriteAheadLog | None = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self._is_open = False

    def open(self, file: File, timeout: float) -> None:
        if file.path in _inherited:
            reason = f"{file.path} was open before os.fork(): {_FORK}"
            raise StoreFailure("rejected", reason)

        super().__init__(file.uri, uri=True, timeout=timeout, isolation_level=None)
        self._is_open = True

        if file.path != IN_MEMORY:
            _open[self] = file.path

    def close(self) -> None:
        if self._is_open:
            if self.log is not None and not self.log.may_be_copied():
                self._close_without_copy()

            super().close()
            _open.pop(self, None)

    def _close_without_copy(self) -> None:
        """Keep `close` from copying the log into the file, and from deleting a log.

        Before Python 3.12 the copy is interrupted. Where nothing is left to copy, the
        log of another process that was killed is deleted all the same.
        """
        if sys.version_info >= (3, 12):
            self.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE)
        else:
            self.interrupt()

    def execute(self, sql: Any, parameters: Any = (), /) -> Any:
        if isinstance(sql, str):
            return super().execute(sql, parameters)

        result = sql(self, *parameters)
        return SimpleNamespace(fetchall=lambda: result)


async def run(
    connection: aiosqlite.Connection, function: Callable[..., T], *args: Any
) -> T:
    """Call ``function(db, *args)`` in the connection's thread.

    So a transaction is one trip there; aiosqlite's methods are one statement each. The
    connection was made with ``factory=Connection``. The function goes on where its
    caller is cancelled.
    """
    statement: Any = function
    result: Any = await connection.execute_fetchall(statement, args)
    return result  # type: ignore[no-any-return]  # what the function returned


class WriteAheadLog:
    """Keeps the ``-wal`` file small without SQLite's automatic checkpoints.

    Those run without the write lock. In SQLite before 3.51.3 such a checkpoint can race
    with a commit that restarts the log, and loses later commits (sqlite.org/wal.html,
    "The WAL-Reset Bug"). ``wal_checkpoint(FULL)`` waits for the lock, and goes on
    without it after ``busy_timeout``. So here a second connection holds the lock.

    All frames of the log's current contents have the salt that is in its header; frames
    behind them are older (sqlite.org/fileformat2.html#walformat).

    Zeros are appended to a log from a quarter of its limit on, before a commit needs
    the place. An fsync of a file that grows has to write the file system's journal too;
    an fsync of a file in which zeros were overwritten does not. SQLite ignores the
    zeros: a frame has the salt and the number of a page, which is never 0.
    """

    def __init__(self, db: sqlite3.Connection, file: File) -> None:
        # SQLite syncs the folder too after it created the log, but ignores an error.
        sync_folder(os.path.dirname(file.path))
        (page_size,) = db.execute("PRAGMA page_size").fetchone()
        self._main = file
        self._frame_size: int = 24 + page_size
        self._limit = max(1, LOG_BYTES // self._frame_size)
        self._mark = self._limit
        self._salt = b""
        self._zeros = LOG_BYTES // 4
        # Closing it does not release a lock: SQLite does not lock the log itself.
        self._path = f"{file.path}-wal"
        self._file = open(self._path, "ab+", buffering=0)
        self._next_fill = self._fill_before(self._size())

    def close(self) -> None:
        self._file.close()

    def may_be_copied(self) -> bool:
        """Tell whether the last connection that closes may copy the log into the file.

        If the log was deleted, another process may have written the file since, and the
        copy would overwrite that. No process did if there is no new log, and the file
        is older than the last commit in this log.
        """
        try:
            if os.path.exists(self._path):
                self._main.check_unchanged()
                return True

            copied = os.stat(self._main.path).st_mtime_ns
            return copied < os.fstat(self._file.fileno()).st_mtime_ns
        except (StoreFailure, OSError, ValueError):  # ValueError: closed already
            return False

    def fill(self) -> None:
        """Append zeros if the frames are near the end of the log.

        The caller is in a transaction that writes. So no other process writes to the
        log, and nothing is written over a frame. Never raises: without zeros, commits
        only take longer.
        """
        try:
            if self._salt and self._salt_of(self._next_fill) == self._salt:
                size = self._size()
                zeros = max(0, min(self._zeros, LOG_BYTES - size))
                self._next_fill = self._fill_before(size + zeros)
                self._file.write(bytes(zeros))
        except OSError:
            return

    def _fill_before(self, size: int) -> int:
        """Return the frame after which a log of this size needs more zeros.

        A short log has none, because they double the bytes that are written.
        """
        return 1 + (max(size, self._zeros) - self._zeros // 8) // self._frame_size

    def checkpoint(self, db: sqlite3.Connection) -> None:
        """Copy a log that has grown into the file, so that a later commit restarts it.

        Never raises, because the commit before it is done. What fails is tried again
        after the next commit, or when the log has grown by another quarter.
        """
        try:
            if self._has_grown():
                self._copy(db)
        except (sqlite3.Error, OSError):
            return

    def _has_grown(self) -> bool:
        """Tell whether the frame at the mark is of the log's current contents."""
        salt = self._read(16)

        if salt != self._salt:  # restarted
            self._salt, self._mark = salt, self._limit
            self._next_fill = self._fill_before(self._size())

        return bool(salt) and self._salt_of(self._mark) == salt

    def _salt_of(self, frame: int) -> bytes:
        return self._read(32 + (frame - 1) * self._frame_size + 8)

    def _read(self, position: int) -> bytes:
        return os.pread(self._file.fileno(), 8, position)

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _copy(self, db: sqlite3.Connection) -> None:
        lock = sqlite3.connect(
            self._main.uri, uri=True, timeout=_LOCK_TIMEOUT, isolation_level=None
        )

        with closing(lock):
            lock.execute("BEGIN IMMEDIATE")
            began = time.monotonic()
            self._mark = self._mark * 5 // 4 + 1
            frames, copied = _checkpoint(db)
            self._mark = max(self._mark, frames * 5 // 4)

            # Readers that overlap without a gap keep the log from being restarted. Hold
            # writers off until the readers of older states are done and all is copied.
            # Readers that begin then do not use the log; wait for those before them.
            while frames > 4 * self._limit:
                waited = time.monotonic() - began

                if copied == frames:
                    time.sleep(min(2 * waited, _READERS_TIMEOUT))
                    break

                if waited > _READERS_TIMEOUT:
                    break

                time.sleep(0.005)
                frames, copied = _checkpoint(db)


def _checkpoint(db: sqlite3.Connection) -> tuple[int, int]:
    """Return how many frames the log has, and how many of them are in the file."""
    _, frames, copied = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return frames, copied


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    """Tell whether a version of SQLite has the WAL-reset bug."""
    fixed = (3, 44, 6) <= version < (3, 45) or (3, 50, 7) <= version < (3, 51)
    return version < (3, 51, 3) and not fixed
