"""Connections of a store: those of its own pool, or of a caller's pool."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import asyncpg

from cpkit.driver import StoreFailure
from cpkit.driver.writes import Fate
from cpkit.errors import InvalidURL
from cpkit_postgres.errors import CLIENT_ERRORS, failure, is_usable_after
from cpkit_postgres.options import PostgresOptions, next_host_first
from cpkit_postgres.queries import filled

Record: TypeAlias = asyncpg.Record
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
Connection: TypeAlias = (
    "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any]"
)
Fetch: TypeAlias = Callable[..., Awaitable[list[Record]]]

# A process that is stopped inside a transaction holds a thread's lock. The server ends
# the transaction after this time.
_BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '10s'"

# Callers' pools that have a listener. Several handles may share a pool, and operations
# would find no connection if each handle kept one.
_listened_to: set[Pool] = set()


class Connections:
    """Lends connections of asyncpg's pool to operations.

    Those of the store's own pool stay here between operations, and the one that was
    used last is used first: the pool takes 180 Python-level calls to give out a
    connection and to take it back, and a whole statement takes 75.
    """

    def __init__(self, where: str | Pool, name: str, options: PostgresOptions) -> None:
        self.name = name
        self.schema = options.schema
        self._url = where if isinstance(where, str) else None
        self._pool = None if isinstance(where, str) else where
        self._options = options
        self._text = cache(partial(filled, schema=options.schema))
        self._idle: list[Connection] = []
        self._waiting = 0

    async def open(self) -> None:
        """Make the pool; it connects when an operation needs a connection."""
        if self._pool is None:
            self._pool = await asyncpg.create_pool(
                min_size=0,
                max_size=self._options.pool_size,
                connect=self._connect,
                reset=_keep_as_it_is,
            )

    async def close(self) -> None:
        """Close the connections, unless they are the caller's."""
        if self._url is not None and self._pool is not None:
            while self._idle:
                await self._pool.release(self._idle.pop())  # type: ignore[arg-type]  # it is of this pool

            await self._pool.close()

    async def fetch(self, query: str, *args: object) -> list[Record]:
        """Run one statement in a transaction of its own, and return its rows."""
        connection = self._idle.pop() if self._idle else await self._acquire()

        try:
            rows: list[Record] = await connection.fetch(self._text(query), *args)
        except BaseException as exc:
            if is_usable_after(exc):
                await self._release(connection)
            else:
                _close(connection)

            self._raise_failure(exc, "unknown")
            raise

        await self._release(connection)
        return rows

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Fetch]:
        """Run statements in one transaction, by a function like `fetch`."""
        connection = self._idle.pop() if self._idle else await self._acquire()
        lost: Fate = "not sent"  # without a commit the server rolls back

        async def fetch(query: str, *args: object) -> list[Record]:
            rows: list[Record] = await connection.fetch(self._text(query), *args)
            return rows

        try:
            await connection.execute(_BEGIN)
            yield fetch
            lost = "unknown"
            await connection.execute("COMMIT")
        except BaseException as exc:
            _close(connection)
            self._raise_failure(exc, lost)
            raise

        await self._release(connection)

    @asynccontextmanager
    async def reserved(self) -> AsyncIterator[Connection | None]:
        """Keep a connection for one purpose; it is closed behind the block.

        ``None`` behind a pooler in transaction mode, where a session is not the
        caller's. A caller's pool gives one for all its handles, and none if it has only
        one.
        """
        pool = self._pool
        assert pool is not None, "the store is open"
        is_callers = self._url is None

        if self._options.pooler == "transaction" or (
            is_callers and (pool in _listened_to or pool.get_max_size() == 1)
        ):
            yield None
            return

        if is_callers:
            _listened_to.add(pool)

        try:
            connect = pool.acquire if is_callers else self._connect
            connection = await self._connected(connect)

            try:
                yield connection
            finally:
                _close(connection)
        finally:
            _listened_to.discard(pool)

    async def _acquire(self) -> Connection:
        """Return a connection of the pool, after a wait if operations have all."""
        assert self._pool is not None, "the store is open"
        self._waiting += 1

        try:
            return await self._connected(self._pool.acquire)
        finally:
            self._waiting -= 1

    async def _release(self, connection: Connection) -> None:
        """Keep a connection for the next operation, unless the pool needs it."""
        if self._url is not None and not self._waiting:
            self._idle.append(connection)
        elif self._pool is not None:
            # The answer is known, whatever happens to the connection.
            with suppress(*CLIENT_ERRORS):
                await self._pool.release(connection)  # type: ignore[arg-type]  # it is of this pool

    def _raise_failure(self, exc: BaseException, lost: Fate) -> None:
        """Raise what a store raises for a client's error.

        If the connection cannot be used any more, the idle ones are closed too: the
        next operation connects to the current primary.
        """
        if isinstance(exc, CLIENT_ERRORS):
            while self._idle and not is_usable_after(exc):
                _close(self._idle.pop())

            raise failure(exc, self.name, lost) from exc

    async def _connected(self, connect: Callable[[], Awaitable[Any]]) -> Connection:
        """Return a new connection, or raise what a store raises."""
        try:
            connection: Connection = await connect()
            return connection
        # First, because it is a ValueError too.
        except ssl.SSLCertVerificationError as exc:
            raise StoreFailure("rejected", str(exc)) from exc
        except (ValueError, OverflowError) as exc:
            # Not chained: the cause would show what was in the URL.
            raise InvalidURL(f"{self.name}: {exc}") from None
        except CLIENT_ERRORS as exc:
            raise failure(exc, self.name, "not sent") from exc

    async def _connect(self, *_: object, **kwargs: Any) -> Any:
        """Connect to the server of the URL, as the pool asks for it.

        A host that does not answer may use its share of ``connect_timeout``. Then
        another one is the first.
        """
        url = self._url
        assert url is not None, "the pool is not the caller's"
        next_url, hosts = next_host_first(url)
        given = dict(parse_qsl(url.partition("?")[2]))
        pooled = self._options.pooler == "transaction"
        settings = {"statement_timeout": f"{self._options.timeout * 1000:.0f}"}

        if not given.get("target_session_attrs", os.getenv("PGTARGETSESSIONATTRS")):
            kwargs["target_session_attrs"] = "primary"  # a standby lags behind

        try:
            return await asyncpg.connect(
                url,
                timeout=self._options.connect_timeout / hosts,
                # Without a cache asyncpg parses and runs in one transaction, so that a
                # transaction pooler sends both to the same server connection.
                statement_cache_size=0 if pooled else 100,
                # What the URL says counts, and a pooler takes no settings.
                server_settings=None if pooled or given.keys() & settings else settings,
                **kwargs,
            )
        except TimeoutError:
            if self._url == url:
                self._url = next_url

            raise


def _close(connection: Connection) -> None:
    """Cut the connection; the pool makes another one in its place."""
    # A connection that was lost is not the pool's any more, and says so.
    with suppress(asyncpg.InterfaceError):
        connection.terminate()


async def _keep_as_it_is(_: object) -> None:
    """Reset nothing: no operation leaves anything in its session."""
