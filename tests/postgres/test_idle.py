"""Idle connections that a firewall has forgotten: packets vanish without an error."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable
from cpkit_postgres import PostgresCheckpointer, PostgresStore, connections
from tests.postgres.conftest import MakeStore
from tests.postgres.proxy import Proxy
from tests.servers.postgres import shared_postgres

Store = PostgresCheckpointer[Any]


class Firewall(Proxy):
    """A relay that can forget its connections; new ones work."""

    forgotten: frozenset[asyncio.StreamWriter] = frozenset()

    def forget(self) -> None:
        self.forgotten = frozenset(self._open)

    async def pass_on(self, part: str, data: bytes, writer: Any) -> None:
        if writer not in self.forgotten:
            await super().pass_on(part, data, writer)


async def use(cp: Store) -> None:
    """Open eight connections."""
    await cp.append("t", [{}])
    await asyncio.gather(*(cp.load("t") for _ in range(8)))


async def test_one_failure_retires_the_others(store: MakeStore) -> None:
    """They are all forgotten; the next operation makes a new connection."""
    async with Firewall(shared_postgres()) as firewall:
        timeout = 1.0 * slowdown()

        async with store(firewall.url, timeout=timeout, notify=False) as cp:
            await use(cp)
            assert firewall.open_connections == 8
            firewall.forget()

            with pytest.raises(BackendUnavailable, match="no answer"):
                await cp.load("t")

            assert await cp.load("t") is not None
            assert await cp.append("t", [{}]) == 2


async def test_one_failure_retires_those_of_a_callers_pool(store: MakeStore) -> None:
    """The pool replaces them when they are used next."""

    async def keep(connection: object) -> None:
        """Leave the connection as it is."""

    async with Firewall(shared_postgres()) as firewall:
        timeout = 1.0 * slowdown()
        made = asyncpg.create_pool(firewall.url, min_size=8, max_size=8, reset=keep)

        async with made as pool:
            async with store(pool, timeout=timeout, notify=False) as cp:
                await use(cp)
                firewall.forget()

                with pytest.raises(BackendUnavailable, match="no answer"):
                    await cp.load("t")

                assert await cp.load("t") is not None

            pool.terminate()


async def test_a_cancelled_call_retires_nothing(store: MakeStore) -> None:
    """A caller's cancellation says nothing about the other connections."""
    async with Firewall(shared_postgres()) as firewall:
        async with store(firewall.url, notify=False) as cp:
            await use(cp)
            firewall.stalls = True
            load = asyncio.create_task(cp.load("t"))
            await asyncio.sleep(0)
            load.cancel()

            with pytest.raises(asyncio.CancelledError):
                await load

            firewall.stalls = False
            made = firewall.connections
            await asyncio.gather(*(cp.load("t") for _ in range(7)))
            assert firewall.connections == made


async def test_connections_that_were_idle_for_long_are_closed(
    store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next operation makes a new one, and the one after it uses that."""
    async with Firewall(shared_postgres()) as firewall:
        async with store(firewall.url, notify=False) as cp:
            await use(cp)
            firewall.forget()
            monkeypatch.setattr(connections, "_IDLE_LIMIT", 0)
            assert await cp.append("t", [{}]) == 2
            monkeypatch.undo()
            assert await cp.append("t", [{}]) == 3
            assert firewall.connections == 9

            while firewall.open_connections > 1:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.002)


async def test_the_server_keeps_a_connection_alive(store: MakeStore) -> None:
    """It sends a probe each minute, so that a firewall sees traffic."""
    async with store() as cp:
        inner = cp.store
        assert isinstance(inner, PostgresStore)
        [[idle]] = await inner._connections.fetch("SHOW tcp_keepalives_idle")
        assert idle == "60"
