"""Reading somebody else's SQLite file, and changing nothing about it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpkit.tools.importing.source import BadSource

__all__ = ["MAGIC", "columns", "opened"]

MAGIC = b"SQLite format 3\0"

# Where the header says how the file is written; 2 is a write-ahead log.
_WRITE_VERSION = 18


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file for reading, on one snapshot of it.

    Raises `BadSource` for a file that
    SQLite cannot read.
    """
    with path.open("rb") as file:
        header = file.read(_WRITE_VERSION + 1)

    wal = path.with_name(f"{path.name}-wal")
    # A reader of a file with a write-ahead log makes files beside it, unless it is told
    # that nobody writes: that is so where there is no log.
    is_still = header[_WRITE_VERSION:] == b"\2" and not wal.exists()
    mode = "immutable=1" if is_still else "mode=ro"
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?{mode}", uri=True, isolation_level=None
    )

    try:
        connection.execute("BEGIN")
        yield connection
    except sqlite3.DatabaseError as exc:
        raise BadSource(f"{path}: {exc}") from exc
    finally:
        connection.close()


def columns(connection: sqlite3.Connection) -> dict[str, set[str]]:
    """Return the tables with their columns."""
    rows = connection.execute(
        "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c "
        "WHERE m.type = 'table' ORDER BY m.name"
    )
    tables: dict[str, set[str]] = {}

    for table, column in rows:
        tables.setdefault(table, set()).add(column)

    return tables
