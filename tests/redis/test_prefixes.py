"""The recipe for more than one node's worth of state: threads over several prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from benchmarks.scaling import Spread, prefixes_of
from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, ToolCall
from cpkit_redis.schema import base_of
from tests.servers.redis import RedisServer
from tests.servers.redis_cluster import RedisCluster

THREADS = [f"user-{n}" for n in range(60)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster(
        primaries=3, replicas=0, cluster_require_full_coverage="no"
    ) as started:
        yield started


async def work(stores: Spread, thread: str) -> None:
    """Append, and claim a key that contains the thread, as keys of effects do."""
    call = ToolCall("c", "pay", {}, f"{thread}:pay")
    await stores.append(thread, [{"thread": thread}])
    assert await stores.record_issued(thread, call) is None
    await stores.record_result(thread, "c", {"paid": thread})


async def test_threads_are_spread_over_the_nodes(cluster: RedisCluster) -> None:
    """Each node has stores; a thread with its calls is in one of them."""
    async with AsyncExitStack() as stack:
        stores = await Spread.opened(prefixes_of(cluster), stack)
        await asyncio.gather(*(work(stores, thread) for thread in THREADS))
        listed = await stores.list_threads(limit=1000)
        assert [info.thread_id for info in listed] == sorted(THREADS)

        for thread in THREADS:
            assert (await stores.load(thread)).messages == [{"thread": thread}]
            found = await stores.part_of(thread).find_completed(f"{thread}:pay")
            assert found.result == {"paid": thread}

        sizes = [int(cluster.ask(node, "DBSIZE")) for node in cluster.nodes]
        assert min(sizes) > len(THREADS) / 2

        again: Any = await Spread.opened(prefixes_of(cluster), stack)
        assert [again.parts.index(again.part_of(t)) for t in THREADS] == [
            stores.parts.index(stores.part_of(t)) for t in THREADS
        ]


async def test_a_store_moves_to_a_new_node_with_its_slot(cluster: RedisCluster) -> None:
    """Under load; the other stores do not notice."""
    slot = cluster.ask(cluster.nodes[0], "CLUSTER", "KEYSLOT", base_of("part-3"))
    before = cluster.primary_of(base_of("part-3"))

    async with AsyncExitStack() as stack:
        stores = await Spread.opened(prefixes_of(cluster), stack)
        names = [f"moved-{n}" for n in range(60)]
        tasks = [asyncio.create_task(work(stores, name)) for name in names]
        await asyncio.to_thread(cluster.move_slot, slot)
        await asyncio.gather(*tasks)
        assert cluster.primary_of(base_of("part-3")) is not before

        for name in names:
            assert (await stores.load(name)).messages == [{"thread": name}]


async def test_a_node_that_is_away_holds_up_its_own_threads(
    cluster: RedisCluster,
) -> None:
    """Without a replica they are unavailable, and those of other nodes go on."""
    lost = cluster.nodes[0]

    def is_lost(part: int) -> bool:
        owner: RedisServer = cluster.primary_of(base_of(f"part-{part}"))
        return owner is lost

    lost_parts = {part for part in range(12) if is_lost(part)}
    assert 0 < len(lost_parts) < 12
    urls = [f"{url}&connect_timeout={0.5 * slowdown()}" for url in prefixes_of(cluster)]

    async with AsyncExitStack() as stack:
        stores = await Spread.opened(urls, stack)
        await asyncio.to_thread(lost.kill)
        outcomes = await asyncio.gather(
            *(stores.append(f"t-{n}", [{}]) for n in range(60)),
            return_exceptions=True,
        )

        for n, outcome in enumerate(outcomes):
            part = stores.parts.index(stores.part_of(f"t-{n}"))

            if part in lost_parts:
                assert isinstance(outcome, BackendUnavailable)
            else:
                assert outcome is None

        await asyncio.to_thread(lost.start)
        await asyncio.to_thread(cluster.wait_until_ok)
