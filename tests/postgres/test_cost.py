"""What an operation costs: round trips counted on the wire, and transactions shared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import pytest

from cpkit import ToolCall
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import MakeStore
from tests.postgres.proxy import Proxy
from tests.servers.postgres import shared_postgres

Store = PostgresCheckpointer[Any]
Operation = Callable[[Store, int], Coroutine[Any, Any, Any]]


def call(number: int) -> ToolCall:
    return ToolCall(f"call {number}", "pay", {"n": number}, f"key {number}")


OPERATIONS: dict[str, Operation] = {
    "append": lambda cp, i: cp.append("t", [{"i": i}]),
    "append of many": lambda cp, i: cp.append("t", [{"i": i}] * 20),
    "append expecting": lambda cp, i: cp.append("u", [{}], expected_version=i),
    "append to a new thread": lambda cp, i: cp.append(f"new {i}", [{}]),
    "append of nothing": lambda cp, i: cp.append("t", []),
    "save_extra": lambda cp, i: cp.save_extra("t", {"a": i, "b": i}),
    "record_issued": lambda cp, i: cp.record_issued("t", call(i)),
    "replay": lambda cp, i: cp.record_issued("t", call(100)),
    "record_result": lambda cp, i: cp.record_result("t", f"call {200 + i}", i),
    "find_completed": lambda cp, i: cp.find_completed("key 100"),
    "load": lambda cp, i: cp.load("t"),
    "read": lambda cp, i: cp.read("t", -2),
    "list_threads": lambda cp, i: cp.list_threads(),
    "list_calls": lambda cp, i: cp.list_calls("t"),
    "find_call": lambda cp, i: cp.find_call("key 100"),
    "delete_thread": lambda cp, i: cp.delete_thread(f"gone {i}"),
}


async def prepare(cp: Store) -> None:
    await cp.append("t", [{}, {}, {}])

    for number in (100, 200, 201, 202):
        await cp.record_issued("t", call(number))

    await cp.record_result("t", "call 100", "done")


@pytest.mark.parametrize("name", OPERATIONS)
async def test_one_round_trip(name: str, url: str, schema: str) -> None:
    """Taking and returning the connection included, once the statement is prepared."""
    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema, pool_size=1) as cp:
            await prepare(cp)
            await OPERATIONS[name](cp, 0)
            before = proxy.trips
            await OPERATIONS[name](cp, 1)
            await OPERATIONS[name](cp, 2)
            assert proxy.trips - before == 2


async def test_behind_a_transaction_pooler_it_is_parsed_first(
    url: str, schema: str
) -> None:
    """Two round trips, because nothing may stay prepared."""
    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema, pooler="transaction") as cp:
            await cp.append("t", [{}])
            before = proxy.trips
            await cp.append("t", [{}])
            assert proxy.trips - before == 2


async def test_opening_a_store_that_is_there_is_one_read(
    store: MakeStore, schema: str
) -> None:
    """Connecting, preparing and running it: four round trips at most."""
    async with store():
        pass

    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema):
            assert proxy.trips <= 4


@pytest.mark.parametrize("threads", [1, 64])
async def test_concurrent_appends_share_statements(
    threads: int, url: str, schema: str
) -> None:
    """64 of them make do with a handful of round trips, and each has its version."""
    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema) as cp:
            # Every connection made, and every statement prepared.
            await asyncio.gather(*(cp.append(f"{i % 32}", [{}]) for i in range(128)))
            await asyncio.gather(*(cp.append(f"{i % 32}", [{}]) for i in range(128)))
            before = proxy.trips
            versions = await asyncio.gather(
                *(cp.append(f"t {i % threads}", [{"i": i}, {}]) for i in range(64))
            )
            assert proxy.trips - before <= 12
            each = range(2, 2 * (64 // threads) + 1, 2)
            assert sorted(versions) == sorted(list(each) * threads)


async def test_the_price_of_an_append_does_not_grow(
    store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """The server touches no more pages for a thread of 20,000 messages than of 20."""
    pages = []

    async with store() as cp:
        for size in (20, 20_000):
            await cp.append("t", [{"pad": "x" * 50}] * size)
            await raw.execute(f"VACUUM {schema}.messages, {schema}.threads")
            text = await raw.fetchval(
                "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
                f"SELECT {schema}.append_1('t', NULL, '{{}}', NULL, 0)"
            )
            plan = json.loads(text)[0]["Plan"]
            pages.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    # One level more of the index, seen by a search and by an insert.
    assert pages[1] <= pages[0] + 3
