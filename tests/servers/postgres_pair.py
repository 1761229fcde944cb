"""A Postgres primary with a synchronous standby, and links that can be cut.

Clients and the standby connect through relays of this process. So a node can be cut
off, and a primary that was replaced is fenced: its clients no longer reach it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlencode

import asyncpg

from conformance import Harness, Nodes, URLHarness
from conformance.proxy import Proxy
from tests.servers.postgres import PostgresServer

__all__ = ["PairHarness", "PostgresPair", "harness"]


class _Link(Proxy):
    """A relay that can refuse connections."""

    refuses = False

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.refuses:
            writer.transport.abort()
        else:
            await super()._accept(reader, writer)

    def close(self) -> None:
        """Cut every connection, and refuse new ones."""
        self.refuses = True
        self.cut()


class _Node:
    """A server, and the links to it: of clients, and of its standby."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.server = PostgresServer(settings=settings)
        self.clients = _Link("127.0.0.1", self.server.port)
        self.standby = _Link("127.0.0.1", self.server.port)

    async def execute(self, sql: str) -> Any:
        """Run a statement, not over a link; return its first value."""
        connection = await asyncpg.connect(self.server.url)

        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()


class PostgresPair(Nodes):
    """Two servers: ``h1`` is the first primary. A context manager.

    A commit is acknowledged when it is on both disks. After a failover the new primary
    commits alone, until `restore` has made the other one its standby.
    """

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        settings = {"wal_retrieve_retry_interval": "200ms", **(settings or {})}
        self.nodes = {name: _Node(settings) for name in ("h1", "h2")}
        self.primary = "h1"
        self._paused: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()

        for node in self.nodes.values():
            self._run(node.clients.__aenter__())
            self._run(node.standby.__aenter__())

        self.nodes["h1"].server.start()
        self._run(self._follow("h2"))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for node in self.nodes.values():
            if node.server.running:
                node.server.resume()

            node.server.close()
            self._run(node.clients.__aexit__())
            self._run(node.standby.__aexit__())

        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{n.clients.port}" for n in self.nodes.values())
        return f"postgresql://postgres@{hosts}/postgres"

    async def names(self) -> list[str]:
        return [*self.nodes]

    async def leader(self, thread_id: str) -> str:
        return self.primary

    async def kill(self, node: str) -> None:
        await asyncio.to_thread(self.nodes[node].server.kill)

    async def pause(self, node: str) -> None:
        self._paused.add(node)
        self.nodes[node].server.pause()

    async def resume(self, node: str) -> None:
        self._paused.discard(node)
        self.nodes[node].server.resume()

    async def cut(self, one: str, other: str) -> None:
        await self._call(self.nodes[self.primary].standby.close)

    async def take_over(self, lost: str) -> None:
        """Fence the primary and promote the standby, as an operator's tool does."""
        assert lost == self.primary
        await self._call(self.nodes[lost].clients.close)
        await self._call(self.nodes[lost].standby.close)
        self.primary = self._other(lost)
        node = self.nodes[self.primary]
        assert await node.execute("SELECT pg_promote()")
        await self._wait_for_standby(node, "")

    async def restore(self) -> None:
        other = self._other(self.primary)
        server = self.nodes[other].server

        if other in self._paused:
            await self.resume(other)

        if self.primary in self._paused:
            await self.resume(self.primary)

        if not self.nodes[self.primary].server.running:
            await asyncio.to_thread(self.nodes[self.primary].server.start)

        await asyncio.to_thread(server.kill)
        await self._follow(other)

    async def _follow(self, name: str) -> None:
        """Make a node the standby of the primary, and wait until it is in sync."""
        node, primary = self.nodes[name], self.nodes[self.primary]
        url = f"postgresql://postgres@127.0.0.1:{primary.standby.port}/postgres"

        for one in (node, primary):
            one.clients.refuses = one.standby.refuses = False

        await asyncio.to_thread(node.server.follow, url)
        await asyncio.to_thread(node.server.start)
        await self._wait_for_standby(primary, "walreceiver")

    async def _wait_for_standby(self, node: _Node, standby: str) -> None:
        """Set the standby that commits wait for, and wait until it is in sync."""
        await node.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standby}'")
        await node.execute("SELECT pg_reload_conf()")
        await self.wait_until_in_sync(1 if standby else 0)

    async def wait_until_in_sync(self, standbys: int = 1) -> None:
        """Wait until commits wait for so many standbys."""
        sync = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        primary = self.nodes[self.primary]

        while await primary.execute(sync) != standbys:  # noqa: ASYNC110  # the server's state
            await asyncio.sleep(0.02)

    def _other(self, name: str) -> str:
        (other,) = self.nodes.keys() - {name}
        return other

    def _run(self, work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _call(self, work: Any) -> None:
        """Run a function in the relays' event loop."""

        async def run() -> None:
            work()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        await asyncio.wrap_future(future)


@dataclass
class PairHarness(URLHarness):
    """A store on a pair. Both servers are killed and paused together."""

    pair: PostgresPair

    options = Harness.options | {"timeout"}

    def elsewhere(self) -> Harness:
        return URLHarness(self.url)

    def nodes(self) -> Nodes:
        return self.pair

    async def kill(self) -> None:
        for name in self.pair.nodes:
            await self.pair.kill(name)

    async def start(self) -> None:
        for node in self.pair.nodes.values():
            await asyncio.to_thread(node.server.start)

        await self.pair.wait_until_in_sync()

    async def pause(self) -> None:
        for name in self.pair.nodes:
            await self.pair.pause(name)

    async def resume(self) -> None:
        for name in self.pair.nodes:
            await self.pair.resume(name)

    def server_address(self) -> tuple[str, int]:
        return "127.0.0.1", self._primary.clients.port

    async def gather_statistics(self) -> None:
        await self._primary.execute("ANALYZE")

    async def connections(self) -> int:
        return int(
            await self._primary.execute(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
        )

    async def bytes_written(self) -> int:
        return int(
            await self._primary.execute(
                "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')"
            )
        )

    @property
    def _primary(self) -> _Node:
        return self.pair.nodes[self.pair.primary]


def harness(**options: str) -> Harness:
    """Return a harness of a new pair, for ``cpkit certify module:harness``."""
    pair = PostgresPair().__enter__()
    return PairHarness(
        f"{pair.url}?{urlencode({'connect_timeout': 10} | options)}", pair
    )
