"""What SQLite's errors mean to the handle."""

from __future__ import annotations

import sqlite3

from cpkit.driver import StoreFailure
from cpkit.errors import CorruptThread

# What a function on a connection raises; text that is not UTF-8 is damage.
ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)

BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def failure(
    exc: BaseException, store: str, thread_id: str = "?"
) -> StoreFailure | CorruptThread:
    """Return what to raise in place of one of `ERRORS`."""
    code = code_of(exc)

    if code in DAMAGED or isinstance(exc, UnicodeDecodeError):
        return CorruptThread(thread_id, store, str(exc))

    if code in BUSY:
        return StoreFailure("not sent", f"{exc} for longer than busy_timeout")

    # A transaction that did not reach its commit is rolled back. An I/O error can come
    # from the fsync of the commit, and only the file knows then.
    if code == sqlite3.SQLITE_IOERR:
        return StoreFailure("unknown", str(exc))

    return StoreFailure("rejected", str(exc))


def code_of(exc: BaseException) -> int:
    """Return the primary result code: the low byte of an extended one."""
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF
