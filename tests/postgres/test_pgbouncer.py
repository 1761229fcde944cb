"""Behind a PgBouncer that gives each transaction another server connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from conformance import ConformanceTests, Harness, URLHarness
from cpkit import BackendUnavailable, ToolCall
from cpkit_postgres import PostgresCheckpointer
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer, shared_postgres

Store = PostgresCheckpointer[Any]


@pytest.fixture(scope="module")
def pooler() -> Iterator[PgBouncer]:
    """A PgBouncer in front of the shared server, with four server connections."""
    with PgBouncer(shared_postgres()) as pooler:
        yield pooler


@pytest.mark.long
class TestPooled(ConformanceTests):
    """The whole contract holds."""

    @pytest.fixture
    def harness(self, pooler: PgBouncer) -> Harness:
        return URLHarness(f"{pooler.url}?pooler=transaction&schema=pooled")


async def test_many_clients_on_few_connections(
    pooler: PgBouncer, url: str, schema: str
) -> None:
    """Three handles with eight connections each share four, and create the schema."""
    stores = [Store(pooler.url, schema=schema, pooler="transaction") for _ in range(3)]

    async def use(cp: Store, name: str) -> None:
        async with cp:
            for turn in range(3):
                await asyncio.gather(
                    *(cp.append(f"t{i}", [{"by": name}]) for i in range(20)),
                    *(cp.save_extra(f"t{i}", {name: turn}) for i in range(20)),
                    *(cp.load(f"t{i}") for i in range(20)),
                    *(
                        cp.record_issued(
                            "t", ToolCall(f"{name} {turn} {i}", "x", {}, f"{i}")
                        )
                        for i in range(10)
                    ),
                )

    await asyncio.gather(*(use(cp, f"n{i}") for i, cp in enumerate(stores)))

    async with Store(pooler.url, schema=schema, pooler="transaction") as cp:
        for i in range(20):
            data = await cp.load(f"t{i}")
            assert data is not None
            assert data.version == 3 * 3
            assert data.extra == {"n0": 2, "n1": 2, "n2": 2}

        assert len(await cp.list_calls("t")) == 10


async def test_the_server_behind_it_restarts(schema: str) -> None:
    """The handle works on; errors say what may be lost."""
    with PostgresServer() as server, PgBouncer(server.url) as pooler:
        async with Store(
            pooler.url, schema=schema, pooler="transaction", connect_timeout=15
        ) as cp:
            await cp.append("t", [{}])
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            version = 1
            lost = []

            while version < 4:
                try:
                    version = await cp.append("t", [{}], expected_version=version)
                except BackendUnavailable as exc:
                    lost.append(exc.maybe_applied)
                    data = await cp.load("t")
                    version = data.version if data else 0

            assert all(lost)
            data = await cp.load("t")
            assert data is not None
            assert data.version == 4
