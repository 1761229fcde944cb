"""The floor of Postgres: asyncpg, one prepared statement on an open connection.

Concurrent tasks share eight connections, the same number as in the driver.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import asyncpg
from pydantic_core import from_json, to_json

from benchmarks.floors.decoding import decoded
from cpkit import JsonValue
from cpkit.tools.benchmark.contender import CALL_ARGS, CALL_RESULT, Contender

__all__ = ["PostgresFloor"]

CONNECTIONS = 8

_TABLES = """
CREATE SCHEMA IF NOT EXISTS cpkit_floor;
CREATE TABLE IF NOT EXISTS cpkit_floor.threads (
    thread_id text PRIMARY KEY, updated_at timestamptz
);
CREATE TABLE IF NOT EXISTS cpkit_floor.messages (
    thread_id text, position integer, body text, PRIMARY KEY (thread_id, position)
);
CREATE TABLE IF NOT EXISTS cpkit_floor.extra (
    thread_id text, key text, value text, PRIMARY KEY (thread_id, key)
);
CREATE TABLE IF NOT EXISTS cpkit_floor.calls (
    thread_id text, call_id text, key text UNIQUE, tool text, args text, status text,
    issued_at timestamptz, result text, PRIMARY KEY (thread_id, call_id)
);
"""
_TOUCH = """
WITH touched AS (
    INSERT INTO cpkit_floor.threads VALUES ($1, clock_timestamp())
    ON CONFLICT (thread_id) DO UPDATE SET updated_at = excluded.updated_at
)
"""


class Statements(NamedTuple):
    """The text of each statement, or the statement that a connection has prepared."""

    append: Any = "INSERT INTO cpkit_floor.messages VALUES ($1, $2, $3)"
    load: Any = (
        "SELECT body FROM cpkit_floor.messages WHERE thread_id = $1 ORDER BY position"
    )
    tail: Any = """
        SELECT body FROM cpkit_floor.messages WHERE thread_id = $1
        ORDER BY position DESC LIMIT $2"""
    merge: Any = f"""{_TOUCH}
        INSERT INTO cpkit_floor.extra VALUES ($1, $2, $3)
        ON CONFLICT (thread_id, key) DO UPDATE SET value = excluded.value"""
    claim: Any = f"""{_TOUCH}
        INSERT INTO cpkit_floor.calls
        VALUES ($1, $2, $3, $4, $5, 'issued', clock_timestamp(), NULL)
        ON CONFLICT DO NOTHING"""
    resolve: Any = f"""{_TOUCH}
        UPDATE cpkit_floor.calls SET status = 'completed', result = $3
        WHERE thread_id = $1 AND call_id = $2"""
    find: Any = (
        "SELECT result FROM cpkit_floor.calls WHERE key = $1 AND status = 'completed'"
    )


class PostgresFloor(Contender):
    """Free connections wait in a stack: the last one used is taken first."""

    kind = "floor"
    abilities = frozenset({"append", "load", "tail", "calls", "extra", "open"})
    durability = "machine: synchronous_commit=on, the server's default"

    def __init__(self, url: str, name: str, connections: int = CONNECTIONS) -> None:
        super().__init__("postgres", name)
        self.url = url
        self.connections = connections
        self._positions: Counter[str] = Counter()
        self._held: list[asyncpg.Connection[asyncpg.Record]] = []
        self._free: asyncio.LifoQueue[Statements] = asyncio.LifoQueue()

    def another(self) -> PostgresFloor:
        return PostgresFloor(self.url, self.name, connections=1)

    async def open(self) -> None:
        for number in range(self.connections):
            connection = await asyncpg.connect(self.url)
            self._held.append(connection)

            if number == 0 and self.connections > 1:
                await connection.execute(_TABLES)

            if self.connections > 1:
                prepared = [await connection.prepare(sql) for sql in Statements()]
                self._free.put_nowait(Statements(*prepared))

    async def close(self) -> None:
        while self._held:
            await self._held.pop().close()

    async def append(self, thread: str, message: Any) -> None:
        position = self._positions[thread]
        self._positions[thread] = position + 1

        async with self._statements() as run:
            await run.append.fetch(thread, position, to_json(message).decode())

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        rows = [
            (thread, position, to_json(message).decode())
            for position, message in enumerate(messages)
        ]
        self._positions[thread] = len(rows)
        await self._held[0].copy_records_to_table(
            "messages", schema_name="cpkit_floor", records=rows
        )

    async def load(self, thread: str) -> list[Any]:
        async with self._statements() as run:
            return _decoded(await run.load.fetch(thread))

    async def tail(self, thread: str, count: int) -> list[Any]:
        async with self._statements() as run:
            return _decoded(await run.tail.fetch(thread, count))[::-1]

    async def cycle(self, thread: str, name: str) -> JsonValue:
        key = f"{thread}:{name}"
        args = to_json(CALL_ARGS).decode()

        async with self._statements() as run:
            await run.claim.fetch(thread, name, key, "charge", args)
            await run.resolve.fetch(thread, name, to_json(CALL_RESULT).decode())
            return _result(await run.find.fetch(key))

    async def replay(self, thread: str, name: str) -> JsonValue:
        async with self._statements() as run:
            return _result(await run.find.fetch(f"{thread}:{name}"))

    async def merge(self, thread: str, values: Mapping[str, JsonValue]) -> None:
        async with self._statements() as run:
            for key, value in values.items():
                await run.merge.fetch(thread, key, to_json(value).decode())

    async def extra(self, thread: str) -> Mapping[str, JsonValue]:
        rows = await self._held[0].fetch(
            "SELECT key, value FROM cpkit_floor.extra WHERE thread_id = $1", thread
        )
        return {key: from_json(value) for key, value in rows}

    @asynccontextmanager
    async def _statements(self) -> AsyncIterator[Statements]:
        prepared = await self._free.get()

        try:
            yield prepared
        finally:
            self._free.put_nowait(prepared)


def _decoded(rows: list[asyncpg.Record]) -> list[Any]:
    return decoded(",".join([row[0] for row in rows]))


def _result(rows: list[asyncpg.Record]) -> JsonValue:
    result: JsonValue = from_json(rows[0][0])
    return result
