"""Agent state in one SQLite file, for any number of processes on one machine.

``docs/drivers.md`` is the manual.

URL forms
    ``sqlite:///relative.db``, ``sqlite:////absolute.db`` and ``sqlite:///:memory:`` (a
    store of its own for each handle). Options: ``durability``, ``busy_timeout`` in
    seconds, and those of every driver.

Durability
    ``full``, the default: WAL with ``synchronous=FULL``, so an acknowledged write
    survives a power loss. ``normal``: it survives a kill of the process; a power loss
    can take the last commits, and never a part of one.

What is atomic
    Each batch of writes is one transaction, and one trip to a thread. A load reads all
    in one transaction, on a connection of its own: it does not wait for writes.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import starmap
from operator import itemgetter
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import Field

from cpkit.driver import (
    Append,
    Claim,
    Conflict,
    Decode,
    DriverOptions,
    Erase,
    EraseCalls,
    Findings,
    Heard,
    KeyHeld,
    Limits,
    Merge,
    Outcome,
    Resolve,
    Restore,
    SearchingHandle,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreInfo,
    Trim,
    Write,
    from_micros,
    issued_call,
    key_is_held,
    listen_in_thread,
    prefix_end,
    resolved_call,
    span,
    to_micros,
)
from cpkit.driver.seal import SEALED
from cpkit.driver.together import Together
from cpkit.errors import CorruptThread, InvalidURL, SchemaMismatch
from cpkit.records import Durability, Survives, ThreadInfo
from cpkit.registry import url_path
from cpkit_sqlite import queries, schema
from cpkit_sqlite.connection import Connection, copy_log
from cpkit_sqlite.errors import ERRORS, failure
from cpkit_sqlite.schema import IN_MEMORY, SCHEMA_VERSION, File

__all__ = ["SQLiteCheckpointer", "SQLiteStore"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")
_DB: TypeAlias = "sqlite3.Connection"

# Bytes of the -wal file at which it is copied into the file. At 4 MB, many concurrent
# appends were measured to be a tenth to a fifth slower.
LOG_BYTES = 8 * 1024 * 1024

# Seconds between two looks for commits of others. One was measured to take 10 µs.
_LOOK_PAUSE = 0.015


class SQLiteOptions(DriverOptions):
    """``busy_timeout``: seconds to wait for another process's transaction."""

    durability: Literal["full", "normal"] = "full"
    busy_timeout: float = Field(default=30.0, gt=0, le=86_400)  # SQLite has a C int


class SQLiteStore:
    """A store in a SQLite file; ``path`` is the file's, or ``":memory:"``."""

    Options: ClassVar[type[DriverOptions]] = SQLiteOptions
    client_options: ClassVar[frozenset[str]] = frozenset()
    survives_by_default = Survives.MACHINE
    # SQLite limits a row: two values at most (args and result), and ids.
    limits = Limits(max_value=(1_000_000_000 - 4096) // 2)
    max_writes = 256
    timeout = None  # a thread cannot be cancelled; busy_timeout limits its waits
    locks_threads = False
    erases = trims = erases_calls = takes_bytes = True

    def __init__(self, path: str, options: SQLiteOptions | None = None) -> None:
        self.name = f"sqlite:///{path}"
        self._options = options or SQLiteOptions()
        self._file = File(path)
        self._connections: list[Connection] = []
        self._tried_at = 0  # the size of the log at the last try to copy it
        self._together = Together[str, Snapshot | None]()
        self._reader: Connection
        self._writer: Connection

    @classmethod
    def from_url(cls, url: str, options: SQLiteOptions) -> SQLiteStore:
        return cls(_path(url), options)

    @staticmethod
    async def inspect(url: str, options: DriverOptions) -> StoreInfo | None:
        path = _path(url)
        return (
            None if path == IN_MEMORY else await asyncio.to_thread(schema.inspect, path)
        )

    @staticmethod
    async def examine(url: str, options: DriverOptions, whole: bool) -> Findings:
        path = _path(url)

        if path == IN_MEMORY or not whole:
            return Findings()

        return await asyncio.to_thread(schema.examine, path)

    async def open(self) -> None:
        await self.close()  # an opening that failed may have left a connection

        try:
            self._reader = self._writer = await self._connect(self._open)

            if self._file.path != IN_MEMORY:
                self._writer = await self._connect(self._configure)
        except ERRORS as exc:
            problem = failure(exc, self.name, "")

            if isinstance(problem, CorruptThread):
                raise SchemaMismatch(self.name, str(exc), SCHEMA_VERSION) from exc

            raise problem from exc

    async def _connect(self, begin: Callable[[Connection], None]) -> Connection:
        connection = Connection()
        self._connections.append(connection)  # for `close`, whatever happens
        await connection.call(begin, connection)
        return connection

    def _open(self, connection: Connection) -> None:
        self._file.find()
        self._configure(connection)
        schema.prepare(connection.db, self.name, self._file, self._options.busy_timeout)
        self._file.opened()
        self._file.system.warn()

    def _configure(self, connection: Connection) -> None:
        """Open the file, and set what SQLite keeps for a connection."""
        durability = self._options.durability
        timeout = self._options.busy_timeout
        connection.db = db = sqlite3.connect(
            self._file.uri, uri=True, timeout=timeout, isolation_level=None
        )
        # Text that is not UTF-8 raises UnicodeDecodeError: see `errors`.
        db.text_factory = bytes.decode
        # What the file says is data, never code: no functions from views or triggers.
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute(f"PRAGMA synchronous = {durability}")
        # On macOS, an fsync passes the drive's cache only with this setting.
        db.execute(f"PRAGMA fullfsync = {durability == 'full'}")
        # See `copy_log`.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")

    async def close(self) -> None:
        ending, self._connections = self._connections, []

        # All of them end, even if this task is cancelled while it waits.
        await asyncio.gather(*[one.end() for one in ending])

        for one in ending:
            one.thread.join()

        self._file.closed()

    def durability(self) -> Durability:
        if self._file.path == IN_MEMORY:
            ends = "the state ends with this handle: name a file to keep it"
            return Durability(Survives.NONE, {}, (ends,))

        system = self._file.system
        survives, advice = system.survives, [*system.advice]

        if self._options.durability == "normal":
            survives = Survives.PROCESS
            advice.append("durability=normal: a power loss can take the last commits")

        if not self._file.is_writable:
            advice.append("the file may only be read: every write is refused")

        settings = {
            "journal_mode": "WAL",
            "synchronous": self._options.durability.upper(),
            "sqlite": sqlite3.sqlite_version,
            "file_system": system.type,
        }
        return Durability(survives, settings, tuple(advice))

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        try:
            return await self._writer.call(self._commit, batch)
        except ERRORS as exc:
            raise failure(exc, self.name, batch[0].thread_id) from exc

    def _commit(self, batch: Sequence[Write]) -> list[Outcome]:
        """Apply a batch in one transaction; a refused write has written nothing."""
        db = self._writer.db
        db.execute("BEGIN IMMEDIATE")

        try:
            now = time.time_ns() // 1000
            heads: _Heads = {}
            outcomes = [_APPLY[type(one)](db, one, now, heads) for one in batch]
            log_bytes = self._file.check()
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")

        # The answer waits for the copy. The commit after it restarts the log, and cuts
        # it to its limit. A log that stays longer has a reader of an older state. For
        # that reader nothing waits: the copy is tried again a sixteenth later.
        if log_bytes > LOG_BYTES:
            if not self._tried_at <= log_bytes < self._tried_at + LOG_BYTES // 16:
                self._tried_at = log_bytes
                copy_log(db, self._file.uri)

        return outcomes

    # Reads

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        if start == stop == 0:
            read_many = partial(self._read, thread_id, _snapshots)
            return await self._together.read(thread_id, read_many)

        return await self._read(thread_id, _snapshot, thread_id, start, stop, decode)

    async def holder(self, key: str) -> StoredCall | None:
        return await self._read("", _call, queries.ATTEMPTS, key, 1)

    async def _read(self, thread_id: str, query: Callable[..., T], *args: Any) -> T:
        try:
            return await self._reader.call(self._query, query, *args)
        except ERRORS as exc:
            raise failure(exc, self.name, thread_id) from exc

    def _query(self, query: Callable[..., T], *args: Any) -> T:
        """Run a query whose statements all see the same state of the file."""
        db = self._reader.db
        self._file.check()
        db.execute("BEGIN")

        try:
            return query(db, *args)
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")

    # Optional abilities

    async def calls(self, thread_id: str) -> list[StoredCall]:
        return await self._read(thread_id, _calls, queries.CALLS, thread_id)

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        return await self._read("", _threads, prefix, after, limit, erased)

    async def dump(self, thread_id: str) -> StoredDump | None:
        return await self._read(thread_id, _dump, thread_id)

    async def search(
        self, patterns: Sequence[str], prefix: str, limit: int, seconds: float
    ) -> list[tuple[str, int]]:
        page = prefix, prefix_end(prefix) or b"", *patterns, limit
        until = time.monotonic() + seconds

        if self._file.path == IN_MEMORY:
            return await self._read("", _search, page, until, threading.Event())

        found: list[tuple[str, int]] = []

        # In a thread and a connection of its own, so that loads do not wait for it.
        def search(_: Callable[[], None], has_left: threading.Event) -> None:
            with closing(sqlite3.connect(self._file.uri, uri=True)) as db:
                self._file.check()
                db.text_factory = bytes.decode
                found.extend(_search(db, page, until, has_left))

        try:
            await listen_in_thread(search, lambda _: None)
        except ERRORS as exc:
            raise failure(exc, self.name, "") from exc

        return found

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        return await self._read("", _markers, thread_ids)

    async def listen(self, heard: Heard) -> None:
        try:
            await listen_in_thread(partial(_follow, self._file.uri), heard)
        except ERRORS as exc:
            raise failure(exc, self.name, "") from exc


class SQLiteCheckpointer(SearchingHandle[MessageT]):
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


# Writes, in the thread

# A row of `queries.HEAD`: a thread's number, its version, the time of its last message,
# and the position of its first; zeros for a missing thread.
_Head: TypeAlias = tuple[int, int, int, int]
# Heads as the appends of this batch left them: only a thread's first append asks.
_Heads: TypeAlias = dict[str, _Head]


def _append(db: _DB, write: Append, now: int, heads: _Heads) -> Outcome:
    thread_id, bodies, expected, items, _ = write
    number, version, last, _ = heads.get(thread_id) or _head(db, thread_id, heads)

    if expected is not None and expected != version:
        return Conflict(version)

    if items or (bodies and not number):
        touched = db.execute(queries.TOUCH_THREAD, (thread_id, now, now, now))
        number = number or touched.lastrowid or 0

    if bodies:
        first = (number << 32) + version
        rows = [(key, now, last, body) for key, body in enumerate(bodies, first)]
        is_encrypted = bodies[0].startswith(SEALED)
        add = queries.ADD_ENCRYPTED if is_encrypted else queries.ADD_MESSAGE
        db.executemany(add, rows)
        version += len(bodies)

    if items:
        db.executemany(queries.SET_EXTRA, [(number, *item) for item in items])

    heads[thread_id] = number, version, last, 0
    return version


def _merge(db: _DB, write: Merge, now: int, heads: _Heads) -> None:
    _append(db, Append(write.thread_id, [], None, write.items), now, heads)


def _claim(db: _DB, write: Claim, now: int, heads: _Heads) -> Outcome:
    known = _call(db, queries.CALL, write.thread_id, write.call_id)
    newest = _call(db, queries.ATTEMPTS, write.idempotency_key, 1)

    if known or (newest and newest.status != "failed"):
        return known or newest

    heads.pop(write.thread_id, None)  # a claim may create the thread
    db.execute(queries.TOUCH_THREAD, (write.thread_id, now, now, now))
    db.execute(queries.ADD_CALL, issued_call(write, newest, now))
    return None


def _resolve(db: _DB, write: Resolve, now: int, heads: _Heads) -> Outcome:
    found = _call(db, queries.CALL, write.thread_id, write.call_id)

    if found is None or found.status != "issued":
        return found

    call = resolved_call(found, write, now)
    changed = call.status, call.result, call.resolved_at
    db.execute(queries.RESOLVE_CALL, (*changed, call.thread_id, call.call_id))

    if not call.erased:
        db.execute(queries.TOUCH_THREAD, (write.thread_id, now, now, now))

    return call


def _erase(db: _DB, write: Erase, now: int, heads: _Heads) -> Outcome:
    number, version, *_ = _head(db, write.thread_id, heads)

    if write.expected_version not in (None, version):
        return Conflict(version)

    calls = queries.DELETE_CALLS if write.forget_keys else queries.ERASE_ALL_CALLS
    db.execute(queries.DELETE_MESSAGES, (number << 32, (number + 1) << 32))
    db.execute(queries.DELETE_EXTRA, (number,))
    db.execute(queries.DELETE_THREAD, (number,))
    db.execute(calls, (write.thread_id,))
    return None


def _trim(db: _DB, write: Trim, now: int, heads: _Heads) -> Outcome:
    number, version, last, first = _head(db, write.thread_id, heads)

    if write.expected_version not in (None, version):
        return Conflict(version)

    before = min(write.before, version)

    if before <= first:
        return 0

    keys = (number << 32) + first, (number << 32) + before
    db.execute(queries.DELETE_MESSAGES, keys)
    db.execute(queries.SET_TRIMMED, (before, last, number))
    return before - first


def _erase_calls(db: _DB, write: EraseCalls, now: int, heads: _Heads) -> Outcome:
    _, version, *_ = _head(db, write.thread_id, heads)

    if write.expected_version not in (None, version):
        return Conflict(version)

    return db.execute(queries.ERASE_ENDED_CALLS, write[:2]).rowcount


def _restore(db: _DB, write: Restore, now: int, heads: _Heads) -> Outcome:
    thread_id, created, updated = write.thread_id, write.created_at, write.updated_at
    number, version, *_ = _head(db, thread_id, heads)

    if number or _calls(db, queries.CALLS, thread_id):
        return Conflict(version)

    for call in write.calls:
        others = _calls(db, queries.ATTEMPTS, call.idempotency_key, -1)

        if key_is_held(call, others):
            return KeyHeld(call.idempotency_key, others[0].thread_id)

    if created is not None and updated is not None:
        row = db.execute(queries.TOUCH_THREAD, (thread_id, created, updated, now))
        db.execute(queries.SET_TRIMMED, (write.first, updated, row.lastrowid))
        _append(db, Append(thread_id, write.bodies, None, write.items), updated, heads)
        db.execute(queries.SET_UPDATED, (updated, thread_id))

    db.executemany(queries.ADD_CALL, write.calls)
    return None


_APPLY: dict[type[Write], Callable[..., Outcome]] = {
    Append: _append,
    Merge: _merge,
    Claim: _claim,
    Resolve: _resolve,
    Erase: _erase,
    Trim: _trim,
    EraseCalls: _erase_calls,
    Restore: _restore,
}


# Reads, in the thread


def _snapshot(
    db: _DB, thread_id: str, start: int, stop: int | None, decode: Decode
) -> Snapshot | None:
    number, version, _, trimmed = _head(db, thread_id, {})

    if not number:
        return None

    first, end = span(start, stop, version, trimmed)
    keys = (number << 32) + first, (number << 32) + end

    found: list[Any] = []

    if first < end:  # a list of sessions reads extra alone
        # Closed after an error too: an open statement keeps its snapshot, and the
        # connection would go on reading from that.
        with closing(db.execute(queries.MESSAGES, keys)) as rows:
            found = decode(map(itemgetter(0), rows), first)

    if missing := end - first - len(found):
        where = f"messages {first} to {end - 1}"
        raise CorruptThread(thread_id, where, f"{missing} of them are missing")

    items = db.execute(queries.EXTRA, (number,)).fetchall()
    pending = _calls(db, queries.PENDING, thread_id)
    return Snapshot(found, items, pending, version, first)


def _snapshots(db: _DB, thread_ids: list[str]) -> list[Snapshot | None]:
    """Return threads without messages."""
    return [_snapshot(db, one, 0, 0, lambda *_: []) for one in thread_ids]


def _threads(
    db: _DB, prefix: str, after: str | None, limit: int, erased: bool
) -> list[ThreadInfo]:
    # An id has no NUL, so this is the smallest text above ``after``. Any text is below
    # any blob.
    first = prefix if after is None else max(prefix, after + "\0")
    page = first, prefix_end(prefix) or b"", limit
    rows = db.execute(queries.THREADS, page).fetchall()

    if erased:
        rows += db.execute(queries.ERASED_THREADS, page).fetchall()
        rows.sort()

    found = []

    for thread_id, version, *times in rows[:limit]:
        try:
            found.append(ThreadInfo(thread_id, version, *map(from_micros, times)))
        except (TypeError, OverflowError) as exc:
            raise CorruptThread(thread_id, "its times", str(exc)) from exc

    return found


def _dump(db: _DB, thread_id: str) -> StoredDump | None:
    calls = _calls(db, queries.CALLS, thread_id)
    found = _snapshot(db, thread_id, 0, None, lambda rows, _: [*rows])

    if found is None:
        return StoredDump([], [], calls, None, None) if calls else None

    info = _threads(db, thread_id, None, 1, False)[0]
    times = to_micros(info.created_at), to_micros(info.updated_at)
    return StoredDump(found.messages, found.items, calls, *times, found.first)


def _search(
    db: _DB, page: tuple[Any, ...], until: float, has_left: threading.Event
) -> list[tuple[str, int]]:
    like = r"body LIKE ? ESCAPE '\'"
    likes = " OR ".join([like] * (len(page) - 3))
    query = queries.SEARCH.replace(like, likes)
    # It ends the query where it returns true.
    db.set_progress_handler(
        lambda: has_left.is_set() or time.monotonic() > until, 1_000
    )

    try:
        return db.execute(query, page).fetchall()
    finally:
        db.set_progress_handler(None, 0)


def _markers(db: _DB, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
    # Any text is below any blob.
    ids = [("", b"")] if thread_ids is None else [(one, one) for one in thread_ids]
    rows = (row for some in ids for row in db.execute(queries.MARKERS, some))
    return {thread_id: tuple(values) for thread_id, *values in rows}


def _follow(uri: str, changed: Callable[[], None], stop: threading.Event) -> None:
    """Call ``changed`` after commits of other connections, until ``stop`` is set.

    ``data_version`` changes when another connection commits, of any process. It is a
    read of shared memory (sqlite.org/pragma.html#pragma_data_version).
    """
    with closing(sqlite3.connect(uri, uri=True)) as db:
        known = None

        while not stop.wait(_LOOK_PAUSE):
            (version,) = db.execute("PRAGMA data_version").fetchone()

            if version != known:
                changed()
                known = version


def _head(db: _DB, thread_id: str, heads: _Heads) -> _Head:
    """Return the head that is stored, and forget the one that appends have left."""
    heads.pop(thread_id, None)
    return db.execute(queries.HEAD, (thread_id,)).fetchone() or (0, 0, 0, 0)


def _calls(db: _DB, sql: str, *args: object) -> list[StoredCall]:
    return list(starmap(StoredCall, db.execute(sql, args)))


def _call(db: _DB, sql: str, *args: object) -> StoredCall | None:
    row = db.execute(sql, args).fetchone()
    return None if row is None else StoredCall(*row)
