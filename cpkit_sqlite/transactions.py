"""The driver's transactions, on a plain connection in aiosqlite's worker thread.

Each function is one trip. Writes come in groups: `apply` runs a group in one
transaction, and an operation that is refused has written nothing by then, so its
neighbours are not touched by its refusal.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from itertools import groupby, starmap
from operator import itemgetter
from typing import Any, TypeVar, cast

from pydantic_core import to_json

from cpkit.driver.codec import Codec, from_micros
from cpkit.driver.ids import prefix_end, span
from cpkit.driver.writes import Append, Claim, Erase, Merge, Resolve, StoredCall, Write
from cpkit.errors import (
    CheckpointerError,
    CorruptThread,
    UnknownCall,
    VersionConflict,
)
from cpkit.records import CheckpointData, ThreadInfo

T = TypeVar("T")

# JSON texts are fetched as bytes: what is no UTF-8 is then for the codec to find, which
# names the row.

# The key of a thread's last message; one below its first key where it has none.
_LAST_KEY = """coalesce(
    (SELECT max(key) FROM cpkit_messages
     WHERE key >= number << 32 AND key < (number + 1) << 32),
    (number << 32) - 1)"""
_THREAD = f"SELECT number, {_LAST_KEY} FROM cpkit_threads WHERE thread_id = ?"
_SOME_THREADS = f"""
SELECT thread_id, number, {_LAST_KEY} FROM cpkit_threads
WHERE thread_id IN (SELECT value FROM json_each(?))
"""
_ADD_THREAD = """
INSERT INTO cpkit_threads (thread_id, created_at, updated_at) VALUES (?1, ?2, ?2)
"""
_TOUCH_THREAD = """
INSERT INTO cpkit_threads (thread_id, created_at, updated_at) VALUES (?1, ?2, ?2)
ON CONFLICT (thread_id) DO UPDATE SET updated_at = max(updated_at, ?2)
"""
_THREADS = f"""
SELECT thread_id, number, created_at, updated_at, {_LAST_KEY},
       (SELECT appended_at FROM cpkit_messages
        WHERE key >= number << 32 AND key < (number + 1) << 32
        ORDER BY key DESC LIMIT 1)
FROM cpkit_threads
WHERE thread_id >= ? AND thread_id < ? ORDER BY thread_id LIMIT ?
"""
_FORGET_THREAD = "DELETE FROM cpkit_threads WHERE number = ?"

_ADD_MESSAGE = "INSERT INTO cpkit_messages VALUES (?, ?, ?)"
_MESSAGES = """
SELECT CAST(body AS BLOB) FROM cpkit_messages WHERE key >= ? AND key < ? ORDER BY key
"""
_FORGET_MESSAGES = "DELETE FROM cpkit_messages WHERE key >= ? AND key <= ?"

_SET_EXTRA = """
INSERT INTO cpkit_extra SELECT number, ?2, ?3 FROM cpkit_threads WHERE thread_id = ?1
ON CONFLICT (thread_number, key) DO UPDATE SET value = excluded.value
"""
_EXTRA = """
SELECT CAST(key AS BLOB), CAST(value AS BLOB) FROM cpkit_extra WHERE thread_number = ?
"""
_FORGET_EXTRA = "DELETE FROM cpkit_extra WHERE thread_number = ?"

_CALL = """
SELECT thread_id, call_id, tool_name, CAST(args AS BLOB), idempotency_key, status,
       attempt, issued_at, CAST(result AS BLOB), resolved_at, erased
FROM cpkit_calls
"""
_CALL_BY_ID = _CALL + "WHERE thread_id = ? AND call_id = ?"
_LAST_ATTEMPT = _CALL + "WHERE idempotency_key = ? ORDER BY attempt DESC LIMIT 1"
_CALLS = _CALL + "WHERE thread_id = ? ORDER BY sequence"
_PENDING = _CALL + (
    "WHERE thread_id = ? AND status = 'issued' AND NOT erased ORDER BY sequence"
)
_ADD_CALL = """
INSERT INTO cpkit_calls (thread_id, call_id, tool_name, args, idempotency_key,
                         status, attempt, issued_at)
VALUES (?, ?, ?, ?, ?, 'issued', ?, ?)
"""
_RESOLVE_CALL = """
UPDATE cpkit_calls
SET status = ?, result = ?, resolved_at = ?
WHERE thread_id = ? AND call_id = ?
"""
_ERASE_CALLS = """
UPDATE cpkit_calls SET args = '{}', result = NULL, erased = 1 WHERE thread_id = ?
"""
_FORGET_CALLS = "DELETE FROM cpkit_calls WHERE thread_id = ?"


# Writing


def roll_back(db: sqlite3.Connection) -> None:
    """End a transaction that was not committed; after a commit there is none."""
    if db.in_transaction:
        db.execute("ROLLBACK")


def apply(db: sqlite3.Connection, writes: list[Write]) -> list[object]:
    """Run a group in one transaction; return an outcome, or its error, for each."""
    outcomes: list[object] = []
    db.execute("BEGIN IMMEDIATE")

    try:
        for kind, run in groupby(writes, type):
            if kind is Append:
                outcomes += _append_all(db, cast("list[Append]", list(run)))
            else:
                outcomes += [_apply_one(db, write) for write in run]

        db.execute("COMMIT")
    finally:
        roll_back(db)

    return outcomes


def _append_all(db: sqlite3.Connection, writes: list[Append]) -> list[object]:
    """Append to any number of threads with one look-up and one insertion."""
    heads = _heads(db, {write.thread_id for write in writes})
    now = _now()
    rows: list[tuple[int, int, str]] = []
    outcomes: list[object] = []

    for write in writes:
        number, last = heads.get(write.thread_id, (None, -1))
        version = 0 if number is None else _version_of(number, last)

        if write.expected_version not in (None, version):
            outcomes.append(
                VersionConflict(write.thread_id, write.expected_version, version)
            )
            continue

        if number is None and write.bodies:
            number = db.execute(_ADD_THREAD, (write.thread_id, now)).lastrowid
            assert number is not None
            last = (number << 32) - 1

        rows += [
            (key, now, body.decode()) for key, body in enumerate(write.bodies, last + 1)
        ]

        if number is not None:
            heads[write.thread_id] = number, last + len(write.bodies)

        outcomes.append(version + len(write.bodies))

    db.executemany(_ADD_MESSAGE, rows)
    return outcomes


def _heads(db: sqlite3.Connection, ids: set[str]) -> dict[str, tuple[int, int]]:
    """Return number and last key of those of the threads that are there."""
    if len(ids) == 1:
        (thread_id,) = ids
        row = _one(db, _THREAD, thread_id)
        return {} if row is None else {thread_id: row}

    rows = db.execute(_SOME_THREADS, (to_json(sorted(ids)).decode(),))
    return {thread_id: (number, last) for thread_id, number, last in rows}


def _apply_one(db: sqlite3.Connection, write: Write) -> object:
    try:
        if isinstance(write, Claim):
            return _claim(db, write)

        if isinstance(write, Resolve):
            return _resolve(db, write)

        if isinstance(write, Merge):
            _merge(db, write)
        elif isinstance(write, Erase):
            _erase(db, write)
    except CheckpointerError as refusal:
        return refusal

    return None


def _merge(db: sqlite3.Connection, write: Merge) -> None:
    db.execute(_TOUCH_THREAD, (write.thread_id, _now()))
    db.executemany(
        _SET_EXTRA,
        [(write.thread_id, key.decode(), value.decode()) for key, value in write.items],
    )


def _claim(db: sqlite3.Connection, write: Claim) -> StoredCall | None:
    call = write.call
    known = _call(db, _CALL_BY_ID, write.thread_id, call.call_id)

    if known is not None:
        return known

    last = last_attempt(db, call.idempotency_key)

    if last is not None and last.status != "failed":
        return last

    now = _now()
    db.execute(_TOUCH_THREAD, (write.thread_id, now))
    db.execute(
        _ADD_CALL,
        (
            write.thread_id,
            call.call_id,
            call.tool_name,
            write.args.decode(),
            call.idempotency_key,
            1 if last is None else last.attempt + 1,
            now,
        ),
    )
    return None


def _resolve(db: sqlite3.Connection, write: Resolve) -> StoredCall:
    place = (write.thread_id, write.call_id)
    stored = _call(db, _CALL_BY_ID, *place)

    if stored is None:
        raise UnknownCall(*place)

    if stored.status != "issued":
        return stored

    now = _now()
    result = None if stored.erased else write.result.decode()
    db.execute(_RESOLVE_CALL, (write.status, result, now, *place))

    if not stored.erased:
        db.execute(_TOUCH_THREAD, (write.thread_id, now))

    return stored._replace(status=write.status, result=result, resolved_at=now)


def _erase(db: sqlite3.Connection, write: Erase) -> None:
    row = _one(db, _THREAD, write.thread_id)

    if row is not None:
        number, last = row
        db.execute(_FORGET_MESSAGES, (number << 32, last))
        db.execute(_FORGET_EXTRA, (number,))
        db.execute(_FORGET_THREAD, (number,))

    db.execute(_FORGET_CALLS if write.forget_keys else _ERASE_CALLS, (write.thread_id,))


# Reading


def in_snapshot(db: sqlite3.Connection, query: Callable[..., T], *args: Any) -> T:
    """Run a query whose statements all see the same state of the store."""
    db.execute("BEGIN")

    try:
        return query(db, *args)
    finally:
        roll_back(db)


def load(
    db: sqlite3.Connection, codec: Codec[T], thread_id: str
) -> CheckpointData[T] | None:
    row = _one(db, _THREAD, thread_id)

    if row is None:
        return None

    number, last = row
    return CheckpointData(
        _messages(db, codec, thread_id, number, 0, _version_of(number, last)),
        codec.extra(db.execute(_EXTRA, (number,)).fetchall(), thread_id),
        [codec.record(call) for call in _calls(db, _PENDING, thread_id)],
    )


def read_range(
    db: sqlite3.Connection,
    codec: Codec[T],
    thread_id: str,
    start: int,
    stop: int | None,
) -> list[T]:
    row = _one(db, _THREAD, thread_id)

    if row is None:
        return []

    first, end = span(start, stop, _version_of(*row))
    return _messages(db, codec, thread_id, row[0], first, end)


def list_threads(
    db: sqlite3.Connection, prefix: str, after: str | None, limit: int
) -> list[ThreadInfo]:
    # No id has a NUL, so this is the least that comes after ``after``. Any text is less
    # than any blob.
    first = prefix if after is None else max(prefix, after + "\0")
    end = prefix_end(prefix) or b""
    rows = db.execute(_THREADS, (first, end, limit))
    return [
        ThreadInfo(
            thread_id,
            _version_of(number, last),
            from_micros(created_at),
            from_micros(max(updated_at, appended_at or 0)),
        )
        for thread_id, number, created_at, updated_at, last, appended_at in rows
    ]


def calls_of(db: sqlite3.Connection, thread_id: str) -> list[StoredCall]:
    """Return the thread's calls in the order of claims."""
    return _calls(db, _CALLS, thread_id)


def last_attempt(db: sqlite3.Connection, key: str) -> StoredCall | None:
    """Return the key's newest call, which holds the key unless it failed."""
    return _call(db, _LAST_ATTEMPT, key)


def _messages(
    db: sqlite3.Connection,
    codec: Codec[T],
    thread_id: str,
    number: int,
    first: int,
    end: int,
) -> list[T]:
    base = number << 32

    # Closed whatever happens: a statement that is not at its end keeps its snapshot,
    # and the connection would go on reading from that.
    with closing(db.execute(_MESSAGES, (base + first, base + end))) as rows:
        messages = codec.messages(map(itemgetter(0), rows), thread_id, first)

    if len(messages) != end - first:
        raise CorruptThread(
            thread_id,
            f"messages {first} to {end - 1}",
            f"{end - first - len(messages)} of them are missing",
        )

    return messages


def _version_of(number: int, last_key: int) -> int:
    return last_key - (number << 32) + 1


def _calls(db: sqlite3.Connection, sql: str, *args: object) -> list[StoredCall]:
    return list(starmap(StoredCall, db.execute(sql, args)))


def _call(db: sqlite3.Connection, sql: str, *args: object) -> StoredCall | None:
    row = _one(db, sql, *args)
    return None if row is None else StoredCall(*row)


def _one(db: sqlite3.Connection, sql: str, *args: object) -> Any:
    return db.execute(sql, args).fetchone()


def _now() -> int:
    return time.time_ns() // 1000
