"""Connections of a store: its own, kept open between operations, or a caller's pool."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from time import monotonic
from typing import Any, NoReturn, TypeAlias
from urllib.parse import parse_qsl

import asyncpg

from cpkit.driver import Heard, StoreFailure, is_late
from cpkit.driver.writes import Fate
from cpkit.errors import InvalidURL
from cpkit_postgres import queries
from cpkit_postgres.errors import (
    CLIENT_ERRORS,
    NAME_TAKEN,
    failure,
    is_refused_setting,
    is_usable_after,
    sqlstate,
)
from cpkit_postgres.local import local_fault
from cpkit_postgres.options import PostgresOptions, next_host_first

Record: TypeAlias = asyncpg.Record
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
Fetch: TypeAlias = Callable[..., Awaitable[list[Record]]]

# Seconds. A firewall may forget a connection that was idle for four minutes, and a
# server has few. The next operation closes it.
_IDLE_LIMIT = 120.0
# Seconds between two looks whether a connection still listens, and for one look.
_LOOK_EVERY = 10.0
_LOOK_TIMEOUT = 5.0
# A process that is stopped inside a transaction holds locks for as long as this.
_BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '10s'"


class Connections:
    """Lends connections to operations, at most ``pool_size`` at a time.

    Those of a URL wait in a list of its own, because asyncpg's pool takes 180
    Python-level calls to give one out and to take it back, and a whole statement takes
    75. The newest is used first, so that the others are closed in time.

    ``pooler`` becomes "transaction" where a pooler is found in between: it may give
    each transaction another server connection. asyncpg gives statements the same names
    in every process, so a call would run the statement of another one.
    """

    def __init__(self, where: str | Pool, name: str, options: PostgresOptions) -> None:
        self.name = name
        self.schema = options.schema
        self.pooler = options.pooler
        # A name may have 63 bytes, as that of the schema.
        self.channel = f"cpkit_{sha256(options.schema.encode()).hexdigest()[:32]}"
        self._where = where
        self._options = options
        self._text = cache(partial(queries.filled, schema=options.schema))
        self._idle: list[tuple[float, Any]] = []  # since when, the newest at the end
        size = options.pool_size if isinstance(where, str) else where.get_max_size()
        self._free = asyncio.Semaphore(size)

    async def close(self) -> None:
        """Close the connections that are not the caller's."""
        closing = [connection.close() for _, connection in self._idle]
        await asyncio.gather(*closing, return_exceptions=True)

    async def fetch(self, query: str, *args: object) -> list[Record]:
        """Run one statement in a transaction of its own, and return its rows."""
        connection = await self._take()

        try:
            rows: list[Record] = await connection.fetch(self._text(query), *args)
        except BaseException as exc:
            await self._fail(connection, exc)

        await self._give_back(connection, True)
        return rows

    async def look(self, query: str, *args: object) -> Record:
        """Return the row of a query at opening, and find a pooler by its ``pid``.

        The process that the client knows by number is the pooler's then. Until that is
        known the statement has no name. A pool that gives names behind it is refused.
        """
        connection = await self._take()
        is_usable = True

        try:
            statement = await connection.prepare(self._text(query), name="")
            row: Record = await statement.fetchrow(*args)

            if self.pooler == "auto" and row["pid"] != connection.get_server_pid():
                self.pooler = "transaction"
                is_usable = await self._is_without_names(connection)
        except BaseException as exc:
            await self._fail(connection, exc)

        await self._give_back(connection, is_usable)
        return row

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Fetch]:
        """Run statements in one transaction, by a function like `fetch`."""
        connection = await self._take()
        lost: Fate = "not sent"  # without a commit the server rolls back

        try:
            await connection.execute(_BEGIN)
            yield lambda query, *args: connection.fetch(self._text(query), *args)
            lost = "unknown"
            await connection.execute("COMMIT")
        except BaseException as exc:
            await self._fail(connection, exc, lost)

        await self._give_back(connection, True)

    async def listen(self, heard: Heard) -> None:
        """Hear of changes on a connection that serves nothing else.

        Behind a pooler in transaction mode no connection can listen, and a caller's
        pool may have none to spare. A watch polls there, and after a loss until the
        next look.
        """
        if not isinstance(self._where, str) or self.pooler == "transaction":
            return

        connection = await self._connect()

        try:
            await connection.add_listener(self.channel, lambda *args: heard(args[-1]))
            await connection.fetch(queries.LISTENING, self.channel)
            heard(None)

            while True:
                await asyncio.sleep(_LOOK_EVERY)
                await connection.execute("SELECT 1", timeout=_LOOK_TIMEOUT)
        except CLIENT_ERRORS as exc:
            raise failure(exc, "not sent") from exc
        finally:
            connection.terminate()

    async def _is_without_names(self, connection: Any) -> bool:
        """Tell whether a connection gives statements no names; refuse such a pool."""
        if isinstance(self._where, str):
            return False

        try:
            name = (await connection.prepare("SELECT 1")).get_name()
        except asyncpg.PostgresError:
            name = "of a statement that another process left"

        if name:
            fault = "a pooler is in between, and would run statements of other programs"
            cure = "pass statement_cache_size=0 to asyncpg.create_pool"
            raise StoreFailure("rejected", f"{fault}: {cure}")

        return True

    async def _take(self) -> Any:
        """Return a connection that no other operation has."""
        await self._free.acquire()

        while self._idle and monotonic() - self._idle[0][0] > _IDLE_LIMIT:
            self._idle.pop(0)[1].terminate()

        if self._idle:
            return self._idle.pop()[1]

        try:
            return await self._connect()
        except BaseException:
            self._free.release()
            raise

    async def _give_back(self, connection: Any, is_usable: bool) -> None:
        """Keep a connection for the next operation, or close it."""
        self._free.release()

        if is_usable and type(self._where) is str:
            self._idle.append((monotonic(), connection))
            return

        # The answer is known, and a pool has taken back a connection that was lost.
        with suppress(*CLIENT_ERRORS):
            if is_usable:
                await self._where.release(connection)  # type: ignore[union-attr]  # a pool
            else:
                connection.terminate()

    async def _fail(
        self, connection: Any, exc: BaseException, lost: Fate | None = None
    ) -> NoReturn:
        """Give back a connection after a failure, and raise a store's error for it.

        If there was no answer, the next operation connects again, also after no answer
        within ``timeout``: a server that is gone has left all idle connections alike.
        ``lost`` is the fate of a transaction if its connection was lost.
        """
        await self._give_back(connection, lost is None and is_usable_after(exc))
        is_answer = isinstance(exc, CLIENT_ERRORS)

        if is_late(exc) and not isinstance(self._where, str):
            await self._where.expire_connections()
        elif is_late(exc) or (is_answer and not is_usable_after(exc)):
            while self._idle:
                self._idle.pop()[1].terminate()

        if is_answer:
            raise failure(exc, lost or "unknown") from exc

        raise exc

    async def _connect(self) -> Any:
        """Return a new connection, or one of the caller's pool.

        A host that does not answer may use its share of ``connect_timeout``. Then
        another one is the first.
        """
        url = self._where

        try:
            if not isinstance(url, str):
                return await url.acquire()

            next_url, hosts = next_host_first(url)
            given = dict(parse_qsl(url.partition("?")[2]))
            # A standby lags behind. The stubs of asyncpg ask for a private enum.
            role: Any = os.environ.get("PGTARGETSESSIONATTRS", "primary")
            pooled = self.pooler == "transaction"
            settings = {
                "default_transaction_isolation": "read committed",
                "row_security": "off",  # an error in place of rows that are hidden
                "tcp_keepalives_idle": "60",  # so that firewalls do not forget it
                "statement_timeout": f"{self._options.timeout * 1000:.0f}",
            }
            return await asyncpg.connect(
                url,
                timeout=self._options.connect_timeout / hosts,
                # Without a cache asyncpg parses and runs in one transaction, so that a
                # transaction pooler sends both to the same server connection.
                statement_cache_size=0 if pooled else 100,
                # A pooler takes no settings, and those of the URL count.
                server_settings={
                    one: settings[one] for one in settings.keys() - given if not pooled
                },
                target_session_attrs=given.get("target_session_attrs", role),
            )
        except (KeyError, ValueError, OverflowError, *CLIENT_ERRORS) as exc:
            if fault := await local_fault(str(url), exc):
                raise StoreFailure("rejected", fault) from exc

            if isinstance(exc, (ValueError, OverflowError)):
                # Not chained: the cause would show what was in the URL.
                raise InvalidURL(f"{self.name}: {exc}") from None

            # asyncpg asks a server before Postgres 14 by a statement for its role.
            is_pooler = is_refused_setting(exc) or sqlstate(exc) == NAME_TAKEN

            if is_pooler and self.pooler == "auto":
                self.pooler = "transaction"
                return await self._connect()

            if isinstance(exc, TimeoutError) and isinstance(url, str):
                self._where = next_url

            raise failure(exc, "not sent") from exc
