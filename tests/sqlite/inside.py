"""The connections behind a handle, for tests that look at them."""

from __future__ import annotations

import sqlite3
import threading
from typing import Any

import aiosqlite

from cpkit_sqlite import SQLiteCheckpointer, SQLiteStore
from cpkit_sqlite.connection import run

__all__ = ["database", "occupied", "reader", "store_of", "writer"]


def store_of(cp: SQLiteCheckpointer[Any]) -> SQLiteStore:
    assert isinstance(cp._store, SQLiteStore)
    return cp._store


async def writer(cp: SQLiteCheckpointer[Any]) -> aiosqlite.Connection:
    """Return the connection that writes, which the first write opens."""
    return await store_of(cp)._open_writer()


def reader(cp: SQLiteCheckpointer[Any]) -> aiosqlite.Connection:
    return store_of(cp)._reader


async def database(connection: aiosqlite.Connection) -> sqlite3.Connection:
    """Return the connection that belongs to aiosqlite's thread."""
    return await run(connection, lambda db: db)


async def occupied(connection: aiosqlite.Connection, gate: threading.Event) -> None:
    """Keep a connection's worker thread at work until the gate opens."""
    await run(connection, lambda _: gate.wait())
