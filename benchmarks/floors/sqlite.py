"""The floor of SQLite: aiosqlite, one autocommit INSERT in one trip to its thread."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import aiosqlite
from pydantic_core import from_json, to_json

from benchmarks.floors.decoding import decoded
from cpkit import JsonValue
from cpkit.tools.benchmark.contender import CALL_ARGS, CALL_RESULT, Contender

__all__ = ["SQLiteFloor"]

_TABLES = """
CREATE TABLE IF NOT EXISTS threads (thread_id TEXT PRIMARY KEY, updated_at INTEGER);
CREATE TABLE IF NOT EXISTS messages (
    thread_id TEXT, position INTEGER, body TEXT, PRIMARY KEY (thread_id, position)
) {clustered};
CREATE TABLE IF NOT EXISTS extra (
    thread_id TEXT, key TEXT, value TEXT, PRIMARY KEY (thread_id, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    thread_id TEXT, call_id TEXT, key TEXT UNIQUE, tool TEXT, args TEXT, status TEXT,
    issued_at INTEGER, result TEXT, PRIMARY KEY (thread_id, call_id)
);
"""
_APPEND = "INSERT INTO messages VALUES (?, ?, ?)"
_LOAD = "SELECT body FROM messages WHERE thread_id = ? ORDER BY position"
_TAIL = """
SELECT body FROM messages WHERE thread_id = ? ORDER BY position DESC LIMIT ?
"""
_TOUCH = """
INSERT INTO threads VALUES (?, unixepoch())
ON CONFLICT DO UPDATE SET updated_at = excluded.updated_at
"""
_MERGE = """
INSERT INTO extra VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value
"""
_CLAIM = """
INSERT INTO calls VALUES (?, ?, ?, ?, ?, 'issued', unixepoch(), NULL)
ON CONFLICT DO NOTHING
"""
_RESOLVE = """
UPDATE calls SET status = 'completed', result = ? WHERE thread_id = ? AND call_id = ?
"""
_FIND = "SELECT result FROM calls WHERE key = ? AND status = 'completed'"


class SQLiteFloor(Contender):
    """``clustered``: the messages are stored in the index of their key."""

    kind = "floor"
    abilities = frozenset({"append", "load", "tail", "calls", "extra", "open"})
    durability = "machine: WAL with synchronous=FULL"

    def __init__(self, path: str, name: str, *, clustered: bool = False) -> None:
        super().__init__("sqlite", name)
        self.path = path
        self.clustered = clustered
        self._positions: Counter[str] = Counter()
        self._db: aiosqlite.Connection

        if clustered:
            self.abilities = frozenset({"append", "load", "tail"})

    def another(self) -> SQLiteFloor:
        return SQLiteFloor(self.path, self.name, clustered=self.clustered)

    async def open(self) -> None:
        self._db = await aiosqlite.connect(
            self.path, factory=_Connection, isolation_level=None, timeout=30
        )
        tables = _TABLES.format(clustered="WITHOUT ROWID" if self.clustered else "")
        await _run(self._db, _prepare, tables)

    async def close(self) -> None:
        await self._db.close()

    async def append(self, thread: str, message: Any) -> None:
        position = self._positions[thread]
        self._positions[thread] = position + 1
        await self._db.execute(_APPEND, (thread, position, to_json(message).decode()))

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        rows = [
            (thread, position, to_json(message).decode())
            for position, message in enumerate(messages)
        ]
        self._positions[thread] = len(rows)
        await _run(self._db, _all, _APPEND, rows)

    async def load(self, thread: str) -> list[Any]:
        return _decoded(await self._db.execute_fetchall(_LOAD, (thread,)))

    async def tail(self, thread: str, count: int) -> list[Any]:
        rows = await self._db.execute_fetchall(_TAIL, (thread, count))
        return _decoded(rows)[::-1]

    async def cycle(self, thread: str, name: str) -> JsonValue:
        key = f"{thread}:{name}"
        call = (thread, name, key, "charge", to_json(CALL_ARGS).decode())
        await _run(self._db, _both, thread, _CLAIM, call)
        result = to_json(CALL_RESULT).decode()
        await _run(self._db, _both, thread, _RESOLVE, (result, thread, name))
        return await self.replay(thread, name)

    async def replay(self, thread: str, name: str) -> JsonValue:
        rows = await self._db.execute_fetchall(_FIND, (f"{thread}:{name}",))
        ((text,),) = rows
        result: JsonValue = from_json(text)
        return result

    async def merge(self, thread: str, values: Mapping[str, JsonValue]) -> None:
        rows = [(thread, k, to_json(v).decode()) for k, v in values.items()]
        await _run(self._db, _both, thread, _MERGE, *rows)

    async def extra(self, thread: str) -> Mapping[str, JsonValue]:
        rows = await self._db.execute_fetchall(
            "SELECT key, value FROM extra WHERE thread_id = ?", (thread,)
        )
        return {key: from_json(value) for key, value in rows}


class _Connection(sqlite3.Connection):
    """Runs a function where aiosqlite runs a statement."""

    def execute(self, sql: Any, parameters: Any = (), /) -> Any:
        if isinstance(sql, str):
            return super().execute(sql, parameters)

        sql(self, *parameters)
        return SimpleNamespace(fetchall=list)


async def _run(
    db: aiosqlite.Connection, function: Callable[..., None], *args: Any
) -> None:
    """Call ``function(connection, *args)`` in one trip to aiosqlite's thread."""
    statement: Any = function
    await db.execute_fetchall(statement, args)


def _prepare(db: sqlite3.Connection, tables: str) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.executescript(tables)


def _all(db: sqlite3.Connection, sql: str, rows: list[tuple[Any, ...]]) -> None:
    db.execute("BEGIN IMMEDIATE")
    db.executemany(sql, rows)
    db.execute("COMMIT")


def _both(
    db: sqlite3.Connection, thread: str, sql: str, *rows: tuple[Any, ...]
) -> None:
    """Write the rows and touch the thread, in one transaction."""
    db.execute("BEGIN IMMEDIATE")

    for row in rows:
        db.execute(sql, row)

    db.execute(_TOUCH, (thread,))
    db.execute("COMMIT")


def _decoded(rows: Any) -> list[Any]:
    return decoded(",".join([body for (body,) in rows]))
