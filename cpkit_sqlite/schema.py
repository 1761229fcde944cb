"""The file and its tables: found, created for the owner alone, and checked."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path

from cpkit.driver import (
    FileSystem,
    Findings,
    StoreFailure,
    StoreInfo,
    backoff_pauses,
    create_folder,
    file_system,
)
from cpkit.errors import CorruptThread, SchemaMismatch
from cpkit_sqlite.errors import BUSY, code_of

IN_MEMORY = ":memory:"
SCHEMA_VERSION = 1

_SCHEMA = files("cpkit_sqlite").joinpath("schema.sql").read_text()

_PAGES = "page_size", "freelist_count", "page_count"

_creating = threading.Lock()

# Paths that are open, each with the process that opened it.
_open: list[tuple[str, int]] = []


class File:
    """The file of a store; ``path`` may be ``":memory:"``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.uri = f"file:{path}"
        self.is_writable = True
        self.system = FileSystem()
        # Device and inode of the file and of its log, and when the file was written.
        self._names: tuple[int, ...] = ()
        self._written_at = 0

    def find(self) -> None:
        """Create the file where it is missing, its folder too."""
        if self.path == IN_MEMORY:
            return

        self.path = path = os.path.realpath(self.path)
        folder = os.path.dirname(path)

        # SQLite would take the parent's locks for this process's own, and the parent
        # would delete the log that the child writes to
        # (sqlite.org/howtocorrupt.html, 2.6).
        if any(one == path and pid != os.getpid() for one, pid in _open):
            reason = f"{path} was open before os.fork(): open it after the fork only"
            raise StoreFailure("rejected", reason)

        # Under a lock: closing a descriptor of a file releases the locks that SQLite
        # holds on it elsewhere in this process (POSIX advisory locks).
        with _creating:
            if not os.path.exists(path):
                create_folder(folder)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))

        self.is_writable = os.access(path, os.W_OK) and os.access(folder, os.W_OK)
        self.uri = _uri(path, self.is_writable)
        self.system = file_system(folder)

        if file_system(path).mount != self.system.mount:
            problem = "is mounted alone, without its -wal file"
            cure = "mount its folder"
        elif self.is_writable and (names := os.stat(path).st_nlink) > 1:
            problem = f"has {names} names (hard links), each with its own -wal"
            cure = "remove the others, or copy the file"
        else:
            with suppress(FileNotFoundError):
                self._check_log(f"{path}-wal", folder)

            return

        reason = f"{path} {problem}, so that writes would be lost: {cure}"
        raise StoreFailure("rejected", reason)

    def _check_log(self, log: str, folder: str) -> None:
        """Refuse a log of another state, or one that SQLite cannot read.

        A crash left it, and an older file was restored beside it: a page of the log's
        last commit is in neither (sqlite.org/fileformat2.html#walformat). A restored
        file that is large enough is not noticed: its times and its inode can be those
        of a sound pair that was copied, or of a checkpoint that a crash ended.
        """
        frames = pages = 0

        with open(log, "rb", buffering=0) as file:
            header = file.read(32)
            size = int.from_bytes(header[8:12])

            # Frames of an older round of the log have other salts.
            while (frame := file.read(24)) and frame[8:16] == header[16:24]:
                frames += 1
                pages = int.from_bytes(frame[4:8]) or pages  # 0 but in a commit
                file.seek(size, os.SEEK_CUR)

        if pages * size > os.path.getsize(self.path) + frames * size:
            cure = f"delete {log} and {self.path}-shm, and restore the file again"
            reason = f"its -wal file belongs to another state, before a restore: {cure}"
            raise CorruptThread("", self.path, reason)

        can_map = os.path.exists(f"{self.path}-shm") or os.access(folder, os.W_OK)

        if frames and not can_map:
            reason = "SQLite cannot read the -wal file where it cannot create a file"
            cure = f"copy {self.path} and {log} to a folder that may be written"
            raise StoreFailure("rejected", f"{reason}: {cure}")

    def opened(self) -> None:
        """Note which files SQLite has opened.

        Not before, because on overlayfs the first opening for writes changes the inode.
        """
        if self.path != IN_MEMORY:
            _open.append((self.path, os.getpid()))
            self._names, self._written_at, _, _ = self._identity()

    def closed(self) -> None:
        if self._names:
            _open.remove((self.path, os.getpid()))
            self._names = ()

    def check(self) -> int:
        """Return the bytes of the log; raise if a path leads to another file now.

        SQLite goes on with files that lost their names, and the next opening would not
        find what was written. It also goes on with a file that was overwritten: `cp -a`
        keeps the inode, and sets the time of the last write back. A write of SQLite,
        which is a checkpoint here, sets that time and the time of change alike.
        """
        if not self._names:
            return 0

        names, written_at, changed_at, log_bytes = self._identity()

        if names == self._names:
            # Without a log the file is read without locks, so nothing may write it.
            may_be_written = written_at == changed_at and names[-1]

            if written_at == self._written_at or may_be_written:
                self._written_at = written_at
                return log_bytes

        reason = "the file or its -wal file was moved, deleted, replaced or overwritten"
        raise StoreFailure("rejected", f"{reason}: open the store again")

    def _identity(self) -> tuple[tuple[int, ...], int, int, int]:
        """Return the names' inodes, the times of the file, and the bytes of the log."""
        try:
            file = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return (), 0, 0, 0

        times = file.st_mtime_ns, file.st_ctime_ns

        try:
            log = os.stat(f"{self.path}-wal")
        except FileNotFoundError:
            return (file.st_dev, file.st_ino, 0), *times, 0

        return (file.st_dev, file.st_ino, log.st_ino), *times, log.st_size


def _uri(path: str, is_writable: bool) -> str:
    # SQLite cannot create its lock file beside a file that may only be read. Where no
    # process has such a file open, it is read without locks.
    is_unused = not is_writable and not os.path.exists(f"{path}-wal")
    mode = "rw" if is_writable else "ro&immutable=1" if is_unused else "ro"
    return f"{Path(path).as_uri()}?mode={mode}"


def _reading(path: str) -> closing[sqlite3.Connection]:
    """Return a connection that does not write the file or its log."""
    return closing(sqlite3.connect(_uri(path, False), uri=True))


def inspect(path: str) -> StoreInfo | None:
    """Describe a file without creating anything; ``None`` where it cannot be read."""
    path = os.path.realpath(path)  # beside it are its -wal and -shm

    if not os.path.exists(path):
        return StoreInfo(False)

    try:
        with _reading(path) as db:
            version = _version(db)
            page, free, pages = (
                db.execute(f"PRAGMA {name}").fetchone()[0] for name in _PAGES
            )
    except sqlite3.Error:
        return None

    size, dead = 0, {}

    if free * 10 > pages:
        space = f"{page * free:,} bytes of the file, which are used again"
        dead["free"] = f"{space}; VACUUM gives them to the disk"

    for end in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):  # the last process removes them
            size += os.path.getsize(path + end)

    return StoreInfo(version is not None, version, size, path, dead)


def examine(path: str) -> Findings:
    """Return what SQLite's check of the whole file finds."""
    path = os.path.realpath(path)

    try:
        with _reading(path) as db:
            rows = db.execute("PRAGMA integrity_check(10)").fetchall()
    except sqlite3.Error as exc:
        return Findings([f"{path}: {exc}"])

    return Findings([f"{path}: {found}" for (found,) in rows if found != "ok"])


def prepare(db: sqlite3.Connection, store: str, file: File, timeout: float) -> None:
    """Create the tables in a new file; raise ``SchemaMismatch`` for another version."""
    deadline = time.monotonic() + timeout

    for pause in backoff_pauses(first=0.001, longest=0.05):
        try:
            return _prepare(db, store, file)
        except sqlite3.OperationalError as exc:
            # Turning on WAL and recovering it return SQLITE_BUSY without a wait
            # (sqlite.org/wal.html, "Sometimes Queries Return SQLITE_BUSY In WAL Mode").
            if code_of(exc) not in BUSY or time.monotonic() > deadline:
                raise

        time.sleep(pause)


def _prepare(db: sqlite3.Connection, store: str, file: File) -> None:
    if (found := _version(db)) not in (None, SCHEMA_VERSION):
        raise SchemaMismatch(store, found, SCHEMA_VERSION)

    if file.is_writable:
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()

        if mode not in ("wal", "memory"):
            raise StoreFailure("rejected", "the file system does not support WAL")

        if found is None:
            db.executescript(_SCHEMA)

    _version(db)  # opens the -wal file, if the file was not in WAL mode before


def _version(db: sqlite3.Connection) -> object:
    """Return the version of the schema; ``None`` without tables."""
    table = "SELECT 1 FROM sqlite_master WHERE name = 'cpkit_schema'"

    if db.execute(table).fetchone() is None:
        return None

    return db.execute("SELECT max(version) FROM cpkit_schema").fetchone()[0]
