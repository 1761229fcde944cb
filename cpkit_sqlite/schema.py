"""The file and its tables: found, created for the owner alone, and checked."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from cpkit.driver import Backoff, StoreFailure, StoreInfo, create_folder
from cpkit.errors import SchemaMismatch
from cpkit_sqlite.errors import BUSY, ERRORS, code_of

IN_MEMORY = ":memory:"
SCHEMA_VERSION = 1

_SCHEMA = files("cpkit_sqlite").joinpath("schema.sql").read_text()

# What another program can add to a table that changes or refuses writes.
_ADDED = """
SELECT type, lower(name), lower(tbl_name) FROM sqlite_master
WHERE type = 'trigger' OR (type = 'index' AND sql LIKE 'CREATE UNIQUE%')
"""

# Nanoseconds within which two changes of names may get the same time.
_SAME_TIME = 3_000_000_000

_creating = threading.Lock()


class Names:
    """The inodes that paths in one folder led to when the store was opened.

    Each look at a path was measured to take a commit 20 µs. So this looks at the folder
    first, whose time changes with each name in it. A time that is too new proves
    nothing: a file system may give two changes of names the same time.
    """

    def __init__(self, folder: str, paths: Iterable[str]) -> None:
        self._folder = folder
        self._inodes = {one: _inode(one) for one in paths if os.path.exists(one)}
        self._unchanged: tuple[int, ...] | None = None

    def changed(self) -> str | None:
        """Return a path that leads to another file now, or to none."""
        try:
            found = os.stat(self._folder)
            state = found.st_dev, found.st_ino, found.st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            state = None

        if state is not None and state == self._unchanged:
            return None

        for path, inode in self._inodes.items():
            if _inode(path) != inode:
                return path

        is_old = state is not None and time.time_ns() - state[2] > _SAME_TIME
        self._unchanged = state if is_old else None
        return None


class File(NamedTuple):
    """A store's file.

    SQLite cannot create its lock file beside a file that may only be read. Where no
    process has such a file open, it is read without locks (``immutable``), and ``seen``
    shows whether it has changed since. ``names`` are those of the file, its -wal and
    its -shm, after they were opened.
    """

    path: str
    writable: bool = True
    seen: tuple[int, ...] | None = None
    names: Names | None = None

    @property
    def uri(self) -> str:
        if self.path == IN_MEMORY:
            return f"file:{IN_MEMORY}"

        mode = "rw" if self.writable else "ro"
        immutable = "" if self.seen is None else "&immutable=1"
        return f"{Path(self.path).as_uri()}?mode={mode}{immutable}"

    def found(self) -> File:
        """Return the file with the names that lead to it now."""
        if self.path == IN_MEMORY:
            return self

        paths = [self.path + end for end in ("", "-wal", "-shm")]
        return self._replace(names=Names(os.path.dirname(self.path), paths))

    def check_unchanged(self) -> None:
        """Raise if a path does not lead to what was opened.

        SQLite goes on with files without their names, and the next opening would not
        find what was written. Raise too if another process wrote a file that is read
        without locks.
        """
        if self.names is not None and (path := self.names.changed()) is not None:
            end = path[len(self.path) :]
            what = f"its {end} file was" if end else "the file was moved,"
            reason = f"{what} deleted or replaced: open the store again"
            raise StoreFailure("rejected", reason)

        if self.seen is not None and self.seen != _stamp(self.path):
            reason = "another process writes the file: open the store again"
            raise StoreFailure("rejected", reason)


def find_file(path: str) -> File:
    """Return the file, created where it is missing, its folder too.

    SQLite gives the -wal and -shm files the permissions of the file itself.
    """
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    parent = os.path.dirname(folder)

    if not os.path.exists(path):
        # A missing folder above is more often a mistake in the URL.
        if not os.path.exists(parent):
            raise FileNotFoundError(
                f"there is no folder {parent!r}: correct the URL, or create the folder"
            )

        create_folder(folder)
        _check_readable(folder)
    elif not os.path.isfile(path):
        raise OSError(f"{path} is not a regular file: correct the URL")

    # Under a lock: closing a descriptor of a file releases the locks that SQLite holds
    # on it elsewhere in this process (POSIX advisory locks).
    with _creating:
        if not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))

    if os.access(path, os.W_OK) and os.access(folder, os.W_OK):
        _check_readable(folder)
        return File(path)

    return File(path, writable=False, seen=_stamp(path))


def _check_readable(folder: str) -> None:
    """Raise ``PermissionError`` for a folder whose names cannot be synced later."""
    os.scandir(folder).close()


def look_at(path: str) -> StoreInfo | None:
    """Describe a file without creating anything; ``None`` where it cannot be read."""
    path = os.path.realpath(path)  # beside it are its -wal and -shm

    try:
        uri = File(path, writable=False, seen=_stamp(path)).uri

        with closing(sqlite3.connect(uri, uri=True)) as db:
            version = _version(db)

        size = os.path.getsize(path)

        for end in ("-wal", "-shm"):
            with suppress(FileNotFoundError):  # the last process removes them
                size += os.path.getsize(path + end)
    except (FileNotFoundError, NotADirectoryError):
        return StoreInfo(False)
    except ERRORS:
        return None

    return StoreInfo(version is not None, version, size, path)


def prepare(db: sqlite3.Connection, store: str, writable: bool, timeout: float) -> None:
    """Check the file, and create the tables where it has none of them.

    Nothing is written before the file is known to be usable. Raises ``SchemaMismatch``
    for another version, and for tables of another program with the same names.
    """
    deadline = time.monotonic() + timeout
    pauses = Backoff(first=0.001, longest=0.05).pauses()

    while True:
        try:
            found = _prepare(db, writable)
            break
        except sqlite3.OperationalError as exc:
            # Turning on WAL and recovering it return SQLITE_BUSY without a wait
            # (sqlite.org/wal.html, "Sometimes Queries Return SQLITE_BUSY In WAL Mode").
            if code_of(exc) not in BUSY or time.monotonic() > deadline:
                raise

        time.sleep(next(pauses))

    if found is None:
        reason = "the file may only be read, and has no tables of cpkit"
        raise StoreFailure("rejected", reason)

    if found != SCHEMA_VERSION:
        raise SchemaMismatch(store, found, SCHEMA_VERSION)


def _prepare(db: sqlite3.Connection, writable: bool) -> object:
    """Turn on WAL, create missing tables, and return what `_version` says then."""
    found = _version(db)

    if writable and found in (None, SCHEMA_VERSION):
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()

        if mode not in ("wal", "memory"):
            raise StoreFailure("rejected", "the file system does not support WAL")

        if found is None:
            try:
                db.executescript(_SCHEMA)
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

        # This also opens -wal and -shm, where the file was not in WAL mode before.
        found = _version(db)

    return found


def _version(db: sqlite3.Connection) -> object:
    """Return the schema's version, or what is wrong; ``None`` without tables."""
    (encoding,) = db.execute("PRAGMA encoding").fetchone()

    if encoding != "UTF-8":
        return f"text in {encoding}"

    found, expected = _tables(db), _expected()

    if not found.keys() & expected.keys():
        return None

    if found.get("cpkit_schema") == expected["cpkit_schema"]:
        row = db.execute("SELECT version FROM cpkit_schema").fetchone()

        if row != (SCHEMA_VERSION,):
            return "an empty cpkit_schema" if row is None else row[0]

    wrong = [name for name, sql in expected.items() if found.get(name) != sql]

    if wrong:
        return f"other definitions of {', '.join(wrong)}"

    # A trigger could change any write, and a unique index could refuse one.
    for kind, name, table in db.execute(_ADDED):
        if table in expected and (kind == "trigger" or name not in expected):
            return f"the {kind} {name!r:.80} on {table} is not cpkit's: drop it"

    return SCHEMA_VERSION


def _tables(db: sqlite3.Connection) -> dict[str, str]:
    """Return the tables and indexes that are named like those of the store."""
    return dict(
        db.execute(
            "SELECT lower(name), sql FROM sqlite_master "
            r"WHERE name LIKE 'cpkit\_%' ESCAPE '\' AND sql IS NOT NULL"
        )
    )


@cache
def _expected() -> dict[str, str]:
    """Return what `_tables` does for a new store."""
    with closing(sqlite3.connect(IN_MEMORY)) as db:
        db.executescript(_SCHEMA)
        return _tables(db)


def _inode(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return -1, -1

    return status.st_dev, status.st_ino


def _stamp(path: str) -> tuple[int, ...] | None:
    """Return what changes with a file; ``None`` while a process has it open."""
    if os.path.exists(f"{path}-wal") or os.path.exists(f"{path}-journal"):
        return None

    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
