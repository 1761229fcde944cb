"""A Galera cluster of three MariaDB nodes, for tests: clients work at all of them.

A node that is killed starts as Debian's service starts it: with the position that
``--wsrep-recover`` finds, so that the others send it only what it missed.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from asyncmy.errors import MySQLError

from conformance import Harness, Nodes, URLHarness
from conformance.slowdown import slowdown
from cpkit import Checkpointer, open_checkpointer
from tests.servers.mariadb import DATABASE, MariaDBServer
from tests.servers.process import PATIENCE, EndsWithBlock, free_port, switched_to

__all__ = ["GaleraCluster", "GaleraHarness", "galera_library", "harness"]


def galera_library() -> Path:
    """Return Galera's library; raise ``FileNotFoundError`` if it is missing."""
    for place in ("/usr/lib/galera", "/usr/lib64/galera-4", "/usr/lib64/galera"):
        if (path := Path(place, "libgalera_smm.so")).exists():
            return path

    raise FileNotFoundError("libgalera_smm.so (Debian: galera-4)")


class _Node(MariaDBServer):
    """A node of a cluster. Its clients, its peers and transfers have a port each."""

    def __init__(self, suspect: float) -> None:
        self.peer_port, self.ist_port, self.sst_port = (free_port() for _ in range(3))
        provider = {
            "gmcast.listen_addr": f"tcp://127.0.0.1:{self.peer_port}",
            "ist.recv_addr": f"127.0.0.1:{self.ist_port}",
            "gcache.size": "32M",
            "evs.keepalive_period": f"PT{suspect / 5:.2f}S",
            "evs.inactive_check_period": f"PT{suspect / 5:.2f}S",
            "evs.suspect_timeout": f"PT{suspect:.2f}S",
            "evs.inactive_timeout": f"PT{suspect * 2:.2f}S",
            "evs.install_timeout": f"PT{suspect * 2:.2f}S",
            "gmcast.peer_timeout": f"PT{suspect:.2f}S",
        }
        super().__init__(
            settings={
                "binlog_format": "ROW",
                "innodb_autoinc_lock_mode": "2",
                "wsrep_on": "ON",
                "wsrep_provider": str(galera_library()),
                "wsrep_cluster_name": "cpkit",
                "wsrep_node_address": "127.0.0.1",
                "wsrep_sst_receive_address": f"127.0.0.1:{self.sst_port}",
                "wsrep_sst_method": "rsync",
                "wsrep_provider_options": ";".join(
                    f"{name}={value}" for name, value in provider.items()
                ),
            }
        )

    def create(self) -> None:
        """Create the data without a cluster."""
        joined, self.settings = self.settings, self.settings | {"wsrep_on": "OFF"}
        del self.settings["wsrep_provider"]
        super().create()
        self.settings = joined

    def recovered(self) -> list[str]:
        """Return the argument that names the last transaction of the data."""
        said = subprocess.run(
            [self._binary, *self._options, "--wsrep-recover"],
            capture_output=True,
            text=True,
            check=True,
            **switched_to(self.user),
        ).stderr
        found = re.findall(r"Recovered position:? *(\S+:-?\d+)", said)
        return [f"--wsrep-start-position={found[-1]}"] if found else []

    async def status(self) -> Mapping[str, str]:
        """Return what the node says of its cluster; nothing if it does not answer."""
        with suppress(MySQLError, OSError):
            async with asyncio.timeout(1):
                return dict(await self.rows("SHOW STATUS LIKE 'wsrep_%'"))

        return {}


class GaleraCluster(Nodes, EndsWithBlock):
    """Three nodes. A node that is silent for ``suspect`` seconds is expelled."""

    def __init__(self, suspect: float | None = None) -> None:
        self.nodes = {f"n{i}": _Node(suspect or slowdown()) for i in (1, 2, 3)}
        peers = ",".join(f"127.0.0.1:{one.peer_port}" for one in self.nodes.values())
        self._paused: set[str] = set()
        self._isolated: set[str] = set()
        self.opened = 0

        for name, node in self.nodes.items():
            node.settings["wsrep_cluster_address"] = f"gcomm://{peers}"
            node.settings["wsrep_node_name"] = name

    def start(self) -> None:
        """Begin a cluster with one node; the others get its data from it."""
        first, *others = self.nodes.values()
        first.start("--wsrep-new-cluster")

        for one in others:
            one.start()

        asyncio.run(self._until(3))

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()

    def url(self, **options: object) -> str:
        """Return a URL of all nodes; each call begins with another one."""
        nodes = [*self.nodes.values()]
        turn = self.opened % len(nodes)
        hosts = ",".join(f"127.0.0.1:{n.port}" for n in nodes[turn:] + nodes[:turn])
        query = f"?{urlencode(options)}" if options else ""
        return f"mariadb://{nodes[0].login}@{hosts}/{DATABASE}{query}"

    async def names(self) -> list[str]:
        return [*self.nodes]

    async def leader(self, thread_id: str) -> str:
        """Return the node of the newest handle: every node takes writes."""
        return [*self.nodes][self.opened % len(self.nodes)]

    async def kill(self, node: str) -> None:
        await asyncio.to_thread(self.nodes[node].kill)

    async def pause(self, node: str) -> None:
        self._paused.add(node)
        self.nodes[node].pause()

    async def resume(self, node: str) -> None:
        self._paused.discard(node)
        self.nodes[node].resume()

    async def cut(self, one: str, other: str) -> None:
        """Cut a node off from both others: they form a full mesh."""
        if one not in self._isolated:
            self._isolated.add(one)
            await self._isolate(one, 1)

    async def take_over(self, lost: str) -> None:
        """The others go on by themselves, when they have expelled the lost node."""
        await self._until(2, without=lost)

    async def restore(self) -> None:
        for name in [*self._paused]:
            await self.resume(name)

        for name in [*self._isolated]:
            await self._isolate(name, 0)
            self._isolated.discard(name)

        for node in self.nodes.values():
            if not node.running:
                position = await asyncio.to_thread(node.recovered)
                await asyncio.to_thread(node.start, *position)

        await self._until(3)

    async def _isolate(self, name: str, value: int) -> None:
        option = f"gmcast.isolate={value}"
        await self.nodes[name].rows(f"SET GLOBAL wsrep_provider_options = '{option}'")

    async def _until(self, size: int, without: str = "") -> None:
        """Wait until so many nodes are one cluster, and each has what it missed."""
        expected = {
            "wsrep_cluster_status": "Primary",
            "wsrep_cluster_size": str(size),
            "wsrep_local_state_comment": "Synced",
            "wsrep_ready": "ON",
        }
        deadline = time.monotonic() + 2 * PATIENCE

        for name, node in self.nodes.items():
            while name != without:
                status = await node.status()

                if expected.items() <= status.items():
                    break

                if time.monotonic() > deadline:
                    raise RuntimeError(f"{name}: {status}\n{node.log[-4000:]}")

                await asyncio.sleep(0.05)


@dataclass
class GaleraHarness(URLHarness):
    """A store on a cluster. Handles begin with different nodes."""

    cluster: GaleraCluster

    options = Harness.options | {"timeout"}

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        self.cluster.opened += 1
        query = self.url.partition("?")[2]
        url = f"{self.cluster.url()}?{query}" if query else self.cluster.url()
        return open_checkpointer(url, **options)

    def elsewhere(self) -> Harness:
        return URLHarness(self.url)

    def nodes(self) -> Nodes:
        return self.cluster

    def at_node(self, node: str) -> Harness:
        query = self.url.partition("?")[2]
        return URLHarness(f"{self.cluster.nodes[node].url}?{query}")


def harness(**options: str) -> Harness:
    """Return a harness of a new cluster, for ``cpkit certify module:harness``."""
    cluster = GaleraCluster().__enter__()
    return GaleraHarness(cluster.url(**{"connect_timeout": 10, **options}), cluster)
