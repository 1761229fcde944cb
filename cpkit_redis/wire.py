"""Connections to the server, and exchanges on them.

redis-py's commands retry by themselves after a lost connection or a timeout, which
makes a write twice. So its connections are used one level below: commands go out, the
answers come in, and whether anything went out is known when something fails.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    MasterDownError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from cpkit.driver.timelimit import TimeLimit
from cpkit.errors import BackendUnavailable

__all__ = ["Wire"]

# The server says by these that it has not run the command, and soon will run commands
# again. BUSY (a script of somebody's takes long) has no class.
_NOT_YET = (BusyLoadingError, MasterDownError, TryAgainError)

# By any of these, that it has not run the command.
_DECLINED = (ResponseError, BusyLoadingError, AuthenticationError, AuthorizationError)

# Seconds between attempts: short at first, for a server that merely starts again.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0

# Seconds that an attempt to connect has at the least.
_ONE_TRY = 1.0


class Wire:
    """Up to ``size`` connections, made where they are needed and kept.

    ``patience`` is for how many seconds a server that cannot be reached, or is not
    ready, is tried again; ``timeout`` how many it has to answer. The ``pool`` is asked
    only to make connections: they are this object's own, and closed with it.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        name: str,
        *,
        size: int,
        patience: float,
        timeout: float,
    ) -> None:
        self._pool = pool
        self._name = name
        self._patience = patience
        self._limit = TimeLimit(timeout)
        self._places = asyncio.Semaphore(size)
        self._idle: list[AbstractConnection] = []
        self._worn: set[AbstractConnection] = set()

    async def ask(self, *commands: Sequence[bytes], again: bool = False) -> list[Any]:
        """Send commands in one go and return the answers to them, in order.

        An error that the server answers is an answer. Connecting is tried again while
        patience lasts, and so is what the server has not run yet; what was sent and
        not answered is sent again only with ``again`` (a read).

        Raises ``BackendUnavailable``, with ``maybe_applied`` where a write's answer
        was lost.
        """
        request = [_packed(command) for command in commands]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience

        async with self._places:
            for pause in _pauses():
                connection = self._idle.pop() if self._idle else self._made()
                sent = False
                answers: list[Any] = []
                fault: BaseException | None

                try:
                    await self._connect(connection, deadline)
                    sent = True
                    await self._exchange(connection, request, answers)
                    fault = _not_yet(answers, again)
                except (RedisError, OSError) as exc:
                    fault = exc
                finally:
                    self._idle.append(connection)

                if fault is None:
                    return answers

                # With one command answered, what became of the next ones is unknown.
                declined = isinstance(fault, _DECLINED) and (
                    not answers or fault in answers
                )
                lost = sent and not declined and not again
                final = lost or (declined and not _is_not_yet(fault))

                if final or loop.time() + pause > deadline:
                    raise BackendUnavailable(
                        self._name, self._said(fault, sent), maybe_applied=lost
                    ) from fault

                await asyncio.sleep(pause)

        raise AssertionError("the pauses have no end")

    def renew(self) -> None:
        """Connect anew for what is asked next."""
        self._worn.update(self._idle)

    async def aclose(self) -> None:
        """Close the connections, none of which is in use."""
        self._limit.stop()

        while self._idle:
            with suppress(RedisError, OSError):  # it is closed all the same
                await self._idle.pop().disconnect()

    def _made(self) -> AbstractConnection:
        connection: AbstractConnection = (
            self._pool.make_connection()  # type: ignore[no-untyped-call]  # redis-py
        )
        connection.retry = Retry(NoBackoff(), 0)
        return connection

    async def _connect(self, connection: AbstractConnection, deadline: float) -> None:
        """Connect, unless the connection stands and nothing is left over on it."""
        if connection.is_connected:
            # redis-py before version 8 has the other name, which 8 deprecates.
            left_over = getattr(connection, "can_read", connection.can_read_destructive)

            try:
                if connection not in self._worn and not await left_over():
                    return
            except (RedisError, OSError):
                pass  # it is closed, which is what was asked

            self._worn.discard(connection)
            await connection.disconnect(nowait=True)

        # Whoever waited long for a place has a try yet.
        limit = max(deadline, asyncio.get_running_loop().time() + _ONE_TRY)

        try:
            async with asyncio.timeout_at(limit):
                await connection.connect()  # type: ignore[no-untyped-call]  # redis-py
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    async def _exchange(
        self, connection: AbstractConnection, request: list[bytes], answers: list[Any]
    ) -> None:
        try:
            await self._limit.within(_exchanged(connection, request, answers))
        except BaseException:
            # Answers may still come, and would be taken for those of the next request.
            await connection.disconnect(nowait=True)
            raise

    def _said(self, fault: BaseException, sent: bool) -> str:
        if isinstance(fault, TimeoutError):
            return (
                f"no answer within {self._limit.seconds:g} s"
                if sent
                else "no connection"
            )

        return str(fault) or type(fault).__name__


def _packed(command: Sequence[bytes]) -> bytes:
    """Return a command as it goes over the wire (redis.io, "RESP protocol spec")."""
    parts = [b"*%d" % len(command)]

    for part in command:
        parts += (b"$%d" % len(part), part)

    parts.append(b"")
    return b"\r\n".join(parts)


async def _exchanged(
    connection: AbstractConnection, request: list[bytes], answers: list[Any]
) -> None:
    await connection.send_packed_command(request, check_health=False)

    while len(answers) < len(request):
        answers.append(await _answer(connection))


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as exc:
        return exc


def _not_yet(answers: list[Any], again: bool) -> ResponseError | None:
    """Return the answer that says so where nothing has run, or not all of a read."""
    declined = [answer for answer in answers if _is_not_yet(answer)]
    return (
        declined[0] if declined and (again or len(declined) == len(answers)) else None
    )


def _is_not_yet(answer: object) -> bool:
    return isinstance(answer, _NOT_YET) or (
        isinstance(answer, ResponseError) and str(answer).startswith("BUSY ")
    )


def _pauses() -> Iterator[float]:
    """Yield seconds between attempts, ever longer, and never in step with others."""
    longest = _FIRST_PAUSE

    while True:
        yield random.uniform(longest / 2, longest)
        longest = min(2 * longest, _LONGEST_PAUSE)
