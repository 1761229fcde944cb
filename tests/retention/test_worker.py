"""A worker prunes by its policy, once an hour for all workers of a store."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cpkit import Checkpointer, MemoryCheckpointer
from cpkit.lease import Lease
from cpkit.retention import Retention
from cpkit.worker import PRUNING, Worker
from tests.effects.shop import until

POLICY = Retention(keep_last=2)


async def agent(cp: Checkpointer[Any], lease: Lease) -> None:
    """Do nothing: no thread needs a run."""


async def run_until(cp: Any, is_over: Any) -> None:
    """Run a worker with the policy until a condition holds."""
    stop = asyncio.Event()
    running = asyncio.create_task(Worker(cp, agent, retention=POLICY).run(stop))

    await until(is_over)
    stop.set()
    await running


async def first(cp: Any) -> int:
    data = await cp.load("t")
    return int(data.first)


async def test_one_worker_prunes_once_an_hour() -> None:
    """The second worker finds that an hour has not passed; then it has."""
    async with MemoryCheckpointer[Any]() as opened:
        cp: Any = opened
        await cp.append("t", [{"n": n} for n in range(10)])

        async def is_cut() -> bool:
            return await first(cp) > 0

        await run_until(cp, is_cut)
        assert await first(cp) == 8
        await cp.append("t", [{"n": n} for n in range(10)])
        looks = 0

        async def has_looked() -> bool:
            nonlocal looks
            looks += 1
            return looks > 10

        await run_until(cp, has_looked)
        assert await first(cp) == 8

        hour_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
        await cp.save_extra(PRUNING, {"": hour_ago})

        async def is_cut_again() -> bool:
            return await first(cp) > 8

        await run_until(cp, is_cut_again)
        assert await first(cp) == 18


async def test_a_store_that_cannot_is_refused() -> None:
    """At the begin, and not after an hour."""

    class Plain:
        """A store with neither lists nor trims."""

    plain: Any = Plain()

    with pytest.raises(TypeError, match="has not ListsThreads"):
        Worker(plain, agent, retention=POLICY)
