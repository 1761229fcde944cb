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
from cpkit_sqlite.faults import BUSY, DAMAGED, primary_code
from cpkit_sqlite.transactions import roll_back

__all__ = ["SCHEMA_VERSION", "create_file", "prepare"]

T = TypeVar("T")

SCHEMA_VERSION = 1

_HAS_SCHEMA = "SELECT 1 FROM sqlite_master WHERE name = 'cpkit_schema'"
_SCHEMA_VERSION = "SELECT version FROM cpkit_schema"

_creating = threading.Lock()


def create_file(path: str) -> str:
    """Create the file, and its folder, for their owner alone, if they are not there.

    Returns the absolute path. SQLite gives its -wal and -shm files the permissions of
    the file itself.
    """
    path = os.path.abspath(path)
    _create_folder(Path(path).parent)

    # Under a lock, because closing any descriptor of a file drops the locks that
    # SQLite holds on it elsewhere in this process (POSIX advisory locks).
    with _creating:
        if not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))

    return path


def prepare(
    db: sqlite3.Connection, store: str, durability: str, patience: float
) -> None:
    """Set the connection up, and create or migrate the tables.

    Raises ``SchemaMismatch`` for a store of another version, and for a file that
    holds no database, or one whose text does not sort as ids do.
    """
    try:
        found = _prepare(db, store, durability, time.monotonic() + patience)
    except sqlite3.DatabaseError as exc:
        if primary_code(exc) not in DAMAGED:
            raise

        raise SchemaMismatch(store, str(exc), SCHEMA_VERSION) from exc

    if found != SCHEMA_VERSION:
        raise SchemaMismatch(store, found, SCHEMA_VERSION)


def _prepare(
    db: sqlite3.Connection, store: str, durability: str, deadline: float
) -> object:
    """Return the version of the schema, or what stands in its place."""
    # What the file says is data, never code: no functions from views or triggers.
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute(f"PRAGMA synchronous = {durability.upper()}")
    # macOS needs it for a sync to pass the drive's cache; elsewhere it does nothing.
    db.execute(f"PRAGMA fullfsync = {durability == 'full'}")
    # A quarter of the checkpoints: measured, a tenth to a fifth of what many concurrent
    # appends cost. The log beside the file grows to 16 MB instead of 4.
    db.execute("PRAGMA wal_autocheckpoint = 4000")
    (encoding,) = _patiently(deadline, lambda: db.execute("PRAGMA encoding").fetchone())

    if encoding != "UTF-8":
        return f"text in {encoding}"

    mode = _patiently(
        deadline, lambda: db.execute("PRAGMA journal_mode = WAL").fetchone()
    )

    if mode not in (("wal",), ("memory",)):
        raise BackendUnavailable(store, "the file system does not support WAL")

    found = _patiently(deadline, lambda: _version(db))
    return _patiently(deadline, lambda: _create(db)) if found is None else found


def _version(db: sqlite3.Connection) -> object:
    if not db.execute(_HAS_SCHEMA).fetchone():
        return None

    row = db.execute(_SCHEMA_VERSION).fetchone()
    return "an empty cpkit_schema" if row is None else row[0]


def _create(db: sqlite3.Connection) -> object:
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


def _create_folder(folder: Path) -> None:
    """Create a folder and those above it, to which `Path.mkdir` gives other modes."""
    if not folder.exists():
        _create_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


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
