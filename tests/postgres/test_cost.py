"""What an operation costs: round trips on the wire, shared statements, pages read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import pytest

from conformance.operations import LATER
from cpkit import ToolCall, VersionConflict
from cpkit.driver import Append, Merge, Write
from cpkit.effects import EffectLedger, EffectTimeout
from cpkit_postgres import PostgresCheckpointer, queries
from tests.postgres.conftest import MakeStore
from tests.postgres.plans import blocks, explained
from tests.postgres.proxy import Proxy
from tests.servers.postgres import shared_postgres

Store = PostgresCheckpointer[Any]
Operation = Callable[[Store, int], Coroutine[Any, Any, Any]]


def call(number: int) -> ToolCall:
    return ToolCall(f"call {number}", "pay", {"n": number}, f"key {number}")


OPERATIONS: dict[str, Operation] = {
    "append": lambda cp, i: cp.append("t", [{"i": i}]),
    "append of many": lambda cp, i: cp.append("t", [{"i": i}] * 20),
    "append expecting": lambda cp, i: cp.append("u", [{}], expected_version=i + 3),
    "append to a new thread": lambda cp, i: cp.append(f"new {i}", [{}]),
    "append with extra": lambda cp, i: cp.append("t", [{}], extra={"i": i}),
    "append of extra alone": lambda cp, i: cp.append("t", [], extra={"i": i}),
    "append of nothing": lambda cp, i: cp.append("t", []),
    "save_extra": lambda cp, i: cp.save_extra("t", {"a": i}),
    "save_extra of many": lambda cp, i: cp.save_extra("t", {"a": i, "b": i}),
    "record_issued": lambda cp, i: cp.record_issued("t", call(i)),
    "replay": lambda cp, i: cp.record_issued("t", call(100)),
    "record_result": lambda cp, i: cp.record_result("t", f"call {200 + i}", i),
    "erase_calls": lambda cp, i: cp.erase_calls("t", LATER),
    "trim": lambda cp, i: cp.trim("t", i + 1),
    "trim expecting": lambda cp, i: cp.trim("u", i + 1, expected_version=3),
    "delete_thread": lambda cp, i: cp.delete_thread(f"gone {i}"),
    "find_completed": lambda cp, i: cp.find_completed("key 100"),
    "load": lambda cp, i: cp.load("t"),
    "load_range": lambda cp, i: cp.load_range("t", -2),
    "list_threads": lambda cp, i: cp.list_threads(),
    "list_calls": lambda cp, i: cp.list_calls("t"),
    "find_call": lambda cp, i: cp.find_call("key 100"),
}

# A conflict is decided by a second statement. What forgets keys locks a table first.
TRIPS = {"append of a conflict": 2, "delete_thread, forgetting": 4}
OPERATIONS |= {
    "append of a conflict": lambda cp, i: conflict(cp),
    "delete_thread, forgetting": lambda cp, i: cp.delete_thread(
        f"gone {i}", forget_keys=True
    ),
}


async def conflict(cp: Store) -> None:
    with pytest.raises(VersionConflict):
        await cp.append("u", [{}], expected_version=99)


async def prepare(cp: Store) -> None:
    await cp.append("t", [{}, {}, {}])
    await cp.append("t", [{}])
    await cp.append("u", [{}, {}])
    await cp.append("u", [{}])

    for number in (100, 200, 201, 202):
        await cp.record_issued("t", call(number))

    await cp.record_result("t", "call 100", "done")


@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_operation_is_one_round_trip(name: str, url: str, schema: str) -> None:
    """Once the statement is prepared; a transaction takes a few."""
    options = {"pool_size": 1, "notify": False}

    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema, **options) as cp:
            await prepare(cp)
            await OPERATIONS[name](cp, 0)
            before = proxy.trips
            await OPERATIONS[name](cp, 1)
            await OPERATIONS[name](cp, 2)
            assert proxy.trips - before == 2 * TRIPS.get(name, 1)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in TRIPS])
async def test_the_first_use_of_a_statement_is_two_round_trips(
    name: str, url: str, schema: str
) -> None:
    """To parse it and to run it: asyncpg asks for the types of no array."""
    options = {"pool_size": 1, "notify": False}

    async with Store(shared_postgres(), schema=schema, **options) as cp:
        await prepare(cp)

    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema, **options) as cp:
            before = proxy.trips
            await OPERATIONS[name](cp, 0)
            assert proxy.trips - before == 2


async def test_a_batch_is_one_statement(url: str, schema: str) -> None:
    """Appends and merges of threads with any ids, and asyncpg asks for no types."""
    options = {"pool_size": 1, "notify": False}

    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema, **options) as cp:
            store = cp.store
            before = proxy.trips
            batch: list[Write] = [
                Append("a\1", [b"{}", b"{}"], 0, [(b'"k"', b"1")]),
                Append("b\n\2", [b"{}"], None),
                Merge("b\n\2", [(b'"k"', b"1")]),
                Append("b\n\2", [b"{}"], None, [(b'"k"', b"2")]),
            ]
            assert [*await store.commit(batch)] == [2, 1, None, 2]
            assert proxy.trips - before == 2  # to parse it and to run it
            dump = await cp.dump_thread("b\n\2")
            assert dump is not None
            assert dump.extra == {"k": 2}
            assert [one.thread_id for one in await cp.list_threads()] == [
                "a\1",
                "b\n\2",
            ]


async def test_a_decision_is_four_round_trips(url: str, schema: str) -> None:
    """The list, the request, the decision, and the write that wakes its watchers."""

    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema, pool_size=1, notify=False) as cp:
            ledger = EffectLedger(
                cp, requires_approval=lambda effect: True, approval_timeout=0
            )

            for n in range(2):
                with pytest.raises(EffectTimeout):
                    await ledger.run("t", "pay", {"n": n}, lambda effect: None)

            assert await ledger.approve(ledger.key("t", "pay", {"n": 0}))
            before = proxy.trips
            assert await ledger.approve(ledger.key("t", "pay", {"n": 1}))
            assert proxy.trips - before == 4


async def test_a_transaction_pooler_costs_one_round_trip_more(
    url: str, schema: str
) -> None:
    """A statement is parsed each time, because none may stay prepared."""
    async with Proxy(shared_postgres()) as proxy:
        options = {"pooler": "transaction", "notify": False}

        async with Store(proxy.url, schema=schema, **options) as cp:
            await cp.append("t", [{}])
            before = proxy.trips
            await cp.append("t", [{}])
            assert proxy.trips - before == 2


async def test_announcements_share_a_round_trip(url: str, schema: str) -> None:
    """Where no process listens, many changes are announced together."""
    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema) as cp:
            await cp.append("t", [{}])
            before, started = proxy.trips, time.monotonic()

            for _ in range(100):
                await cp.append("t", [{}])

            # One in 50 ms, and at most ten trips to connect and prepare the first.
            allowed = (time.monotonic() - started) / 0.05 + 10
            assert proxy.trips - before - 100 <= allowed


async def test_opening_an_existing_store_is_one_read(
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
    """64 of them take at most two round trips, and each gets its version."""
    options = {"pool_size": 1, "notify": False}

    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema, **options) as cp:
            # Every statement prepared.
            await cp.append("0", [{}])
            await asyncio.gather(*(cp.append(f"{i % 32}", [{}]) for i in range(128)))
            before = proxy.trips
            versions = await asyncio.gather(
                *(cp.append(f"t {i % threads}", [{"i": i}, {}]) for i in range(64))
            )
            assert proxy.trips - before <= 2
            each = range(2, 2 * (64 // threads) + 1, 2)
            assert sorted(versions) == sorted([*each] * threads)


async def test_the_price_of_an_append_does_not_grow(
    store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """The server touches no more pages for a thread of 20,000 messages than of 20."""
    pages = []

    async with store() as cp:
        for size in (20, 20_000):
            version = await cp.append("t", [{"pad": "x" * 50}] * size)
            await raw.execute(f"VACUUM {schema}.messages, {schema}.threads")
            arguments = f"'t', {version}, 1, '{{}}', NULL, NULL"
            plan = await explained(raw, schema, queries.APPEND, arguments)
            pages.append(blocks(plan))

    # One more level of the index, for two searches and an insert.
    assert pages[1] <= pages[0] + 4


async def test_the_price_of_a_trimmed_thread_is_that_of_what_is_left(
    store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """Nothing looks at the dead rows of its first messages, and no VACUUM is needed."""
    queried = {
        queries.READ: "'t', 0, 9223372036854775807, false",
        queries.TRIM: "'t', 9990, NULL",
    }

    async with store() as cp:
        await cp.append("t", [{"pad": "x" * 50}] * 10_000)
        await cp.trim("t", 9_980)

        for query, arguments in queried.items():
            plan = await explained(raw, schema, query, arguments)
            assert blocks(plan) <= 45


async def test_an_append_changes_no_index_of_threads(
    store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """The updates of a thread's row are heap-only tuples."""
    counters = f"""
        SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables
        WHERE schemaname = '{schema}' AND relname = 'threads'
    """

    async with store(pool_size=1) as cp:
        for _ in range(500):
            await cp.append("t", [{}])

    # The counters of a connection are complete when it has ended.
    while (row := await raw.fetchrow(counters)) is None or row[0] < 499:
        await raw.execute("SELECT pg_stat_clear_snapshot(), pg_sleep(0.01)")

    assert row[0] - row[1] <= 5
