"""Reading a SQLite file that another program owns, without changing it.

Only SQLite itself opens the file. POSIX drops all locks that a process has on a file
when the process closes any descriptor of it, so an ``open()`` and ``close()`` here
would take the locks of a database that this process uses. The mode is ``mode=ro``:
``immutable=1`` takes no locks and reads wrong pages as soon as a writer opens the file.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cpkit.tools.importing.source import BadSource

__all__ = [
    "has_checkpoints",
    "is_database",
    "is_session_table",
    "is_too_old",
    "read_snapshot",
    "tables_of",
]

_CHECKPOINT_TABLES = {
    "checkpoints": {"thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint"},
    "writes": {"thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx"},
}
_SESSION_COLUMNS = {"id", "session_id", "message_data", "created_at"}


def is_database(path: Path) -> bool:
    """Return whether the path is a SQLite database with something in it.

    Raises `BadSource` if SQLite cannot read the file for another reason.
    """
    # An empty file is a valid, empty database; anything but a file cannot be one.
    if not path.is_file() or not path.stat().st_size:
        return False

    try:
        with _connection(path) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.DatabaseError as exc:
        if exc.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
            return False

        raise _bad_source(path, exc) from exc

    return True


@contextmanager
def read_snapshot(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file for reading; every statement sees the same state of it.

    Raises `BadSource` if SQLite cannot read the file.
    """
    try:
        with _connection(path) as connection:
            connection.execute("BEGIN")
            yield connection
    except sqlite3.DatabaseError as exc:
        raise _bad_source(path, exc) from exc


def tables_of(connection: sqlite3.Connection) -> dict[str, set[str]]:
    """Return the names of the columns of each table."""
    rows = connection.execute(
        "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c "
        "WHERE m.type = 'table' ORDER BY m.name"
    )
    tables: dict[str, set[str]] = {}

    for table, column in rows:
        tables.setdefault(table, set()).add(column)

    return tables


def has_checkpoints(tables: dict[str, set[str]]) -> bool:
    """Return whether these are the tables of LangGraph's SQLite saver."""
    return all(
        tables.get(name, set()) >= columns
        for name, columns in _CHECKPOINT_TABLES.items()
    )


def is_too_old(tables: dict[str, set[str]]) -> bool:
    """Return whether a saver of LangGraph before 0.2 made the table."""
    return tables.get("checkpoints", set()) >= {"thread_id", "thread_ts", "checkpoint"}


def is_session_table(columns: set[str]) -> bool:
    """Return whether this is a table of messages of the OpenAI Agents SDK."""
    return columns >= _SESSION_COLUMNS


@contextmanager
def _connection(path: Path) -> Iterator[sqlite3.Connection]:
    resolved = path.resolve()
    wal = resolved.with_name(f"{resolved.name}-wal")
    had_wal = wal.exists()
    connection = _connect(resolved, "ro")

    try:
        yield connection
    finally:
        connection.close()

        if not had_wal and wal.exists():
            _remove_wal(resolved, wal)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None)


def _remove_wal(path: Path, wal: Path) -> None:
    """Let SQLite remove the empty -wal and -shm files that a reader of WAL mode makes.

    A read-only connection leaves them behind. The last connection that may write
    removes them when it closes, and SQLite knows whether it is the last one. Where
    this process may not write the database, the files stay; they do no harm.
    """
    with suppress(sqlite3.DatabaseError, OSError):
        if os.access(path, os.W_OK) and not wal.stat().st_size:
            connection = _connect(path, "rw")

            try:
                connection.execute("PRAGMA schema_version")
            finally:
                connection.close()


def _bad_source(path: Path, exc: sqlite3.DatabaseError) -> BadSource:
    reason = str(exc)

    if exc.sqlite_errorcode == sqlite3.SQLITE_CANTOPEN:
        reason += (
            "; if it is in WAL mode, its folder must be writable: "
            "copy the file and its -wal to a folder that is"
        )

    return BadSource(f"{path}: {reason}")
