"""What SQLite's errors mean in the contract's words."""

from __future__ import annotations

import sqlite3

from cpkit.errors import BackendUnavailable, CheckpointerError, CorruptThread

__all__ = ["BUSY", "DAMAGED", "primary_code", "translated"]

BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def translated(
    exc: sqlite3.Error | OSError,
    store: str,
    thread_id: str | None = None,
    *,
    writing: bool = False,
) -> CheckpointerError:
    """Return the error of the contract for one of SQLite's, which is its cause."""
    code = primary_code(exc)
    error: CheckpointerError

    if code in DAMAGED or "Could not decode" in str(exc):
        error = CorruptThread(thread_id or "?", store, str(exc))
    else:
        reason = f"{exc} for longer than busy_timeout" if code in BUSY else str(exc)
        # A transaction that did not reach its commit is rolled back. An I/O error can
        # come from the commit's own sync, after which only the file knows.
        unclear = writing and code == sqlite3.SQLITE_IOERR
        error = BackendUnavailable(store, reason, maybe_applied=unclear)

    error.__cause__ = exc
    return error


def primary_code(exc: BaseException) -> int:
    """Return the primary result code (the low byte of an extended one)."""
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF
