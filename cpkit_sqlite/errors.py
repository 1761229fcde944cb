"""What SQLite's errors mean to the handle."""

from __future__ import annotations

import sqlite3

from cpkit.driver import StoreFailure
from cpkit.errors import CorruptThread

# What a function on a connection raises; text that is not UTF-8 is damage.
ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)

# Primary result codes (sqlite.org/rescode.html); not every module in the place of
# sqlite3 has names for them.
BUSY = {5, 6, 15}  # SQLITE_BUSY, SQLITE_LOCKED, SQLITE_PROTOCOL
_IO_ERROR = 10
_DAMAGED = {11, 26}  # SQLITE_CORRUPT, SQLITE_NOTADB


def failure(
    exc: BaseException, store: str, thread_id: str
) -> StoreFailure | CorruptThread:
    """Return what to raise in place of one of `ERRORS`."""
    code = code_of(exc)

    if code in _DAMAGED or isinstance(exc, UnicodeDecodeError):
        cure = "restore a backup, and delete the old -wal and -shm files before"
        return CorruptThread(thread_id, store, f"{exc}; {cure}")

    if code in BUSY:
        return StoreFailure("not sent", f"{exc} for longer than busy_timeout")

    # A transaction that did not reach its commit is rolled back. An I/O error can come
    # from the fsync of the commit, and only the file knows then.
    if code == _IO_ERROR or (code is None and isinstance(exc, sqlite3.Error)):
        return StoreFailure("unknown", str(exc))

    return StoreFailure("rejected", str(exc))


def code_of(exc: BaseException) -> int | None:
    """Return the primary result code: the low byte of an extended one."""
    code = getattr(exc, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
