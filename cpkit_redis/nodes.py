"""The nodes of a Redis Cluster: which of them has a slot, and the way there.

The map of slots is read again after an answer or a failure that shows that it is old.
Commands are never repeated here: what was proven not to have run is ``"not sent"``, and
the handle repeats it within ``timeout``. redis-py's own cluster client is not used for
commands: it repeats them by itself, sends ASKING on another connection than the command
that it is for, and does not say whether a command was sent.

While a slot moves to another node, its old node answers ASK or TRYAGAIN for a key that
it does not have, and each script names such a key. The handle repeats the operation
until the slot has moved.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import ResponseError

from cpkit.driver import StoreFailure
from cpkit.errors import InvalidURL
from cpkit.registry import redacted
from cpkit_redis.address import pool_of
from cpkit_redis.errors import MOVING, code_of, failure, not_sent
from cpkit_redis.server import Server, cancellation

Address: TypeAlias = tuple[str, int]

# Seconds to connect to a node, and for its map of slots. It is short, because there are
# other nodes to ask.
_NODE_TIMEOUT = 2.0


class Nodes:
    """The servers of a cluster, from a URL with some of them.

    ``size`` is how many connections each has at most. A read that a node does not
    answer within a quarter of ``timeout`` fails, so that the handle repeats it at the
    node that took over.
    """

    def __init__(
        self, url: str, size: int, connect_timeout: float, timeout: float
    ) -> None:
        seeds = _seed_pools(url, size, min(connect_timeout, _NODE_TIMEOUT), timeout)
        self._size = size
        # A read is tried at least three times before ``timeout``.
        self._read_timeout = timeout / 4
        self._template = seeds[0]
        self._seeds = [_place_of(pool) for pool in seeds]
        self._servers: dict[Address, Server] = {}
        # The first and the last of a range of slots, and the node that has it.
        self._ranges: list[tuple[int, int, Address]] = []
        self._version = 0
        self._is_old = True
        self._refreshing = asyncio.Lock()

    @property
    def name(self) -> str:
        """The addresses in the URL."""
        return ",".join(f"{host}:{port}" for host, port in self._seeds)

    async def ask(
        self, key: bytes, *commands: Sequence[Any], once: bool = False
    ) -> list[Any]:
        """Send commands in one go to the node that has the key; as `Server.ask`."""
        version, place = await self._place(key)
        answers = await self._send(version, place, commands, once)

        for answer in answers:
            if isinstance(answer, StoreFailure):
                raise answer

        return answers

    async def ask_each(
        self, commands: Sequence[tuple[bytes, Sequence[Any]]], *, once: bool = False
    ) -> list[Any]:
        """Send each command to the node of its key, in one go for each node.

        A failure is the answer to each command of its node.
        """
        answers: list[Any] = [None] * len(commands)
        is_cancelled = cancellation()
        by_node: dict[tuple[int, Address], list[int]] = {}

        for at, (key, _) in enumerate(commands):
            try:
                by_node.setdefault(await self._place(key), []).append(at)
            except StoreFailure as failed:
                if is_cancelled():  # nothing is sent yet
                    raise

                answers[at] = failed

        async def send(version: int, place: Address, indexes: list[int]) -> None:
            some = [commands[at][1] for at in indexes]
            found: list[Any]

            try:
                found = await self._send(version, place, some, once)
            except StoreFailure as failed:
                found = [failed] * len(some)

            for at, answer in zip(indexes, found, strict=True):
                answers[at] = answer

        try:
            async with asyncio.TaskGroup() as group:
                for node, indexes in by_node.items():
                    group.create_task(send(*node, indexes))
        except asyncio.CancelledError as exc:
            for answer in answers:
                if not isinstance(answer, StoreFailure) or answer.fate != "not sent":
                    raise

            raise StoreFailure("not sent", "no connection in time") from exc

        return answers

    async def pool(self, key: bytes) -> ConnectionPool:
        """Return a new pool for one connection to the node that has the key.

        It is for a listener, which continues after a ``StoreFailure``. So if the
        listener's task is cancelled, this raises ``CancelledError``.
        """
        is_cancelled = cancellation()

        try:
            _, (host, port) = await self._place(key)
        except StoreFailure as exc:
            if is_cancelled():
                raise asyncio.CancelledError from exc

            raise

        return self._pool(host, port, 1)

    async def reconnect(self) -> None:
        """Read the map of slots again before the next command."""
        self._is_old = True

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    async def _send(
        self, version: int, place: Address, commands: Sequence[Any], once: bool
    ) -> list[Any]:
        limit = None if once else self._read_timeout

        try:
            async with asyncio.timeout(limit):
                answers = await self._server(place).ask(b"", *commands, once=once)
        except (StoreFailure, TimeoutError) as exc:
            self._is_old = self._is_old or version == self._version

            if isinstance(exc, StoreFailure):
                raise

            raise StoreFailure("unknown", f"{place[0]}:{place[1]} is silent") from exc

        for at, answer in enumerate(answers):
            if isinstance(answer, ResponseError):
                failed = failure(answer)

                if code_of(failed.reason) in MOVING:
                    self._is_old = self._is_old or version == self._version
                    answers[at] = StoreFailure("not sent", failed.reason)

        return answers

    async def _place(self, key: bytes) -> tuple[int, Address]:
        """Return the version of the map of slots, and the node that has the key."""
        if self._is_old:
            try:
                await self._refresh(self._version)
            except asyncio.CancelledError as exc:  # while it waited for the lock
                reason = "the map of slots was not read in time"
                raise StoreFailure("not sent", reason) from exc

        slot = key_slot(key)

        for first, last, place in self._ranges:
            if first <= slot <= last:
                return self._version, place

        self._is_old = True
        raise StoreFailure("not sent", f"no node has slot {slot} now")

    async def _refresh(self, version: int) -> None:
        async with self._refreshing:
            if version != self._version:
                return

            known = list({*(place for _, _, place in self._ranges), *self._seeds})
            random.shuffle(known)
            failed = StoreFailure("not sent", "no node of the cluster answers")
            is_cancelled = cancellation()

            for place in known:
                try:
                    # With ``once``, cancelling a connect raises `StoreFailure`.
                    async with asyncio.timeout(_NODE_TIMEOUT):
                        [found] = await self._server(place).ask(
                            b"", ("CLUSTER", "SLOTS"), once=True
                        )
                except TimeoutError:
                    continue
                except StoreFailure as exc:
                    failed = not_sent(exc)

                    if is_cancelled():
                        raise failed from exc

                    continue

                if isinstance(found, Exception):
                    failed = failure(found)
                    continue

                if not found:  # the node has left the cluster, or has lost its data
                    reason = f"{place[0]}:{place[1]} knows no node with slots"
                    failed = StoreFailure("not sent", reason)
                    continue

                self._ranges = [
                    # A node that does not know its own host leaves it out.
                    (first, last, ((host or b"").decode() or place[0], port))
                    for first, last, (host, port, *_), *_ in found
                ]
                self._version += 1
                self._is_old = False
                await self._disconnect_others()
                return

            raise failed

    async def _disconnect_others(self) -> None:
        """Close connections to nodes that have left, or have no slots any more."""
        used = {*(place for _, _, place in self._ranges), *self._seeds}

        for place, server in list(self._servers.items()):
            if place not in used:
                await server.reconnect()

    def _server(self, place: Address) -> Server:
        if place not in self._servers:
            pool = self._pool(*place, self._size)
            self._servers[place] = Server(pool, self._size, _NODE_TIMEOUT)

        return self._servers[place]

    def _pool(self, host: str, port: int, size: int) -> ConnectionPool:
        settings = self._template.connection_kwargs | {"host": host, "port": port}
        return ConnectionPool(self._template.connection_class, size, **settings)


def _place_of(pool: ConnectionPool) -> Address:
    settings = pool.connection_kwargs
    return settings.get("host", "localhost"), settings.get("port", 6379)


def _seed_pools(
    url: str, size: int, connect_timeout: float, timeout: float
) -> list[ConnectionPool]:
    """Return a pool for each host of a URL; nothing is connected."""
    shown = repr(redacted(url))

    try:
        parts = urlsplit(url, allow_fragments=False)
    except ValueError:
        raise InvalidURL(f"{shown} is not a URL that can be read") from None

    login, at, hosts = parts.netloc.rpartition("@")
    single = parts.scheme.removesuffix("+cluster")

    if parts.path not in ("", "/", "/0") or "db=" in parts.query:
        raise InvalidURL(f"{shown}: a cluster has one database: leave out its number")

    if not all(hosts.split(",")):
        raise InvalidURL(
            f"{shown}: write redis+cluster://host:6379,host:6379 with one or more nodes"
        )

    return [
        pool_of(
            f"{single}://{login}{at}{host}?{parts.query}",
            size,
            connect_timeout,
            timeout,
        )
        for host in hosts.split(",")
    ]
