"""Cancelled at any point: applied or not applied, and no connection leaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import pytest

from cpkit import Closed, ToolCall
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import MakeStore
from tests.postgres.proxy import Proxy
from tests.servers.postgres import shared_postgres
from tests.sweeps import sweep

Store = PostgresCheckpointer[Any]

OPERATIONS: list[Callable[[Store, int], Coroutine[Any, Any, Any]]] = [
    lambda cp, i: cp.append("t", [{"i": i, "half": 0}, {"i": i, "half": 1}]),
    lambda cp, i: cp.save_extra("t", {f"a {i}": i, f"b {i}": i}),
    lambda cp, i: cp.record_issued("t", ToolCall(f"{i}", "x", {}, f"{i}")),
    lambda cp, i: cp.record_result("t", "given", i),
    lambda cp, i: cp.load("t"),
    lambda cp, i: cp.list_threads(),
    lambda cp, i: cp.delete_thread(f"gone {i}"),
]


@pytest.mark.parametrize("hundreds", sweep([2, 6], [2]))
async def test_hundreds_of_cancelled_operations(
    store: MakeStore, raw: asyncpg.Connection, hundreds: int
) -> None:
    """Each is applied wholly or not at all, and no connection is lost or left over."""
    order = random.Random(7)
    where = f"{shared_postgres()}?application_name=cancelled"
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'cancelled'"

    async with store(where, pool_size=3) as cp:
        await cp.record_issued("t", ToolCall("given", "x", {}, "given"))

        for _ in range(hundreds):
            tasks = [
                asyncio.create_task(
                    order.choice(OPERATIONS)(cp, order.randrange(10**9))
                )
                for _ in range(100)
            ]

            for task in order.sample(tasks, 80):
                for _ in range(order.randrange(3)):
                    await asyncio.sleep(0)

                task.cancel()

            await asyncio.gather(*tasks, return_exceptions=True)

        assert await cp.append("t", [{"i": -1, "half": 0}, {"i": -1, "half": 1}]) > 0
        data = await cp.load("t")
        assert data is not None
        halves = [message["half"] for message in data.messages]
        assert halves == [0, 1] * (len(halves) // 2)
        assert all((f"b{key[1:]}" in data.extra) for key in data.extra if key[0] == "a")

        # Three operations can still run at the same time, and not more.
        await asyncio.gather(*(cp.load("t") for _ in range(100)))

        while await raw.fetchval(count) > 3:  # servers of cut connections end late
            await raw.execute("SELECT pg_sleep(0.002)")

    while await raw.fetchval(count):
        await raw.execute("SELECT pg_sleep(0.002)")


async def test_a_cancelled_read_sends_nothing(schema: str, url: str) -> None:
    """Not even a request to cancel: a pooler could pass it to another statement."""
    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema, pool_size=1, notify=False) as cp:
            await cp.append("t", [{}])

            for connections in range(1, 30):
                await cp.load("t")
                assert proxy.connections == connections
                sent = proxy.trips
                proxy.stalls = True
                reading = asyncio.create_task(cp.load("t"))

                while True:
                    await asyncio.sleep(0)

                    if proxy.trips > sent:
                        break

                reading.cancel()
                await asyncio.wait([reading])
                assert reading.cancelled()
                proxy.stalls = False


@pytest.mark.parametrize("turns", sweep(range(8), range(0, 8, 3)))
async def test_closing_waits_for_abandoned_operations(
    turns: int, store: MakeStore
) -> None:
    """An abandoned write ends before the connections do; a later call is refused."""
    async with store() as cp:
        await cp.append("t", [{}])
        task = asyncio.create_task(cp.append("t", [{}], expected_version=1))

        for _ in range(turns):
            await asyncio.sleep(0)

        task.cancel()

    with contextlib.suppress(asyncio.CancelledError):
        await task

    with pytest.raises(Closed):
        await cp.load("t")

    async with store() as again:
        data = await again.load("t")
        assert data is not None
        assert data.version in (1, 2)


async def test_cancelled_while_opening(store: MakeStore) -> None:
    """The next handle opens, however far the cancelled one came."""
    for turns in (0, 1, 2, 3, 5, 10, 20):
        opening = asyncio.create_task(store().__aenter__())

        for _ in range(turns):
            await asyncio.sleep(0)

        opening.cancel()

        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).aclose()

    async with store() as cp:
        assert await cp.append("t", [{}]) == 1
