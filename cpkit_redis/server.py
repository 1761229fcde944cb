"""The connections to one server, and how commands are sent on them."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import ResponseError

from cpkit.driver import StoreFailure
from cpkit_redis.errors import CLIENT_ERRORS, failure

# The random name of a server's process, and its number of a connection.
_Number: TypeAlias = tuple[bytes, int]


class Server:
    """At most ``size`` connections to the server of a pool.

    ``connect_timeout`` limits the seconds of connecting, the login included.

    It uses connections of the client library, and not its commands: those do not tell
    whether anything was sent, and take a quarter of the time of an append.

    A server that was stopped reads the beginning of a large write, then serves newer
    connections, and then reads the rest. So after a write that was given up, the next
    commands begin with ``CLIENT KILL`` of its connection: the write has run, or never
    runs. Without the rights to ``CLIENT ID`` and ``CLIENT KILL`` it may run later.
    """

    def __init__(
        self, pool: ConnectionPool, size: int, connect_timeout: float | None = None
    ) -> None:
        self._pool = pool
        self._connect_timeout = connect_timeout
        # Callers wait for a place here first: the pool raises when it is exhausted.
        self._places = asyncio.Semaphore(size)
        # Never given back to the pool, which takes a fifth of the time of an append.
        self._idle: list[AbstractConnection] = []
        self._on_connect = pool.connection_kwargs.get("redis_connect_func")
        pool.connection_kwargs["redis_connect_func"] = self._connected
        self._numbers: dict[AbstractConnection, _Number] = {}
        # Connections that were closed with a write that the server may not have read.
        self._given_up: set[_Number] = set()

    async def ask(
        self, key: bytes, *commands: Sequence[Any], once: bool = False
    ) -> list[Any]:
        """Send commands in one go and return their answers; errors are answers.

        ``key`` is one of the commands' keys, for `Nodes`; this server has all keys.
        With ``once`` it may do harm to run the commands twice, so a failure says
        whether they were sent. Raises ``StoreFailure``. A connection that is cancelled
        or fails in the middle of an answer disconnects by itself.
        """
        sent, connected = not once, False

        try:
            async with self._places:
                if self._idle:
                    connection = self._idle.pop()
                else:
                    connection = self._pool.get_available_connection()  # type: ignore[no-untyped-call]  # redis-py

                try:
                    async with asyncio.timeout(self._connect_timeout):
                        await self._pool.ensure_connection(connection)

                    sent = connected = True
                    ended = tuple(self._given_up)
                    kills = [("CLIENT", "KILL", "ID", number) for _, number in ended]
                    answers = await _answers(connection, *kills, *commands)
                    self._given_up.difference_update(ended)
                    return answers[len(ended) :]
                except BaseException:
                    if connected and once and connection in self._numbers:
                        self._given_up.add(self._numbers[connection])

                    raise
                finally:
                    self._idle.append(connection)
        except asyncio.CancelledError as exc:
            if sent:
                raise

            raise StoreFailure("not sent", "no connection in time") from exc
        except CLIENT_ERRORS as exc:
            failed = failure(exc)

            if failed.fate == "unknown":
                reason = failed.reason

                if not connected:
                    reason = f"{reason.rstrip('.')}; is the server running?"

                failed = StoreFailure("unknown" if sent else "not sent", reason)

            raise failed from exc

    async def ask_each(
        self, commands: Sequence[tuple[bytes, Sequence[Any]]], *, once: bool = False
    ) -> list[Any]:
        """Send commands in one go, each with one of its keys."""
        return await self.ask(b"", *(one for _, one in commands), once=once)

    async def reconnect(self) -> None:
        """Close the connections that are not in use; later commands connect again."""
        for connection in list(self._idle):
            with suppress(*CLIENT_ERRORS):
                await connection.disconnect(nowait=True)

    async def close(self) -> None:
        with suppress(*CLIENT_ERRORS):  # the connections are closed all the same
            await self._pool.aclose()

    async def _connected(self, connection: AbstractConnection) -> None:
        """Log in, and ask for the server's number of the connection."""
        self._numbers.pop(connection, None)

        if self._on_connect is None:
            await connection.on_connect()
        elif inspect.isawaitable(done := self._on_connect(connection)):
            await done

        number, server = await _answers(
            connection, ("CLIENT", "ID"), ("INFO", "server")
        )
        run = re.search(rb"run_id:(\w+)", server) if type(server) is bytes else None
        process = run[1] if run else b""
        # Another process counts from 1 again: its numbers are other connections.
        self._given_up = {one for one in self._given_up if one[0] == process}

        if type(number) is int:
            self._numbers[connection] = process, number


def cancellation() -> Callable[[], bool]:
    """Return a function that tells whether this task has been cancelled since now.

    If `Server.ask` is cancelled before it sent anything, it raises ``StoreFailure``. A
    caller that would continue after such a failure asks this function first: a
    cancelled task must end.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    return lambda: task.cancelling() > before


def _packed(commands: Iterable[Sequence[Any]]) -> bytes:
    """Return commands in Redis's protocol; redis-py takes three times as long.

    The parts are joined here: asyncio sends many small ones slowly (Python 3.12 on).
    """
    parts: list[bytes] = []

    for command in commands:
        parts.append(b"*%d\r\n" % len(command))

        for argument in command:
            if not isinstance(argument, bytes):
                argument = str(argument).encode()

            parts += (b"$%d\r\n" % len(argument), argument, b"\r\n")

    return b"".join(parts)


async def _answers(
    connection: AbstractConnection, *commands: Sequence[Any]
) -> list[Any]:
    """Send commands in one go and return their answers; errors are answers."""
    packed = [_packed(commands)]
    await connection.send_packed_command(packed, check_health=False)
    return [await _answer(connection) for _ in commands]


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as exc:
        return exc
