"""A real Redis Cluster for the tests: six servers, three primaries with a replica each.

`shared_cluster` is one cluster for the whole test session. `RedisCluster` is a private
one, whose nodes a test may kill and pause.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from conformance.slowdown import slowdown
from tests.servers.redis import PATIENCE, RedisServer

__all__ = ["SLOTS", "RedisCluster", "shared_cluster"]

SLOTS = 16384

PRIMARIES = 3


class RedisCluster:
    """A private cluster. The first three ``nodes`` begin as primaries.

    A replica takes over about ``node_timeout`` seconds after its primary is gone.
    ``settings`` go into every redis.conf.
    """

    def __init__(self, *, node_timeout: float = 2.0, **settings: str) -> None:
        self.nodes: list[RedisServer] = []
        self._settings = {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": str(int(1000 * node_timeout * slowdown())),
            "cluster-replica-validity-factor": "0",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }

    def url(self, **options: object) -> str:
        """Return the URL with the first and the last node."""
        ports = (self.nodes[0].port, self.nodes[-1].port)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return f"redis+cluster://{hosts}?{urlencode(options)}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise

        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

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
        self._until(lambda: all(self._is_ok(node) for node in self.nodes))

    def _start(self) -> None:
        for _ in range(2 * PRIMARIES):
            node = RedisServer(settings=self._settings)
            self.nodes.append(node)
            node.start()

        first = self.nodes[0]

        for n, node in enumerate(self.nodes[:PRIMARIES]):
            slots = range(n * SLOTS // PRIMARIES, (n + 1) * SLOTS // PRIMARIES)
            self.ask(node, "CLUSTER", "ADDSLOTS", *slots)
            self.ask(node, "CLUSTER", "SET-CONFIG-EPOCH", n + 1)

        for node in self.nodes[1:]:
            self.ask(first, "CLUSTER", "MEET", "127.0.0.1", node.port)

        count = f"cluster_known_nodes:{len(self.nodes)}"
        self._until(lambda: all(count in self._info(node) for node in self.nodes))

        for primary, replica in zip(
            self.nodes[:PRIMARIES], self.nodes[PRIMARIES:], strict=True
        ):
            name = self.ask(primary, "CLUSTER", "MYID")
            self._until(lambda r=replica, n=name: self._replicates(r, n))

        self.wait_until_ok()

    def _replicates(self, replica: RedisServer, primary: bytes) -> bool:
        self.ask(replica, "CLUSTER", "REPLICATE", primary)
        return True

    def _info(self, node: RedisServer) -> str:
        return str(self.ask(node, "CLUSTER", "INFO").decode())

    def _is_ok(self, node: RedisServer) -> bool:
        role: Any = self.ask(node, "ROLE")
        in_sync = role[0] == b"master" or role[3] == b"connected"
        return in_sync and "cluster_state:ok" in self._info(node)

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
        deadline = time.monotonic() + PATIENCE

        while True:
            try:
                if check():
                    return
            except RedisError as exc:
                last: object = exc
            else:
                last = "not yet"

            if time.monotonic() > deadline:
                states = [self._info(node) for node in self.nodes]
                raise RuntimeError(f"the cluster does not come up: {last}, {states}")

            time.sleep(0.02)


_shared: list[RedisCluster] = []
_starting = threading.Lock()


def shared_cluster() -> RedisCluster:
    """Return the session's cluster; each caller uses a prefix of its own."""
    with _starting:
        if not _shared:
            _shared.append(RedisCluster().__enter__())

    return _shared[0]
