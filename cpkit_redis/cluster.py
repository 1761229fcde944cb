"""Agent state in a Redis Cluster; ``docs/drivers.md`` is the manual.

A store is in the slot of its prefix, so it is on one node, as on a single server. The
URL is ``redis+cluster://user:password@host:6379,host:6379`` with one or more of the
nodes, or ``rediss+cluster://`` (TLS). The user needs the permissions that
`cpkit_redis.store` lists, and ``+cluster|slots``, on every node.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, TypeAlias

from pydantic import Field
from redis.asyncio import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError

from cpkit.driver import Fate, Heard, StoreFailure
from cpkit.errors import InvalidURL
from cpkit.records import Survives
from cpkit.registry import redacted
from cpkit_redis.address import pool_of
from cpkit_redis.errors import failure
from cpkit_redis.server import Server
from cpkit_redis.store import RedisOptions, RedisStore

__all__ = ["ClusterStore"]

Address: TypeAlias = tuple[str, int]

# Seconds to connect to a node and to read its map of slots: there are others to ask.
_NODE_TIMEOUT = 2.0


class ClusterOptions(RedisOptions):
    """The defaults of a cluster: a failover takes 17 seconds by Redis' own defaults."""

    connect_timeout: float = Field(default=30.0, gt=0, le=86_400)


class ClusterStore(RedisStore):
    """A store in one slot of a cluster."""

    Options = ClusterOptions
    survives_by_default = Survives.NONE  # a failover loses writes
    _in_cluster = True

    def _connect(self, where: Any, options: RedisOptions) -> tuple[Server, str]:
        nodes = Nodes(where, key_slot(self._base), options)
        return nodes, f"{where.partition('://')[0].lower()}://{nodes.name}"


class Nodes(Server):
    """The connections to that node of a cluster that has a slot.

    The map of slots is read again after an answer or a failure that may mean that
    another node has the slot. No command is repeated here: what was proven not to have
    run is ``"not sent"``, and the handle repeats it. redis-py's own cluster client
    repeats commands by itself, and does not say whether one was sent.
    """

    def __init__(self, url: str, slot: int, options: RedisOptions) -> None:
        timeout = min(options.connect_timeout, _NODE_TIMEOUT)
        pools = _seed_pools(url, options.pool_size, timeout)
        super().__init__(pools[0], options.pool_size)
        self._connect = self._connect_to_node
        self._slot = slot
        settings = [pool.connection_kwargs for pool in pools]
        self._seeds = [
            (one.get("host", "localhost"), one.get("port", 6379)) for one in settings
        ]
        self._known = self._seeds
        self.name = ",".join(f"{host}:{port}" for host, port in self._seeds)
        # The node that has the slot; ``None`` if the map of slots must be read first.
        self._place: Address | None = None
        self._finding = asyncio.Lock()

    async def ask(self, *commands: Sequence[bytes]) -> list[Any]:
        try:
            answers = await super().ask(*commands)
        except BaseException:
            self._place = None
            raise

        # Of the first one MOVED is a subclass.
        if any(isinstance(one, (AskError, ClusterDownError)) for one in answers):
            self._place = None

        return answers

    async def listen(self, channel: bytes, heard: Heard) -> None:
        await self._found()
        await super().listen(channel, heard)

    async def reconnect(self) -> None:
        self._place = None
        await super().reconnect()

    async def _connect_to_node(self, connection: Any) -> None:
        place = self._place or await self._found()

        if (connection.host, connection.port) != place:
            await connection.disconnect(nowait=True)
            connection.host, connection.port = place

        await self._pool.ensure_connection(connection)

    async def _found(self) -> Address:
        async with self._finding:
            if self._place is None:
                self._place = host, port = await self._find()
                self._pool.connection_kwargs.update(host=host, port=port)

            return self._place

    async def _find(self) -> Address:
        """Return the node that has the slot, as the first node says that answers."""
        for place in random.sample(self._known, len(self._known)):
            try:
                return await self._owner(place)
            except (StoreFailure, TimeoutError) as exc:
                failed = failure(exc)

        fate: Fate = "rejected" if failed.fate == "rejected" else "not sent"
        raise StoreFailure(fate, failed.reason)

    async def _owner(self, place: Address) -> Address:
        """Return the node that has the slot, as the node at ``place`` says."""
        host, port = place
        settings = self._pool.connection_kwargs | {"host": host, "port": port}
        server = Server(ConnectionPool(self._pool.connection_class, 1, **settings), 1)

        try:
            async with asyncio.timeout(_NODE_TIMEOUT):
                [ranges] = await server.ask((b"CLUSTER", b"SLOTS"))
        finally:
            await asyncio.shield(server.close())

        if isinstance(ranges, Exception):
            raise failure(ranges) from ranges

        owner: Address | None = None
        known = {*self._seeds}

        for first, last, *nodes in ranges:
            # A node that does not know its own host leaves it out.
            places = [((one[0] or b"").decode() or host, one[1]) for one in nodes]
            known.update(places)

            if first <= self._slot <= last:
                owner = places[0]

        if owner is None:
            raise StoreFailure("not sent", f"{host}:{port} knows no node with the slot")

        self._known = [*known]
        return owner


def _seed_pools(url: str, size: int, timeout: float) -> list[ConnectionPool]:
    """Return a pool for each host of a URL; nothing is connected."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    login, at, hosts = place.rpartition("@")
    hosts, _, path = hosts.partition("/")
    single = scheme.lower().removesuffix("+cluster")

    if path not in ("", "0") or "db=" in query:
        raise InvalidURL(
            f"{redacted(url)!r}: a cluster has one database: leave out its number"
        )

    if not all(hosts.split(",")):
        raise InvalidURL(
            f"{redacted(url)!r}: write redis+cluster://host:6379,host:6379 with one or "
            "more nodes"
        )

    return [
        pool_of(f"{single}://{login}{at}{host}?{query}", size, timeout)
        for host in hosts.split(",")
    ]
