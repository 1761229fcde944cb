"""Cancelled at any point: done or not done, and the pool whole."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cpkit import Closed, ToolCall
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import MakeStore

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


async def test_a_storm_of_cancellations(store: MakeStore) -> None:
    """600 operations, most of them cancelled anywhere: nothing torn, nothing stuck."""
    order = random.Random(7)

    async with store(pool_size=3) as cp:
        await cp.record_issued("t", ToolCall("given", "x", {}, "given"))

        for _ in range(6):
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

        # What was begun is at its end: every connection is free, and none was lost.
        connections = cp._connections

        while under_way := connections._mending:
            await asyncio.wait(under_way)

        pool = connections._pool
        assert connections._places._value == 3
        assert pool is not None
        assert pool.get_size() - pool.get_idle_size() == len(connections._idle)


@pytest.mark.parametrize("turns", range(8))
async def test_closing_waits_for_what_is_under_way(
    turns: int, store: MakeStore
) -> None:
    """An abandoned operation ends before the connections do; a later one is refused."""
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
    """Whatever was made by then, the next handle opens."""
    for turns in (0, 1, 2, 3, 5, 10, 20):
        opening = asyncio.create_task(store().__aenter__())

        for _ in range(turns):
            await asyncio.sleep(0)

        opening.cancel()

        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).aclose()

    async with store() as cp:
        assert await cp.append("t", [{}]) == 1
