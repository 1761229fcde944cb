"""The file: created for its owner alone, and brought to the version this code knows."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from cpkit.errors import BackendUnavailable, SchemaMismatch
from cpkit_sqlite.faults import BUSY, primary_code
from cpkit_sqlite.transactions import roll_back

__all__ = ["SCHEMA_VERSION", "create_file", "prepare"]

T = TypeVar("T")

SCHEMA_VERSION = 1

_HAS_SCHEMA = "SELECT 1 FROM sqlite_master WHERE name = 'cpkit_schema'"
_SCHEMA_VERSION = "SELECT version FROM cpkit_schema"

_creating = threading.Lock()


def create_file(path: str) -> None:
    """Create the file, and its folder, for their owner alone, if they are not there.

    SQLite gives its -wal and -shm files the permissions of the file itself.
    """
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    # Under a lock, because closing any descriptor of a file drops the locks that
    # SQLite holds on it elsewhere in this process (POSIX advisory locks).
    with _creating:
        if not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def prepare(
    db: sqlite3.Connection, store: str, durability: str, patience: float
) -> None:
    """Set the connection up, and create or migrate the tables.

    Raises ``SchemaMismatch`` for a store of another version.
    """
    deadline = time.monotonic() + patience
    # What the file says is data, never code: no functions from views or triggers.
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute(f"PRAGMA synchronous = {durability.upper()}")
    mode = _patiently(
        deadline, lambda: db.execute("PRAGMA journal_mode = WAL").fetchone()
    )

    if mode not in (("wal",), ("memory",)):
        raise BackendUnavailable(store, "the file system does not support WAL")

    found = _patiently(deadline, lambda: _version(db))

    if found is None:
        found = _patiently(deadline, lambda: _create(db))

    if found != SCHEMA_VERSION:
        raise SchemaMismatch(store, found, SCHEMA_VERSION)


def _version(db: sqlite3.Connection) -> int | None:
    if not db.execute(_HAS_SCHEMA).fetchone():
        return None

    version: int = db.execute(_SCHEMA_VERSION).fetchone()[0]
    return version


def _create(db: sqlite3.Connection) -> int | None:
    """Create the tables, unless another process was first; return the version."""
    db.execute("BEGIN IMMEDIATE")

    try:
        if _version(db) is None:
            schema = files("cpkit_sqlite").joinpath("schema.sql").read_text()

            for statement in schema.split(";\n"):
                db.execute(statement)

        db.execute("COMMIT")
    finally:
        roll_back(db)

    return _version(db)


def _patiently(deadline: float, step: Callable[[], T]) -> T:
    """Repeat a step that SQLite does not wait for by itself while the file is busy.

    Turning WAL on, and recovering it, return SQLITE_BUSY without asking the busy
    handler (sqlite.org/wal.html, "Sometimes queries return SQLITE_BUSY in WAL mode").
    """
    pause = 0.001

    while True:
        try:
            return step()
        except sqlite3.OperationalError as exc:
            if primary_code(exc) not in BUSY or time.monotonic() > deadline:
                raise

        time.sleep(pause)
        pause = min(2 * pause, 0.05)
