"""The links between the nodes of a Redis Cluster, which can be cut; on Linux alone.

Node ``n`` tells the others that it is at 127.0.1.n, where relays of this process listen
at its two ports. It connects to the others from 127.0.2.n, which shows the relays whose
link it is. Clients connect to the node itself. (Redis before 7 sends clients to the
relays as well.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from conformance.proxy import Proxy

__all__ = ["ClusterLinks"]

BUS = 10_000
"""The port of a node's bus is so much above the port of its clients."""


class _Relay(Proxy):
    """Listens at a port of a node, and refuses some of the other nodes."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__("127.0.0.1", port)
        self.host = host
        self.refused: set[str] = set()

    async def __aenter__(self) -> _Relay:
        self._listener = await asyncio.start_server(
            self._accept, self.host, self.server[1]
        )
        return self

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if writer.get_extra_info("peername")[0] in self.refused:
            writer.transport.abort()
        else:
            await super()._accept(reader, writer)

    async def refuse(self, hosts: set[str]) -> None:
        self.refused = hosts
        self.cut()  # the nodes that are not refused connect again


class ClusterLinks:
    """Relays to nodes, which are named by port, in an event loop of their own."""

    def __init__(self) -> None:
        self._relays: dict[int, list[_Relay]] = {}
        self._sources: dict[int, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def add(self, port: int) -> dict[str, str]:
        """Listen for a node; return the settings with which its links go this way."""
        number = len(self._relays) + 1
        host, source = f"127.0.1.{number}", f"127.0.2.{number}"
        self._relays[port] = [_Relay(host, one) for one in (port, port + BUS)]
        self._sources[port] = source

        for relay in self._relays[port]:
            self._run(relay.__aenter__())

        return {
            # Redis before 7 connects from the first of these.
            "bind": f"{source} 127.0.0.1",
            "bind-source-addr": source,
            "cluster-announce-ip": host,
            # Clients stay at the host that they know.
            "cluster-preferred-endpoint-type": "unknown-endpoint",
        }

    def cut(self, one: int, other: int) -> None:
        """Cut the link between two nodes, in both directions."""
        self._refuse(one, other)
        self._refuse(other, one)

    def reconnect(self) -> None:
        """Let all nodes connect again."""
        for relays in self._relays.values():
            for relay in relays:
                relay.refused = set()

    def close(self) -> None:
        for relays in self._relays.values():
            for relay in relays:
                self._run(relay.__aexit__())

        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _refuse(self, node: int, other: int) -> None:
        for relay in self._relays[node]:
            self._run(relay.refuse({*relay.refused, self._sources[other]}))

    def _run(self, work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()
