"""A real Redis Cluster for the tests: six servers, three primaries with a replica each.

`shared_cluster` is one cluster for the whole test session. `RedisCluster` is a private
one, whose nodes a test may kill and pause. With ``links`` the links between its nodes
can be cut, too.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import AbstractAsyncContextManager
from typing import Any, Self
from urllib.parse import urlencode

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from conformance import Harness, Nodes
from conformance.slowdown import slowdown
from cpkit import Checkpointer
from cpkit_redis.schema import base_of
from tests.servers.cluster_links import ClusterLinks
from tests.servers.harness import ServerHarness
from tests.servers.process import PATIENCE, EndsWithBlock
from tests.servers.redis import RedisServer

__all__ = [
    "SLOTS",
    "ClusterHarness",
    "ClusterNodes",
    "RedisCluster",
    "harness",
    "shared_cluster",
]

SLOTS = 16384


class RedisCluster(EndsWithBlock):
    """A private cluster. The first ``nodes`` begin as ``primaries``.

    A replica takes over about ``node_timeout`` seconds after its primary is gone.
    With ``links`` the nodes reach each other through relays; with ``tls`` they and the
    clients use TLS. ``settings`` go into every redis.conf.
    """

    def __init__(
        self,
        *,
        node_timeout: float = 2.0,
        links: bool = False,
        tls: bool = False,
        primaries: int = 3,
        replicas: int = 1,
        **settings: str,
    ) -> None:
        self._primaries, self._replicas = primaries, replicas
        self.nodes: list[RedisServer] = []
        self.links = ClusterLinks() if links else None
        self.failing = ClusterNodes(self)
        self._tls = tls
        self._settings = {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": str(int(1000 * node_timeout * slowdown())),
            "cluster-replica-validity-factor": "0",
            **({"tls-cluster": "yes", "tls-replication": "yes"} if tls else {}),
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }

    def url(self, **options: object) -> str:
        """Return the URL with the first and the last node."""
        nodes = (self.nodes[0], self.nodes[-1])
        hosts = ",".join(f"127.0.0.1:{_own_port(node)}" for node in nodes)

        if self._tls:
            options["ssl_ca_certs"] = nodes[0].ca
            return f"rediss+cluster://{hosts}?{urlencode(options)}"

        return f"redis+cluster://{hosts}?{urlencode(options)}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise

        return self

    def close(self) -> None:
        for node in self.nodes:
            node.close()

        if self.links is not None:
            self.links.close()

    def kill(self) -> None:
        """Kill all nodes."""
        for node in self.nodes:
            node.kill()

    def start(self) -> None:
        """Start all nodes again, and wait until the cluster accepts writes."""
        for node in self.nodes:
            node.start()

        self.wait_until_ok()

    def pause(self) -> None:
        for node in self.nodes:
            node.pause()

    def resume(self) -> None:
        for node in self.nodes:
            node.resume()

        self.wait_until_ok()

    def ask(self, node: RedisServer, *command: Any) -> Any:
        """Send a command to one node."""
        with Redis(port=node.port) as client:
            return client.execute_command(*command)

    def primary_of(self, key: str | bytes) -> RedisServer:
        """Return the node that has a key now, as the nodes that run say."""
        slot = key_slot(key.encode() if isinstance(key, str) else key)
        return self._by_port(self._owner(slot))

    def move_slot(self, slot: int) -> None:
        """Move a slot to another primary while clients use it, as redis-cli does."""
        move = self.begin_move(slot)

        while self.move_keys(slot, move):
            continue

        self.end_move(slot, move)

    def begin_move(self, slot: int) -> tuple[RedisServer, RedisServer]:
        """Tell its primary and another one that the slot moves; return both."""
        source = self._by_port(self._owner(slot))
        target = next(
            node
            for node in self.nodes
            if node is not source and self.ask(node, "ROLE")[0] == b"master"
        )
        names = [self.ask(node, "CLUSTER", "MYID") for node in (source, target)]
        self.ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
        self.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
        return source, target

    def move_keys(self, slot: int, move: tuple[RedisServer, RedisServer]) -> bool:
        """Move one key of a slot that moves; return whether there was one."""
        source, target = move
        keys = self.ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 1)

        if keys:
            place = ("127.0.0.1", target.port, "", 0, 5000)
            self.ask(source, "MIGRATE", *place, "KEYS", *keys)

        return bool(keys)

    def end_move(self, slot: int, move: tuple[RedisServer, RedisServer]) -> None:
        """Give the slot, which has no key left, to the other primary."""
        source, target = move
        name = self.ask(target, "CLUSTER", "MYID")

        for node in (target, source):
            self.ask(node, "CLUSTER", "SETSLOT", slot, "NODE", name)

    def wait_until_ok(self) -> None:
        """Return when every node knows all slots and each replica has its data."""
        self._until(self._is_ok)

    def wait_until_replaced(self, lost: RedisServer) -> None:
        """Return when all other nodes know who has the slots of a lost primary."""
        others = [node for node in self.nodes if node is not lost]
        self._until(lambda: all(self._knows(node, lost) for node in others))

    def wait_until_replica(self, node: RedisServer) -> None:
        """Return when a primary that was replaced knows it."""
        self._until(lambda: self.ask(node, "ROLE")[0] == b"slave")

    def _start(self) -> None:
        for _ in range(self._primaries * (1 + self._replicas)):
            tls = self._tls and (self.nodes[0] if self.nodes else True)
            node = RedisServer(tls=tls, settings=self._settings)
            self.nodes.append(node)

            if self.links is not None:
                node.settings |= self.links.add(node.port)

            node.start()

        first, count = self.nodes[0], self._primaries
        primaries, replicas = self.nodes[:count], self.nodes[count:]

        for n, node in enumerate(primaries):
            slots = range(n * SLOTS // count, (n + 1) * SLOTS // count)
            self.ask(node, "CLUSTER", "ADDSLOTS", *slots)
            self.ask(node, "CLUSTER", "SET-CONFIG-EPOCH", n + 1)

        for node in self.nodes[1:]:
            host = node.settings.get("cluster-announce-ip", "127.0.0.1")
            self.ask(first, "CLUSTER", "MEET", host, _own_port(node))

        known = f"cluster_known_nodes:{len(self.nodes)}"
        self._until(lambda: all(known in self._info(node) for node in self.nodes))

        for primary, replica in zip(primaries * self._replicas, replicas, strict=True):
            name = self.ask(primary, "CLUSTER", "MYID")
            self._until(lambda r=replica, n=name: self._replicates(r, n))

        self.wait_until_ok()

    def _replicates(self, replica: RedisServer, primary: bytes) -> bool:
        self.ask(replica, "CLUSTER", "REPLICATE", primary)
        return True

    def _info(self, node: RedisServer) -> str:
        return str(self.ask(node, "CLUSTER", "INFO").decode())

    def _is_ok(self) -> bool:
        roles = [self.ask(node, "ROLE") for node in self.nodes]
        primaries = {
            # A replica names the port to which it connects.
            node.tls_port or node.port: role[1]
            for node, role in zip(self.nodes, roles, strict=True)
            if role[0] == b"master"
        }

        return (
            len(primaries) == self._primaries
            and all("cluster_state:ok" in self._info(node) for node in self.nodes)
            and all(self._is_in_sync(node, primaries) for node in self.nodes)
        )

    def _is_in_sync(self, node: RedisServer, primaries: dict[int, int]) -> bool:
        """Tell whether a node has what the primaries had."""
        role: Any = self.ask(node, "ROLE")

        if role[0] == b"master":
            return True

        _, _, port, state, offset = role
        return state == b"connected" and int(offset) >= primaries.get(port, math.inf)

    def _knows(self, node: RedisServer, lost: RedisServer) -> bool:
        """Tell whether a node knows that another one has the slots of the lost one."""
        slots: Any = self.ask(node, "CLUSTER", "SLOTS")
        owners = {port for _, _, (_, port, *_), *_ in slots}
        return lost.port not in owners and "cluster_state:ok" in self._info(node)

    def _owner(self, slot: int) -> int:
        for node in self.nodes:
            try:
                for start, stop, (_, port, *_), *_ in self.ask(
                    node, "CLUSTER", "SLOTS"
                ):
                    if start <= slot <= stop:
                        return int(port)
            except RedisError:
                continue

        raise RuntimeError(f"no node has slot {slot}")

    def _by_port(self, port: int) -> RedisServer:
        return next(node for node in self.nodes if node.port == port)

    def _until(self, check: Any) -> None:
        # A link that was cut may connect again after half a minute: TCP waits longer
        # before each retry.
        deadline = time.monotonic() + 3 * PATIENCE

        while True:
            try:
                if check():
                    return
            except RedisError as exc:
                last: object = exc
            else:
                last = "not yet"

            if time.monotonic() > deadline:
                states = [self.ask(n, "CLUSTER", "NODES") for n in self.nodes]
                raise RuntimeError(f"the cluster does not come up: {last}, {states}")

            time.sleep(0.25)


class ClusterNodes(Nodes):
    """The nodes of a cluster with links, named by their ports."""

    may_lose = True

    def __init__(self, cluster: RedisCluster) -> None:
        self._cluster = cluster
        self._paused: set[RedisServer] = set()

    async def names(self) -> list[str]:
        return [str(node.port) for node in self._cluster.nodes]

    async def leader(self, thread_id: str) -> str:
        key = base_of("cpkit")
        return str((await asyncio.to_thread(self._cluster.primary_of, key)).port)

    async def kill(self, node: str) -> None:
        await asyncio.to_thread(self._node(node).kill)

    async def pause(self, node: str) -> None:
        self._paused.add(self._node(node))
        self._node(node).pause()

    async def resume(self, node: str) -> None:
        self._paused.discard(self._node(node))
        self._node(node).resume()
        await asyncio.to_thread(self._cluster.wait_until_replica, self._node(node))

    async def cut(self, one: str, other: str) -> None:
        assert self._cluster.links is not None
        self._cluster.links.cut(int(one), int(other))

    async def take_over(self, lost: str) -> None:
        await asyncio.to_thread(self._cluster.wait_until_replaced, self._node(lost))

    async def restore(self) -> None:
        assert self._cluster.links is not None
        self._cluster.links.reconnect()

        for node in self._cluster.nodes:
            if node in self._paused:
                node.resume()
            elif not node.running:
                await asyncio.to_thread(node.start)

        self._paused.clear()
        await asyncio.to_thread(self._cluster.wait_until_ok)

    def _node(self, name: str) -> RedisServer:
        return next(one for one in self._cluster.nodes if str(one.port) == name)


class ClusterHarness(ServerHarness):
    """All nodes are killed and paused together: without a failover nothing is lost."""

    server: RedisCluster

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        # An operation waits so long for nodes that are away.
        return super().open(**{"timeout": 10.0, **options})

    def nodes(self) -> Nodes | None:
        return None if self.server.links is None else self.server.failing

    async def connections(self) -> int:
        def count() -> int:
            found = 0

            for node in self.server.nodes:
                listed = self.server.ask(node, "CLIENT", "LIST", "TYPE", "normal")
                found += len(listed.splitlines()) - 1

            return found

        return await asyncio.to_thread(count)

    async def bytes_written(self) -> int:
        def count() -> int:
            infos = (
                self.server.ask(node, "INFO", "persistence")
                for node in self.server.nodes
            )
            return sum(int(info["aof_current_size"]) for info in infos)

        return await asyncio.to_thread(count)


def harness() -> Harness:
    """Return a harness of a new cluster, for ``cpkit certify module:harness``."""
    cluster = RedisCluster(links=True).__enter__()
    return ClusterHarness(cluster.url(connect_timeout=10), cluster)


def _own_port(node: RedisServer) -> int:
    """Return the port that a node tells the others."""
    return node.tls_port or node.port


_shared: list[RedisCluster] = []
_starting = threading.Lock()


def shared_cluster() -> RedisCluster:
    """Return the session's cluster; each caller uses a prefix of its own."""
    with _starting:
        if not _shared:
            _shared.append(RedisCluster().__enter__())

    return _shared[0]
