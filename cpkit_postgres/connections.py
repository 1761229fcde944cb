"""Where statements run: asyncpg's pool, connected again when the server comes back.

Every statement of the driver is a transaction by itself, so one that fails has written
nothing, and only a lost connection leaves a doubt. A statement is run again where it is
proven not to have run, and a read also where its connection was lost.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TypeAlias
from urllib.parse import parse_qsl

import asyncpg

from cpkit.driver.timelimit import TimeLimit
from cpkit.errors import InvalidURL
from cpkit_postgres.faults import (
    CLIENT_ERRORS,
    READ_ONLY,
    Fate,
    Patience,
    fate,
    translated,
)
from cpkit_postgres.options import PostgresOptions

__all__ = ["Connection", "Connections", "Pool", "Record"]

Record: TypeAlias = asyncpg.Record
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
Connection: TypeAlias = "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"


class Connections:
    """The connections of a handle, from a pool of its own or from the caller's.

    Those from its own pool stay here between operations: the pool's way of giving one
    out and taking it back costs more than a tenth of an append.
    """

    def __init__(self, where: str | Pool, name: str, options: PostgresOptions) -> None:
        self.name = name
        self._url = where if isinstance(where, str) else None
        self._pool = None if isinstance(where, str) else where
        self._options = options
        self._places = asyncio.Semaphore(
            options.pool_size if self._pool is None else self._pool.get_max_size()
        )
        self._idle: list[Connection] = []  # the last one used is used first
        self._mending: set[asyncio.Task[None]] = set()
        self._limit = TimeLimit(options.command_timeout)

    async def open(self) -> None:
        """Make the pool, unless it is the caller's; it connects when it is used."""
        if self._url is None:
            return

        self._pool = await asyncpg.create_pool(
            self._url,
            min_size=0,
            max_size=self._options.pool_size,
            # No operation leaves anything in its session that were to be reset.
            reset=_leave_alone,
            timeout=self._options.connect_timeout,
            max_cached_statement_lifetime=0,
            # Without a cache asyncpg parses and runs in one transaction, so that a
            # transaction pooler sends both to the same server connection.
            statement_cache_size=0 if self._options.pooler == "transaction" else 100,
            target_session_attrs=_session_attrs(self._url),  # type: ignore[arg-type]  # the stubs ask for a private enum of these strings
        )

    async def close(self) -> None:
        """Close the pool, unless it is the caller's; no statement is under way."""
        self._limit.stop()

        if self._mending:
            await asyncio.wait(self._mending)

        if self._url is None or self._pool is None:
            return

        await self._let_go()

        try:
            async with asyncio.timeout(self._options.connect_timeout):
                await self._pool.close()
        except CLIENT_ERRORS:
            # The server does not say goodbye. Nothing is lost by leaving without.
            self._pool.terminate()

    async def ask(self, sql: str, *args: object, writes: bool = False) -> list[Record]:
        """Run one statement, and return its rows.

        Raises ``BackendUnavailable``, with ``maybe_applied`` only where the answer to a
        write was lost.
        """
        patience = Patience(self._options.connect_timeout)

        while True:
            try:
                return await self._once(patience, sql, args)
            except CLIENT_ERRORS as exc:
                lost = fate(exc) is Fate.LOST
                again = not writes if lost else fate(exc) is Fate.AGAIN

                if getattr(exc, "sqlstate", None) == READ_ONLY:
                    await self._reconnect()

                if not again or not await patience.pause():
                    raise translated(
                        exc, self.name, maybe_applied=writes and lost
                    ) from exc

    async def take(self, patience: Patience) -> Connection:
        """Return a connection, waiting for a free one or for the server.

        Raises ``BackendUnavailable`` where the server stays away or refuses.
        """
        await self._places.acquire()

        if self._idle:
            return self._idle.pop()

        try:
            return await self._acquire(patience)
        except BaseException:
            self._places.release()
            raise

    def give(self, connection: Connection, *, whole: bool) -> None:
        """Take a connection back; one that is not whole goes to the pool to mend.

        The caller, who may have been cancelled, does not wait for that.
        """
        if whole and self._url is not None:
            self._idle.append(connection)
            self._places.release()
            return

        mending = asyncio.get_running_loop().create_task(self._mend(connection))
        self._mending.add(mending)
        mending.add_done_callback(self._mended)

    async def _once(
        self, patience: Patience, sql: str, args: tuple[object, ...]
    ) -> list[Record]:
        connection = await self.take(patience)
        whole = False

        try:
            rows = await self._limit.within(connection.fetch(sql, *args))
            whole = True
        except asyncpg.PostgresError as exc:
            whole = fate(exc) is not Fate.LOST
            raise
        finally:
            self.give(connection, whole=whole)

        return rows

    async def _acquire(self, patience: Patience) -> Connection:
        assert self._pool is not None

        while True:
            try:
                return await self._pool.acquire()
            except ValueError as exc:
                # Not chained: the cause would show what was in the URL.
                raise InvalidURL(f"{self.name}: {exc}") from None
            except CLIENT_ERRORS as exc:
                if fate(exc) is not Fate.LOST or not await patience.pause():
                    raise translated(exc, self.name) from exc

    async def _mend(self, connection: Connection) -> None:
        """Give a connection back to the pool, which cuts it if it cannot be mended."""
        assert self._pool is not None

        with suppress(*CLIENT_ERRORS):
            await self._pool.release(connection, timeout=self._options.connect_timeout)

    def _mended(self, mending: asyncio.Task[None]) -> None:
        self._mending.discard(mending)
        self._places.release()

    async def _reconnect(self) -> None:
        """Let the next statement connect anew, perhaps to another server."""
        if self._url is not None and self._pool is not None:
            await self._pool.expire_connections()
            await self._let_go()

    async def _let_go(self) -> None:
        """Give all connections that are free back to the pool."""
        while self._idle:
            await self._mend(self._idle.pop())


async def _leave_alone(connection: object) -> None:
    """Reset nothing."""


def _session_attrs(url: str) -> str | None:
    """Return which servers will do: the primary, unless somebody asked otherwise.

    A standby is behind, and what it says is not the last word.
    """
    asked = dict(parse_qsl(url.partition("?")[2])).get("target_session_attrs")

    if asked or os.environ.get("PGTARGETSESSIONATTRS"):
        return None

    return "primary"
