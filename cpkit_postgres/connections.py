"""Connections of a store: its own, kept open between operations, or a caller's pool."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import asyncpg

from cpkit.driver import StoreFailure
from cpkit.errors import InvalidURL
from cpkit_postgres.errors import CLIENT_ERRORS, READ_ONLY, failure, sqlstate
from cpkit_postgres.options import PostgresOptions
from cpkit_postgres.queries import filled

__all__ = ["Connections", "Fetch", "Pool", "Record"]

Record: TypeAlias = asyncpg.Record
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
Connection: TypeAlias = (
    "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any]"
)
Fetch: TypeAlias = Callable[..., Awaitable[list[Record]]]

# A process that is stopped inside a transaction holds a thread's lock. The server ends
# the transaction after this time.
_BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '10s'"


class Connections:
    """At most ``pool_size`` connections; the one that was used last is used first.

    asyncpg's own pool was measured to add 30 µs to an append of 250, so connections of
    a URL wait in a list. Those of a caller's pool go back to it after each operation.
    """

    def __init__(self, where: str | Pool, name: str, options: PostgresOptions) -> None:
        self.name = name
        self._where = where
        self._options = options
        self._sql = cache(partial(filled, schema=options.schema))
        size = options.pool_size if isinstance(where, str) else where.get_max_size()
        self._free = asyncio.Semaphore(size)
        self._idle: list[Connection] = []

    async def close(self) -> None:
        """Close the connections, unless they are the caller's."""
        while self._idle:
            with suppress(*CLIENT_ERRORS):
                await self._idle.pop().close(timeout=self._options.connect_timeout)

    async def fetch(self, query: str, *args: object) -> list[Record]:
        """Run one statement and return its rows."""
        async with self._connection() as connection:
            rows: list[Record] = await connection.fetch(self._sql(query), *args)
            return rows

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Fetch]:
        """Run statements in one transaction, by a function like `fetch`."""
        async with self._connection() as connection:

            async def fetch(query: str, *args: object) -> list[Record]:
                rows: list[Record] = await connection.fetch(self._sql(query), *args)
                return rows

            await connection.execute(_BEGIN)
            yield fetch
            await connection.execute("COMMIT")

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """Take a connection. Close it after an error that leaves its state unknown.

        Closing cuts the socket and waits for nothing. So a caller that is cancelled
        does not wait for its statement, and a transaction is rolled back.
        """
        await self._free.acquire()
        connection: Connection | None = None
        usable = False

        try:
            connection = await self._take()
            yield connection
            usable = True
        except asyncpg.PostgresError as exc:
            usable = not self._is_lost(exc)
            raise failure(exc, self.name) from exc
        except CLIENT_ERRORS as exc:
            self._close_idle()
            raise failure(exc, self.name) from exc
        finally:
            try:
                if connection is not None:
                    await self._give(connection, usable)
            finally:
                self._free.release()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()

            if not connection.is_closed():
                return connection

        try:
            if isinstance(self._where, str):
                return await self._connect(self._where)

            return await self._where.acquire()
        except (ValueError, OverflowError) as exc:
            # Not chained: the cause would show what was in the URL.
            raise InvalidURL(f"{self.name}: {exc}") from None
        except CLIENT_ERRORS as exc:
            raise failure(exc, self.name, "not sent") from exc

    async def _connect(self, url: str) -> Connection:
        parameters = dict(parse_qsl(url.partition("?")[2]))
        chosen = "target_session_attrs" in parameters or os.environ.get(
            "PGTARGETSESSIONATTRS"
        )
        return await asyncpg.connect(
            url,
            timeout=self._options.connect_timeout,
            # Without a cache asyncpg parses and runs in one transaction, so that a
            # transaction pooler sends both to the same server connection.
            statement_cache_size=0 if self._options.pooler == "transaction" else 100,
            # A standby lags behind.
            target_session_attrs=None if chosen else "primary",  # type: ignore[arg-type]  # the stubs ask for a private enum of these strings
        )

    async def _give(self, connection: Connection, usable: bool) -> None:
        if not usable or connection.is_in_transaction():
            connection.terminate()

        if not isinstance(self._where, str):
            with suppress(*CLIENT_ERRORS):
                await self._where.release(connection)  # type: ignore[arg-type]  # it is of this pool
        elif not connection.is_closed():
            self._idle.append(connection)

    def _is_lost(self, exc: asyncpg.PostgresError) -> bool:
        """Tell whether the server ended the connection, or takes no writes any more.

        Then the idle connections are closed too, and the next operation connects to
        the primary of that moment.
        """
        found = failure(exc, self.name)
        lost = isinstance(found, StoreFailure) and found.fate == "unknown"

        if lost or sqlstate(exc) == READ_ONLY:
            self._close_idle()
            return True

        return False

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().terminate()
