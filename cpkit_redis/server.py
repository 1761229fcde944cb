"""The connections to one server, and how commands are sent on them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import ResponseError

from cpkit.driver import Heard, StoreFailure, is_late
from cpkit_redis.errors import CLIENT_ERRORS, code_of, failure, not_connected


class Server:
    """At most ``size`` connections to the server of a pool.

    It uses connections of the client library, and not its commands: those do not tell
    whether anything was sent, and take half of the time of an append.
    """

    def __init__(self, pool: ConnectionPool, size: int) -> None:
        self._pool = pool
        # Callers wait for a place here first: the pool raises when it is exhausted.
        self._places = asyncio.Semaphore(size)
        # Never given back to the pool, which takes a fifth of the time of an append.
        self._idle: list[Any] = []
        self._new_connection: Any = pool.get_available_connection
        # Connects, unless the connection is open and nothing is left to read on it.
        self._connect = pool.ensure_connection

    async def ask(self, *commands: Sequence[bytes]) -> list[Any]:
        """Send commands in one go and return their answers; errors are answers.

        If the limit of time cancels the call before it sent anything, it raises
        ``StoreFailure("not sent", …)``. A connection that fails or is cancelled in the
        middle of an answer disconnects by itself. If it was lost, the idle ones are
        closed: a firewall forgets all of them alike.
        """
        is_sent = False

        try:
            await self._places.acquire()
            connection = self._idle.pop() if self._idle else self._new_connection()

            try:
                await self._connect(connection)
                is_sent = True
                packed = _packed(commands)
                await connection.send_packed_command(packed, check_health=False)
                answers: list[Any] = []

                for _ in commands:
                    try:
                        answers += (await connection.read_response(),)
                    except ResponseError as exc:
                        answers += (exc,)

                return answers
            finally:
                self._idle.append(connection)
                self._places.release()
        except asyncio.CancelledError as exc:
            if not is_late(exc):
                raise

            if not is_sent:
                raise StoreFailure("not sent", "no connection in time") from exc

            await self.reconnect()
            raise
        except CLIENT_ERRORS as exc:
            failed = failure(exc)

            if failed.fate == "unknown" and is_sent:
                await self.reconnect()
            elif failed.fate == "unknown":
                failed = not_connected(exc, self._pool.connection_kwargs)

            raise failed from exc

    async def listen(self, channel: bytes, heard: Heard) -> None:
        """Listen on a connection of its own; return if the user may not do this.

        The script publishes ids of threads that changed, separated by NUL.
        """
        kind, settings = self._pool.connection_class, self._pool.connection_kwargs
        pool = ConnectionPool(kind, 1, **settings)

        try:
            async with Redis(connection_pool=pool).pubsub() as channels:
                await channels.subscribe(channel)

                async for message in channels.listen():
                    if message["type"] == "subscribe":
                        heard(None)
                    else:
                        for thread_id in message["data"].split(b"\0"):
                            heard(thread_id.decode(errors="replace"))
        except CLIENT_ERRORS as exc:
            failed = failure(exc)

            if code_of(failed.reason) != "NOPERM":
                raise failed from exc
        finally:
            with suppress(*CLIENT_ERRORS):
                await asyncio.shield(pool.aclose())

    async def reconnect(self) -> None:
        """Close the idle connections; each connects again when it is used."""
        for connection in list(self._idle):
            with suppress(*CLIENT_ERRORS):
                await connection.disconnect(nowait=True)

    async def close(self) -> None:
        with suppress(*CLIENT_ERRORS):  # the connections are closed all the same
            await self._pool.aclose()


def _packed(commands: Sequence[Sequence[bytes]]) -> bytes:
    """Return commands in Redis's protocol; redis-py takes three times as long.

    The parts are joined here: asyncio sends many small ones slowly (Python 3.12 on).
    """
    parts: list[bytes] = []

    for command in commands:
        parts += (b"*%d\r\n" % len(command),)

        for argument in command:
            parts += (b"$%d\r\n" % len(argument), argument, b"\r\n")

    return b"".join(parts)
