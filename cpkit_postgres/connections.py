"""Connections of a store: its own, kept open between operations, or a caller's pool."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache, partial
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import asyncpg

from cpkit.driver import StoreFailure
from cpkit.errors import InvalidURL
from cpkit_postgres.errors import CLIENT_ERRORS, READ_ONLY, failure, sqlstate
from cpkit_postgres.options import PostgresOptions, next_host_first
from cpkit_postgres.queries import END_BACKEND, filled

Record: TypeAlias = asyncpg.Record
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
Connection: TypeAlias = (
    "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any]"
)
Fetch: TypeAlias = Callable[..., Awaitable[list[Record]]]

# A process that is stopped inside a transaction holds a thread's lock. The server ends
# the transaction after this time.
_BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '10s'"

# Seconds for the server to end a cancelled write. The handle cancels a second time
# after as many, and then the connection is closed without waiting.
_CANCEL_TIMEOUT = 1.0

# Callers' pools that have a listener. Several handles may share a pool, and operations
# would find no connection if each handle kept one.
_listened_to: set[Pool] = set()

# See `cpkit_postgres.portable`.
_SERIALIZABLE = {"default_transaction_isolation": "serializable"}


class Connections:
    """At most ``pool_size`` connections; the one that was used last is used first.

    asyncpg's own pool was measured to add 30 µs to an append of 250, so connections of
    a URL wait in a list. Those of a caller's pool go back to it after each operation.
    """

    def __init__(self, where: str | Pool, name: str, options: PostgresOptions) -> None:
        self.name = name
        self.schema = options.schema
        self._where = where
        self._options = options
        self.text = cache(partial(filled, schema=options.schema))
        self._portable = options.dialect == "portable"
        self._size = (
            options.pool_size if isinstance(where, str) else where.get_max_size()
        )
        self._free = asyncio.Semaphore(self._size)
        self._idle: list[Connection] = []
        # By the server's process id: when a write began, which was then given up.
        self._given_up: dict[int, float] = {}

    @property
    def can_reserve(self) -> bool:
        """Whether `reserved` gives a connection.

        Not behind a pooler in transaction mode, where a session is not the caller's,
        and not where a caller's pool has a single connection.
        """
        if self._options.pooler == "transaction":
            return False

        return isinstance(self._where, str) or self._size > 1

    async def close(self) -> None:
        """Close the connections, unless they are the caller's."""
        limit = self._options.connect_timeout

        try:
            if self._given_up:
                with suppress(TimeoutError, StoreFailure):
                    async with asyncio.timeout(limit):
                        await self.fetch("SELECT 1")
        finally:  # also where the time for closing is over
            closing = [connection.close(timeout=limit) for connection in self._idle]
            self._idle.clear()
            await asyncio.gather(*closing, return_exceptions=True)

    async def fetch(self, query: str, *args: object) -> list[Record]:
        """Run one statement that only reads, and return its rows."""
        async with self._connection() as connection:
            rows: list[Record] = await connection.fetch(self.text(query), *args)
            return rows

    async def write(self, query: str, *args: object) -> list[Record]:
        """Run one statement that writes; if it is cancelled, the server ends it."""
        async with self._connection(is_write=True) as connection:
            rows: list[Record] = await connection.fetch(self.text(query), *args)
            return rows

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Fetch]:
        """Run statements in one transaction that writes, by a function like `fetch`."""
        async with self._connection(is_write=True) as connection:

            async def fetch(query: str, *args: object) -> list[Record]:
                rows: list[Record] = await connection.fetch(self.text(query), *args)
                return rows

            try:
                await connection.execute("BEGIN" if self._portable else _BEGIN)
                yield fetch
                await connection.execute("COMMIT")
            except (asyncio.CancelledError, TimeoutError):
                raise  # `_connection` closes it when the server has ended the statement
            except BaseException:
                # The server rolls back. A pool has taken back a connection that is
                # lost; its own error must not hide that the answer was lost.
                with suppress(*CLIENT_ERRORS):
                    connection.terminate()

                raise

    @asynccontextmanager
    async def reserved(self) -> AsyncIterator[Connection | None]:
        """Keep a connection for one purpose; it is closed behind the block.

        ``None`` unless `can_reserve`.
        """
        if not self.can_reserve:
            yield None
        elif isinstance(self._where, str):
            connection = await self._connected()

            try:
                yield connection
            finally:
                connection.terminate()
        else:
            async with self._connection() as connection:
                try:
                    yield connection
                finally:
                    connection.terminate()

    @asynccontextmanager
    async def listener(self) -> AsyncIterator[Connection | None]:
        """Keep a connection as `reserved` does, but at most one of a caller's pool.

        ``None`` where another handle has that one.
        """
        pool = self._where

        if isinstance(pool, str):
            async with self.reserved() as connection:
                yield connection
        elif pool in _listened_to:
            yield None
        else:
            _listened_to.add(pool)

            try:
                async with self.reserved() as connection:
                    yield connection
            finally:
                _listened_to.discard(pool)

    @asynccontextmanager
    async def _connection(self, *, is_write: bool = False) -> AsyncIterator[Connection]:
        """Lend a connection; turn its errors into what a store raises.

        A connection whose state is unknown is closed. That cuts the socket and waits
        for nothing, so a read that is cancelled does not wait for its statement. A
        write first waits until the server has ended the statement, because a statement
        goes on without its client, and would be applied after later operations.
        Where the server does not answer, the next operation ends it: see `_settle`.

        A write that is cancelled before it has a connection was not sent, and says so.
        """
        with _not_sent(is_write, "no connection was free in time"):
            await self._free.acquire()

        try:
            while self._idle and self._idle[-1].is_closed():
                self._idle.pop()

            with _not_sent(is_write, "the server gave no connection in time"):
                connection = self._idle.pop() if self._idle else await self._connected()

            pid, begun = connection.get_server_pid(), time.monotonic()
            usable = False

            try:
                if self._given_up:
                    with _not_sent(
                        is_write, "an earlier write was not decided in time"
                    ):
                        await self._settle(connection)

                yield connection
                usable = True
            except CLIENT_ERRORS as exc:
                usable = self._is_usable_after(exc)

                if is_write and isinstance(exc, TimeoutError):  # of the caller's pool
                    await _end_statement(connection)

                raise failure(exc, self.name) from exc
            except asyncio.CancelledError:
                if is_write:
                    await _end_statement(connection)

                raise
            finally:
                if is_write and not usable:
                    self._given_up[pid] = begun

                await self._return(connection, usable)
        finally:
            self._free.release()

    async def _return(self, connection: Connection, usable: bool) -> None:
        """Keep a connection for the next operation, or close it."""
        # A pool has already taken back a connection that was lost or closed.
        with suppress(*CLIENT_ERRORS):
            if not usable:
                connection.terminate()

            if not isinstance(self._where, str):
                await self._where.release(connection)  # type: ignore[arg-type]  # it is of this pool
            elif usable:
                self._idle.append(connection)

    async def _settle(self, connection: Connection) -> None:
        """Wait until the writes that were given up have run, or never will.

        A server process that was stopped, or is behind a link that was cut, may get
        its statement after later ones. So it is ended here. Not behind a pooler in
        transaction mode, where the process is not known, and not in other engines.
        """
        if self._portable or self._options.pooler == "transaction":
            self._given_up.clear()

        text = self.text(END_BACKEND)

        try:
            for pid, begun in list(self._given_up.items()):
                while await connection.fetch(text, pid, time.monotonic() - begun):
                    continue  # the server waits a moment before it answers

                self._given_up.pop(pid, None)
        except CLIENT_ERRORS as exc:
            found = failure(exc, self.name, "not sent")

            if isinstance(found, StoreFailure) and found.fate == "rejected":
                self._given_up.clear()  # this role may not end a process
            else:
                raise found from exc

    def _is_usable_after(self, exc: BaseException) -> bool:
        """Tell whether the connection of a failed statement can be used again.

        Not if it was lost, or its server takes no writes any more. Then the idle ones
        are closed too, so that the next operation connects to the current primary.
        """
        found = failure(exc, self.name)
        lost = isinstance(found, StoreFailure) and found.fate == "unknown"

        if lost or sqlstate(exc) == READ_ONLY:
            while self._idle:
                self._idle.pop().terminate()

            return False

        return isinstance(exc, asyncpg.PostgresError)

    async def _connected(self) -> Connection:
        """Return a new connection, or one of the caller's pool.

        A host that does not answer may use its share of ``connect_timeout``. Then
        another one is the first.
        """
        url = self._where

        try:
            if not isinstance(url, str):
                return await url.acquire()

            next_url, hosts = next_host_first(url)
            pooled = self._options.pooler == "transaction"
            parameters = dict(parse_qsl(url.partition("?")[2]))
            chosen = "target_session_attrs" in parameters or os.environ.get(
                "PGTARGETSESSIONATTRS"
            )
            return await asyncpg.connect(
                url,
                timeout=self._options.connect_timeout / hosts,
                # Without a cache asyncpg parses and runs in one transaction, so that a
                # transaction pooler sends both to the same server connection.
                statement_cache_size=0 if pooled else 100,
                server_settings=_SERIALIZABLE if self._portable else None,
                # A standby lags behind.
                target_session_attrs=None if chosen else "primary",  # type: ignore[arg-type]  # the stubs ask for a private enum of these strings
            )
        # First, because it is a ValueError too.
        except ssl.SSLCertVerificationError as exc:
            raise StoreFailure("rejected", str(exc)) from exc
        except (ValueError, OverflowError) as exc:
            # Not chained: the cause would show what was in the URL.
            raise InvalidURL(f"{self.name}: {exc}") from None
        except CLIENT_ERRORS as exc:
            if isinstance(exc, TimeoutError) and self._where == url:
                self._where = next_url

            raise failure(exc, self.name, "not sent") from exc


@contextmanager
def _not_sent(is_write: bool, reason: str) -> Iterator[None]:
    """Raise a failure with this reason if a write is cancelled within the block."""
    try:
        yield
    except asyncio.CancelledError as exc:
        if is_write:
            raise StoreFailure("not sent", reason) from exc

        raise


async def _end_statement(connection: Connection) -> None:
    """Close the connection of a cancelled statement when the server has ended it.

    asyncpg asks the server to cancel the statement, and ``close`` waits for that.
    ``terminate`` would withdraw the request.
    """
    with suppress(*CLIENT_ERRORS):
        # Not the parameter of ``close``: asyncpg 0.30 does not limit this wait by it.
        async with asyncio.timeout(_CANCEL_TIMEOUT):
            await connection.close()
