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
Fetch: TypeAlias = Callable[..., Awaitable[list[Record]]]

# A process that is stopped inside a transaction holds the locks of its threads. The
# server ends the transaction after this time.
_BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '10s'"


class Connections:
    """Lends connections of asyncpg's pool to operations.

    Those of the store's own pool stay here between operations. To give one out and take
    it back costs the pool 180 Python-level calls; a whole statement costs 75.
    """

    def __init__(self, where: str | Pool, name: str, options: PostgresOptions) -> None:
        self.name = name
        self.schema = options.schema
        self._url = where if isinstance(where, str) else None
        self._pool = None if isinstance(where, str) else where
        self._options = options
        self._text = cache(partial(filled, schema=options.schema))
        self._idle: list[Any] = []
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
                await self._pool.release(self._idle.pop())

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

    async def reserve(self) -> asyncpg.Connection[Any] | None:
        """Return a connection beside the pool, which its user closes.

        ``None`` behind a pooler in transaction mode, and with a caller's pool.
        """
        if self._url is None or self._options.pooler == "transaction":
            return None

        connection: asyncpg.Connection[Any] = await self._connected(self._connect)
        return connection

    async def _acquire(self) -> Any:
        """Return a connection of the pool."""
        assert self._pool is not None, "the store is open"
        self._waiting += 1

        try:
            return await self._connected(self._pool.acquire)
        finally:
            self._waiting -= 1

    async def _release(self, connection: Any) -> None:
        """Keep a connection for the next operation, unless another one waits for it."""
        if self._url is not None and not self._waiting:
            self._idle.append(connection)
        elif self._pool is not None:
            # The answer is known, whatever happens to the connection.
            with suppress(*CLIENT_ERRORS):
                await self._pool.release(connection)

    def _raise_failure(self, exc: BaseException, lost: Fate) -> None:
        """Raise a store's error for a client's."""
        if isinstance(exc, CLIENT_ERRORS):
            # The next operation connects to the current primary.
            while self._idle and not is_usable_after(exc):
                _close(self._idle.pop())

            raise failure(exc, lost) from exc

    async def _connected(self, connect: Callable[[], Awaitable[Any]]) -> Any:
        """Return a new connection; raise a store's errors."""
        try:
            return await connect()
        # First, because it is a ValueError too.
        except ssl.SSLCertVerificationError as exc:
            raise StoreFailure("rejected", str(exc)) from exc
        except (ValueError, OverflowError) as exc:
            # Not chained: the cause would show what was in the URL.
            raise InvalidURL(f"{self.name}: {exc}") from None
        except CLIENT_ERRORS as exc:
            raise failure(exc, "not sent") from exc

    async def _connect(self, *_: object, **kwargs: Any) -> Any:
        """Connect to the URL's server; the pool calls it too.

        A host that does not answer may use its share of ``connect_timeout``. Then
        another one is the first.
        """
        url = self._url
        assert url is not None, "the pool is not the caller's"
        next_url, hosts = next_host_first(url)
        given = dict(parse_qsl(url.partition("?")[2]))
        pooled = self._options.pooler == "transaction"
        limit = {"statement_timeout": f"{self._options.timeout * 1000:.0f}"}

        if not given.get("target_session_attrs", os.getenv("PGTARGETSESSIONATTRS")):
            kwargs["target_session_attrs"] = "primary"  # a standby lags behind

        try:
            return await asyncpg.connect(
                url,
                timeout=self._options.connect_timeout / hosts,
                # Without a cache asyncpg parses and runs in one transaction, so that a
                # transaction pooler sends both to the same server connection.
                statement_cache_size=0 if pooled else 100,
                # A pooler takes no settings, and those of the URL count.
                server_settings=None if pooled or given.keys() & limit else limit,
                **kwargs,
            )
        except TimeoutError:
            if self._url == url:
                self._url = next_url

            raise


def _close(connection: Any) -> None:
    """Cut the connection; the pool makes another one in its place."""
    # A connection that was lost is not the pool's any more, and says so.
    with suppress(asyncpg.InterfaceError):
        connection.terminate()


async def _keep_as_it_is(_: object) -> None:
    """Reset nothing: no operation leaves anything in its session."""
