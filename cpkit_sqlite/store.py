"""Agent state in one SQLite file, for any number of processes on one machine.

``docs/drivers.md`` is the manual.

URL forms
    ``sqlite:///relative.db``, ``sqlite:////absolute.db`` and ``sqlite:///:memory:`` (a
    store of its own for each handle). Options: ``durability`` (``full`` or
    ``normal``), ``busy_timeout`` in seconds, and those of every driver.

Durability
    ``full``, the default: WAL with ``synchronous=FULL``, so an acknowledged write
    survives a power loss. ``normal``: it survives a kill of the process; a power loss
    can take the last commits, and never a part of one
    (sqlite.org/pragma.html#pragma_synchronous).

What is atomic
    Each operation is one transaction, and one trip to aiosqlite's worker thread. Writes
    that queue during a commit share the next one. A load reads messages, extra and
    calls in one transaction, on a connection of its own. So loads and writes do not
    wait for each other. The first write opens the connection for writes.

Several processes
    The file's write lock orders commits. A write that waits for the lock for longer
    than ``busy_timeout`` raises ``BackendUnavailable``, and nothing was written.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from datetime import datetime
from functools import partial
from itertools import starmap
from operator import itemgetter
from random import randrange
from typing import Any, ClassVar, Literal, TypeVar

import aiosqlite
from pydantic import Field

from cpkit.driver import (
    Append,
    Batching,
    Claim,
    Conflict,
    Decode,
    DriverOptions,
    Erase,
    FullHandle,
    Heard,
    KeyHeld,
    Limits,
    Merge,
    Outcome,
    Resolve,
    Restore,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreFailure,
    StoreInfo,
    Timeouts,
    Write,
    from_micros,
    issued_call,
    key_is_held,
    listen_in_thread,
    prefix_end,
    resolved_call,
    span,
)
from cpkit.errors import CorruptThread, InvalidURL, SchemaMismatch
from cpkit.records import Durability, Survives, ThreadInfo
from cpkit.registry import url_path
from cpkit_sqlite import queries
from cpkit_sqlite.connection import Connection, WriteAheadLog, has_wal_reset_bug, run
from cpkit_sqlite.errors import ERRORS, failure
from cpkit_sqlite.schema import (
    IN_MEMORY,
    SCHEMA_VERSION,
    File,
    find_file,
    look_at,
    prepare,
)

__all__ = ["SQLiteCheckpointer", "SQLiteStore"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

# Seconds between two looks for commits of others. One was measured to take 10 µs.
_LOOK_PAUSE = 0.015

# Numbers that a restore leaves out, at most: see `queries.ADD_THREAD`. Two million
# restores use half of all numbers.
_LEFT_OUT = 1000


class SQLiteOptions(DriverOptions):
    """``busy_timeout``: seconds to wait for another process's transaction."""

    durability: Literal["full", "normal"] = "full"
    busy_timeout: float = Field(default=30.0, gt=0, le=86_400)  # SQLite has a C int


class SQLiteStore:
    """A store in a SQLite file; ``path`` is the file's, or ``":memory:"``."""

    Options: ClassVar[type[DriverOptions]] = SQLiteOptions
    client_options: ClassVar[frozenset[str]] = frozenset()
    batching = Batching()
    timeouts = Timeouts()  # a thread cannot be cancelled; busy_timeout limits its waits
    erases = True

    def __init__(self, path: str, options: SQLiteOptions | None = None) -> None:
        self.name = f"sqlite:///{path}"
        self.limits = Limits()
        self._options = options or SQLiteOptions()
        self._file = File(path)
        self._log: WriteAheadLog | None = None
        self._connections: list[aiosqlite.Connection] = []
        self._writer: aiosqlite.Connection | None = None
        self._opening_writer = asyncio.Lock()
        self._reader: aiosqlite.Connection

    @classmethod
    def from_url(cls, url: str, options: SQLiteOptions) -> SQLiteStore:
        return cls(_path(url), options)

    @staticmethod
    async def inspect(url: str, options: DriverOptions) -> StoreInfo | None:
        path = _path(url)
        return None if path == IN_MEMORY else await asyncio.to_thread(look_at, path)

    async def open(self) -> None:
        await self.close()  # an opening that failed may have left a connection

        try:
            self._reader = await self._connect(self._prepare)
        except ERRORS as exc:
            problem = failure(exc, self.name)

            if isinstance(problem, CorruptThread):
                raise SchemaMismatch(self.name, str(exc), SCHEMA_VERSION) from exc

            raise problem from exc

    async def _open_writer(self) -> aiosqlite.Connection:
        """Return the connection that writes, opened by the first write."""
        async with self._opening_writer:
            if self._writer is None and self._log is not None:
                self._file.check_unchanged()  # a connection would create a new log
                self._writer = await self._connect(self._configure)

        return self._writer or self._reader

    async def _connect(
        self, begin: Callable[[Connection], None]
    ) -> aiosqlite.Connection:
        """Open one connection, for `close` to close, and call ``begin`` with it."""
        connection = await aiosqlite.connect(self._file.path, factory=Connection)
        self._connections.append(connection)

        try:
            await run(connection, begin)
        except (*ERRORS, StoreFailure):
            # Its thread ends also if this task is cancelled while it waits for that.
            if connection in self._connections:  # unless `close` has taken it
                self._connections.remove(connection)

            await connection.close()
            raise

        return connection

    def _configure(self, db: Connection) -> None:
        """Open the connection's file, and set what SQLite keeps for a connection."""
        durability = self._options.durability
        db.open(self._file, self._options.busy_timeout)
        db.log = self._log
        # Text that is not UTF-8 raises UnicodeDecodeError: see `errors`.
        db.text_factory = bytes.decode
        # What the file says is data, never code: no functions from views or triggers.
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute(f"PRAGMA synchronous = {durability}")
        # On macOS, an fsync passes the drive's cache only with this setting.
        db.execute(f"PRAGMA fullfsync = {durability == 'full'}")
        # See `WriteAheadLog`.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        # SQLite limits a row: two values at most (args and result), and ids.
        row = db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
        self.limits = Limits(max_value=(row - 4096) // 2)

    def _prepare(self, db: Connection) -> None:
        if self._file.path != IN_MEMORY:
            self._file = find_file(self._file.path)

        self._configure(db)
        file = self._file
        prepare(db, self.name, file.writable, self._options.busy_timeout)
        # Not before: on overlayfs the first opening for writes changes the inode.
        self._file = file.found()

        # Kept from here on, because the opening may be cancelled.
        if file.writable and file.path != IN_MEMORY:
            db.log = self._log = WriteAheadLog(db, self._file)

    async def close(self) -> None:
        self._writer = None

        # Where this task is cancelled while it closes one of them, the rest is closed
        # too: a program cannot end before the threads of its connections do.
        async with AsyncExitStack() as stack:
            stack.callback(self._close_log)

            while self._connections:
                stack.push_async_callback(self._connections.pop().close)

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def durability(self) -> Durability:
        if self._file.path == IN_MEMORY:
            advice = "the state ends with this handle: name a file to keep it"
            return Durability(Survives.NONE, {}, (advice,))

        engine = sqlite3.sqlite_version
        synchronous = self._options.durability.upper()
        advices = []

        if synchronous == "NORMAL":
            advices.append(
                "a power loss can take the last commits: take durability=normal out"
            )

        if has_wal_reset_bug(sqlite3.sqlite_version_info):
            advices.append(
                f"SQLite {engine} has the WAL-reset bug, which cpkit avoids: do not "
                "write the file with another program, or use SQLite 3.51.3 or later"
            )

        if not self._file.writable:
            advices.append("the file may only be read: every write is refused")

        return Durability(
            Survives.PROCESS if synchronous == "NORMAL" else Survives.MACHINE,
            {"journal_mode": "WAL", "synchronous": synchronous, "sqlite": engine},
            tuple(advices),
        )

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        thread_id = batch[0].thread_id

        try:
            writer = self._writer or await self._open_writer()
        except ERRORS as exc:
            raise failure(exc, self.name, thread_id) from exc

        return await self._run(writer, thread_id, self._commit, batch)

    def _commit(self, db: sqlite3.Connection, batch: Sequence[Write]) -> list[Outcome]:
        """Apply a batch in one transaction; a refused write has written nothing."""
        db.execute("BEGIN IMMEDIATE")

        try:
            outcomes = [_apply(db, write) for write in batch]
            self._file.check_unchanged()

            # With ``normal`` a commit does not sync.
            if self._log is not None and self._options.durability == "full":
                self._log.fill()

            db.execute("COMMIT")
        finally:
            _roll_back(db)

        if self._log is not None:
            self._log.checkpoint(db)

        return outcomes

    # Reads

    async def snapshot(self, thread_id: str, decode: Decode) -> Snapshot | None:
        return await self._read(thread_id, _snapshot, thread_id, decode)

    async def messages(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> list[Any]:
        return await self._read(thread_id, _messages, thread_id, start, stop, decode)

    async def holder(self, key: str) -> StoredCall | None:
        return await self._run(self._reader, "?", _newest, key)

    # Optional abilities

    async def calls(self, thread_id: str) -> list[StoredCall]:
        query = queries.CALLS
        return await self._run(self._reader, thread_id, _calls, query, thread_id)

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        return await self._read("?", _threads, prefix, after, limit, erased)

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        return await self._read("?", _markers, thread_ids)

    async def listen(self, heard: Heard) -> None:
        # Another process cannot write a file that is private or may only be read.
        if self._file.path != IN_MEMORY and self._file.writable:
            try:
                await listen_in_thread(partial(_follow, self._file.uri), heard)
            except ERRORS as exc:
                raise failure(exc, self.name) from exc

    async def dump(self, thread_id: str) -> StoredDump | None:
        return await self._read(thread_id, _dump, thread_id)

    async def _read(self, thread_id: str, query: Callable[..., T], *args: Any) -> T:
        return await self._run(self._reader, thread_id, _at_one_moment, query, *args)

    async def _run(
        self,
        connection: aiosqlite.Connection,
        thread_id: str,
        function: Callable[..., T],
        *args: Any,
    ) -> T:
        """Call a function in the connection's thread; raise what its errors mean."""
        try:
            return await run(connection, function, *args)
        except ERRORS as exc:
            raise failure(exc, self.name, thread_id) from exc
        finally:
            if connection is self._reader:  # a commit has checked it before
                self._file.check_unchanged()


class SQLiteCheckpointer(FullHandle[MessageT]):
    """A handle of a store in a SQLite file.

    ``path`` is the file's, or ``":memory:"``; a missing file is created for its owner
    alone, and so is a missing folder. Options as in the URL.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        message_type: type[MessageT] | Any = dict,
        **options: Any,
    ) -> None:
        known = SQLiteOptions(**options)
        store = SQLiteStore(os.fspath(path), known)
        super().__init__(store, message_type=message_type, options=known)


def _path(url: str) -> str:
    path = url_path(url)

    if not url.partition(":")[2].startswith("///") or path == "/":
        raise InvalidURL(
            "write sqlite:///relative.db, sqlite:////absolute.db or sqlite:///:memory:"
        )

    return path[1:]


# In the connections' threads


def _apply(db: sqlite3.Connection, write: Write) -> Outcome:
    match write:
        case Append():
            return _append(db, write)
        case Merge():
            _append(db, Append(write.thread_id, [], None, write.items))
            return None
        case Claim():
            return _claim(db, write)
        case Resolve():
            return _resolve(db, write)
        case Restore():
            return _restore(db, write)
        case Erase():
            _erase(db, write)
            return None


def _append(db: sqlite3.Connection, write: Append) -> int | Conflict:
    thread_id, bodies, expected, items = write
    number, version = _head(db, thread_id)

    if expected not in (None, version):
        return Conflict(version)

    now = _now()

    if items or (bodies and not number):
        touched = db.execute(queries.TOUCH_THREAD, (thread_id, now, now))
        number = number or touched.lastrowid or 0

    _add(db, number, version, bodies, items, now)
    return version + len(bodies)


def _add(
    db: sqlite3.Connection,
    number: int,
    version: int,
    bodies: Sequence[bytes],
    items: Sequence[tuple[bytes, bytes]],
    now: int,
) -> None:
    """Add messages and extra to the thread with this number."""
    first = (number << 32) + version
    rows = [(key, now, key - 1, body) for key, body in enumerate(bodies, first)]
    db.executemany(queries.ADD_MESSAGE, rows)
    db.executemany(queries.SET_EXTRA, [(number, *item) for item in items])


def _claim(db: sqlite3.Connection, write: Claim) -> StoredCall | None:
    known = _call(db, queries.CALL, write.thread_id, write.call.call_id)

    if known is not None:
        return known

    newest = _newest(db, write.call.idempotency_key)

    if newest is not None and newest.status != "failed":
        return newest

    now = _now()
    db.execute(queries.TOUCH_THREAD, (write.thread_id, now, now))
    db.execute(queries.ADD_CALL, issued_call(write, newest, now))
    return None


def _resolve(db: sqlite3.Connection, write: Resolve) -> StoredCall | None:
    found = _call(db, queries.CALL, write.thread_id, write.call_id)

    if found is None or found.status != "issued":
        return found

    now = _now()
    call = resolved_call(found, write, now)
    db.execute(
        queries.RESOLVE_CALL, (call.status, call.result, call.resolved_at, *call[:2])
    )

    if not call.erased:
        db.execute(queries.TOUCH_THREAD, (write.thread_id, now, now))

    return call


def _erase(db: sqlite3.Connection, write: Erase) -> None:
    number, _ = _head(db, write.thread_id)
    calls = queries.DELETE_CALLS if write.forget_keys else queries.ERASE_CALLS
    db.execute(queries.DELETE_MESSAGES, (number << 32, (number + 1) << 32))
    db.execute(queries.DELETE_EXTRA, (number,))
    db.execute(queries.DELETE_THREAD, (number,))
    db.execute(calls, (write.thread_id,))


def _restore(db: sqlite3.Connection, write: Restore) -> Conflict | KeyHeld | None:
    thread_id, created, updated = write.thread_id, write.created_at, write.updated_at
    number, version = _head(db, thread_id)

    if number or _calls(db, queries.CALLS, thread_id):
        return Conflict(version)

    if write.calls:
        _refuse(db, queries.CALL_WITHOUT_KEY)

    for call in write.calls:
        others = _calls(db, queries.ATTEMPTS, call.idempotency_key, -1)

        if key_is_held(call, others):
            return KeyHeld(call.idempotency_key, others[0].thread_id)

    if created is not None and updated is not None:
        row = randrange(_LEFT_OUT), thread_id, created, updated
        added = db.execute(queries.ADD_THREAD, row)
        _add(db, added.lastrowid or 0, 0, write.bodies, write.items, updated)

    db.executemany(queries.ADD_CALL, write.calls)
    return None


def _at_one_moment(db: sqlite3.Connection, query: Callable[..., T], *args: Any) -> T:
    """Run a query whose statements all see the same state of the file."""
    db.execute("BEGIN")

    try:
        return query(db, *args)
    finally:
        _roll_back(db)


def _snapshot(
    db: sqlite3.Connection, thread_id: str, decode: Decode
) -> Snapshot | None:
    number, _ = _head(db, thread_id)

    if not number:
        return None

    return Snapshot(
        _messages(db, thread_id, 0, None, decode),
        db.execute(queries.EXTRA, (number,)).fetchall(),
        _calls(db, queries.PENDING, thread_id),
    )


def _messages(
    db: sqlite3.Connection, thread_id: str, start: int, stop: int | None, decode: Decode
) -> list[Any]:
    number, version = _head(db, thread_id)
    first, end = span(start, stop, version)
    keys = (number << 32) + first, (number << 32) + end

    # Closed after an error too: an open statement keeps its snapshot, and the
    # connection would go on reading from that.
    with closing(db.execute(queries.MESSAGES, keys)) as rows:
        found = decode(map(itemgetter(0), rows), first)

    if missing := end - first - len(found):
        where = f"messages {first} to {end - 1}"
        raise CorruptThread(thread_id, where, f"{missing} of them are missing")

    return found


def _threads(
    db: sqlite3.Connection, prefix: str, after: str | None, limit: int, erased: bool
) -> list[ThreadInfo]:
    # An id has no NUL, so this is the smallest text above ``after``. Any text is below
    # any blob.
    first = prefix if after is None else max(prefix, after + "\0")
    page = first, prefix_end(prefix) or b"", limit
    rows = _page(db, queries.THREADS, queries.NEXT_THREAD, page)

    if erased:
        rows += _page(db, queries.ERASED_THREADS, queries.NEXT_ERASED_THREAD, page)
        rows.sort()

    return [
        ThreadInfo(thread_id, version, *_times(thread_id, *times))
        for thread_id, version, *times in rows[:limit]
    ]


def _page(
    db: sqlite3.Connection, sql: str, next_sql: str, page: tuple[str, str | bytes, int]
) -> list[Any]:
    """Return rows of threads; raise if one may be missing."""
    rows = db.execute(sql, page).fetchall()
    behind = rows[-1][0] + "\0" if rows else page[0]

    for start in (behind, b""):
        if (found := _one(db, next_sql, start)) and not isinstance(found[0], str):
            where = f"the row of {found[0]!r:.80}"
            raise CorruptThread("?", where, "its id is not text")

    return rows


def _times(thread_id: str, created: Any, updated: Any) -> tuple[datetime, datetime]:
    try:
        return from_micros(created), from_micros(updated)
    except (TypeError, OverflowError) as exc:
        raise CorruptThread(thread_id, "its times", str(exc)) from exc


def _dump(db: sqlite3.Connection, thread_id: str) -> StoredDump | None:
    _refuse(db, queries.CALL_OF_NO_THREAD, thread_id)
    calls = _calls(db, queries.CALLS, thread_id)
    number, _ = _head(db, thread_id)

    if not number:
        return StoredDump([], [], calls, None, None) if calls else None

    bodies = _messages(db, thread_id, 0, None, lambda rows, _: list(rows))
    items = db.execute(queries.EXTRA, (number,)).fetchall()
    times = _one(db, queries.THREADS, thread_id, thread_id + "\0", 1)[2:]
    return StoredDump(bodies, items, calls, *times)


def _markers(
    db: sqlite3.Connection, thread_ids: Sequence[str] | None
) -> Mapping[str, Hashable]:
    # Any text is below any blob.
    ids = [("", b"")] if thread_ids is None else [(one, one) for one in thread_ids]
    found: dict[str, tuple[object, ...]] = {}

    for sql in (queries.MARKERS, queries.ERASED_MARKERS):
        for some in ids:
            for thread_id, *values in db.execute(sql, some):
                found[thread_id] = (*found.get(thread_id, ()), *values)

    return found


def _follow(uri: str, changed: Callable[[], None], stop: threading.Event) -> None:
    """Call ``changed`` after commits of other connections, until ``stop`` is set.

    ``data_version`` changes when another connection commits, of any process. It is a
    read of shared memory (sqlite.org/pragma.html#pragma_data_version).
    """
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
        known = None

        while True:
            (version,) = db.execute("PRAGMA data_version").fetchone()

            if version != known:
                changed()

            known = version

            if stop.wait(_LOOK_PAUSE):
                return


def _head(db: sqlite3.Connection, thread_id: str) -> tuple[int, int]:
    """Return a thread's number and version, 0 and 0 for a missing thread."""
    return _one(db, queries.HEAD, thread_id) or (0, 0)


def _newest(db: sqlite3.Connection, key: str) -> StoredCall | None:
    """Return the newest attempt of a key; raise if another one may hold the key."""
    newest = _call(db, queries.ATTEMPTS, key, 1)

    if newest is None or newest.status == "failed":
        _refuse(db, queries.CALL_WITHOUT_KEY)

    return newest


def _calls(db: sqlite3.Connection, sql: str, *args: object) -> list[StoredCall]:
    return list(starmap(StoredCall, db.execute(sql, args)))


def _call(db: sqlite3.Connection, sql: str, *args: object) -> StoredCall | None:
    row = _one(db, sql, *args)
    return None if row is None else StoredCall(*row)


def _refuse(db: sqlite3.Connection, sql: str, *args: object) -> None:
    """Raise if the query finds a call that damage hides from other queries."""
    if call := _call(db, sql, *args):
        thread_id = call.thread_id if type(call.thread_id) is str else "?"
        ids = call.thread_id, call.call_id, call.idempotency_key
        where = f"call {call.call_id!r:.80}"
        raise CorruptThread(thread_id, where, f"an id is not text: {ids!r:.200}")


def _one(db: sqlite3.Connection, sql: str, *args: object) -> Any:
    return db.execute(sql, args).fetchone()


def _roll_back(db: sqlite3.Connection) -> None:
    """End a transaction that was not committed."""
    if db.in_transaction:
        db.execute("ROLLBACK")


def _now() -> int:
    return time.time_ns() // 1000
