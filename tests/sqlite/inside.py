"""The connections behind a handle, for tests that look at them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from cpkit import ToolCall
from cpkit_sqlite import SQLiteCheckpointer, SQLiteStore
from cpkit_sqlite.connection import Connection

__all__ = ["occupied", "on", "reader", "store_of", "use", "writer"]

T = TypeVar("T")


def store_of(cp: SQLiteCheckpointer[Any]) -> SQLiteStore:
    assert isinstance(cp.store, SQLiteStore)
    return cp.store


def writer(cp: SQLiteCheckpointer[Any]) -> Connection:
    return store_of(cp)._writer


def reader(cp: SQLiteCheckpointer[Any]) -> Connection:
    return store_of(cp)._reader


async def on(connection: Connection, function: Callable[[Any], T]) -> T:
    """Call a function with the connection of sqlite3, in its thread."""
    return await connection.call(function, connection.db)


def occupied(connection: Connection, gate: threading.Event) -> asyncio.Future[bool]:
    """Keep a connection's thread at work until the gate opens."""
    return connection.call(gate.wait)


async def use(path: str) -> None:
    """Write to a new store and read it; also a program without pytest calls this."""
    async with SQLiteCheckpointer[Any](path) as cp:
        assert await cp.append("t", [{"n": 1}, {"n": 2}], extra={"k": 1}) == 2
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))
        await cp.record_result("t", "c", 7)
        found = await cp.find_completed("key")
        assert found is not None
        assert found.result == 7
        data = await cp.load("t")
        assert data is not None
        assert (data.messages, data.extra) == ([{"n": 1}, {"n": 2}], {"k": 1})
