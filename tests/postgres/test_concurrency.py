"""Many tasks, handles and processes at once: no deadlock, no gap, no lost write."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from typing import Any

import asyncpg
import pytest

from cpkit import (
    CallRecord,
    ToolCall,
    UnknownCall,
    VersionConflict,
    open_checkpointer,
)
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import MakeStore
from tests.processes import Workers
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer, shared_postgres
from tests.sweeps import sweep

Store = PostgresCheckpointer[Any]


async def test_a_pool_at_its_limit(store: MakeStore) -> None:
    """Hundreds of tasks share two connections; each of them gets its turn."""
    async with store(pool_size=2) as cp:
        await cp.append("t", [{}])
        await asyncio.gather(
            *(cp.append(f"t {i % 7}", [{"i": i}]) for i in range(100)),
            *(cp.save_extra(f"t {i % 7}", {f"k{i}": i}) for i in range(100)),
            *(
                cp.record_issued("t", ToolCall(f"{i}", "x", {}, f"{i}"))
                for i in range(100)
            ),
            *(cp.load(f"t {i % 7}") for i in range(100)),
        )
        data = [await cp.load(f"t {i}") for i in range(7)]
        assert sum(one.version for one in data if one) == 100
        assert sum(len(one.extra) for one in data if one) == 100


async def test_one_connection_is_enough(store: MakeStore) -> None:
    """No operation holds one connection and waits for another."""
    async with store(pool_size=1) as cp:
        await asyncio.gather(
            *(cp.append(f"{i}", [{}]) for i in range(50)), cp.load("1"), cp.read("2")
        )
        assert len(await cp.list_threads()) == 50


@pytest.mark.parametrize("turns", sweep([3, 8], [3]))
async def test_no_deadlock(server: PostgresServer, schema: str, turns: int) -> None:
    """Two handles write the same threads and keys, each in another order.

    The server counts the deadlocks that it had to break.
    """
    threads = [f"thread {i}" for i in range(20)]
    admin = await asyncpg.connect(server.url)
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'"
    before = await admin.fetchval(deadlocks)

    async def rounds(cp: Store, name: str, seed: int) -> None:
        order = random.Random(seed)

        for turn in range(turns):
            mine = order.sample(threads, len(threads))
            calls = [ToolCall(f"{name} {turn} {t}", "x", {}, f"key {t}") for t in mine]
            await asyncio.gather(
                *(cp.append(t, [{}, {}]) for t in mine),
                *(cp.save_extra(t, {"a": name, "b": turn}) for t in reversed(mine)),
                *(cp.record_issued(mine[-1 - i], c) for i, c in enumerate(calls)),
            )
            await asyncio.gather(
                *(finish(cp, mine[-1 - i], call) for i, call in enumerate(calls)),
                *(cp.delete_thread(t, forget_keys=True) for t in mine[:3]),
                *(cp.append(t, [{}]) for t in mine),
            )

    async def finish(cp: Store, thread_id: str, call: ToolCall) -> None:
        if any(c.call.call_id == call.call_id for c in await cp.list_calls(thread_id)):
            with contextlib.suppress(UnknownCall):  # another task deleted it
                await cp.record_result(thread_id, call.call_id, None, success=False)

    try:
        async with (
            Store(server.url, schema=schema, pool_size=4) as one,
            Store(server.url, schema=schema, pool_size=4) as two,
        ):
            await asyncio.gather(rounds(one, "one", 1), rounds(two, "two", 2))

        # The counters of a backend are complete when it has ended.
        others = "SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        backends = f"{others} AND backend_type = 'client backend'"

        while await admin.fetchval(backends):
            await admin.execute("SELECT pg_stat_clear_snapshot()")

        assert await admin.fetchval(deadlocks) == before
    finally:
        await admin.close()


async def test_readers_see_no_gap(url: str, store: MakeStore, workers: Workers) -> None:
    """While four processes write a thread, every load extends the earlier one."""
    four, count = workers(4), 25

    async with store() as cp:
        await cp.append("t", [{}] * 5)

        for number, worker in enumerate(four):
            worker.tell("append_many", url, "t", f"w{number}", count)

        answers = asyncio.gather(*(asyncio.to_thread(worker.answer) for worker in four))
        earlier: list[Any] = []

        while not answers.done():
            data, tail = await asyncio.gather(cp.load("t"), cp.read("t", -5))
            assert data is not None
            assert data.messages[: len(earlier)] == earlier
            assert len(tail) == 5
            earlier = data.messages

        versions = [version for answer in await answers for version in answer]
        assert sorted(versions) == list(range(6, 6 + 4 * 4 * count))


# What no moment of a store may show: a version without its messages, content of a
# deleted thread, a call that outlived its thread and is not erased.
BROKEN = """
SELECT 'gap', number FROM {schema}.threads AS t
WHERE (first, version - 1, version - first) <> (
    SELECT coalesce(min(position), first), coalesce(max(position), version - 1),
        count(*)
    FROM {schema}.messages WHERE thread_number = number)
UNION ALL
SELECT 'deleted', thread_number
FROM (SELECT thread_number FROM {schema}.messages
      UNION ALL SELECT thread_number FROM {schema}.extra) AS content
WHERE thread_number NOT IN (SELECT number FROM {schema}.threads)
UNION ALL
SELECT 'call', sequence FROM {schema}.calls
WHERE NOT erased AND thread_id NOT IN (SELECT thread_id FROM {schema}.threads)
"""


@pytest.mark.long
@pytest.mark.parametrize("pooled", [False, True])
async def test_deletions_by_four_processes(
    pooled: bool, url: str, schema: str, raw: asyncpg.Connection, workers: Workers
) -> None:
    """They race with appends, trims and claims.

    No append is invisible, and no content is left.
    """
    four = workers(4)
    broken = BROKEN.replace("{schema}", schema)

    async with AsyncExitStack() as stack:
        if pooled:
            pooler = stack.enter_context(PgBouncer(shared_postgres()))
            url = f"{pooler.url}?pooler=transaction&schema={schema}"

        async with open_checkpointer(url):
            pass

        for seed, worker in enumerate(four):
            worker.tell("change_and_delete", url, seed, 150)

        answers = asyncio.gather(*(asyncio.to_thread(w.answer) for w in four))

        while not answers.done():
            assert not await raw.fetch(broken)

        assert await answers == [150] * 4
        assert not await raw.fetch(broken)


@pytest.mark.long
async def test_eight_processes_open_at_once(url: str, workers: Workers) -> None:
    """One of them creates the schema, and every append is stored."""
    eight = workers(8)

    for worker in eight:
        worker.tell("ready")

    for worker in eight:
        await asyncio.to_thread(worker.answer)

    for worker in eight:
        worker.tell("append_one", url)

    versions = [await asyncio.to_thread(worker.answer) for worker in eight]
    assert sorted(versions) == list(range(1, 9))


async def test_eight_handles_create_one_schema(store: MakeStore) -> None:
    """The same within one process."""

    async def opened() -> int:
        async with store() as cp:
            return await cp.append("t", [{}])

    versions = await asyncio.gather(*(opened() for _ in range(8)))
    assert sorted(versions) == list(range(1, 9))


async def test_expected_versions_in_one_batch(store: MakeStore) -> None:
    """Appends of one batch are decided as if one after another."""
    async with store() as cp:
        await cp.append("t", [{}])
        outcomes = await asyncio.gather(
            cp.append("t", [{"n": 0}]),
            *(cp.append("t", [{"n": 1}], expected_version=2) for _ in range(5)),
            cp.append("t", [{"n": 2}, {"n": 2}]),
            cp.append("t", [{"n": 3}], expected_version=5),
            cp.append("t", [{"n": 4}], expected_version=99),
            cp.append("t", [{"n": 5}]),
            return_exceptions=True,
        )
        won = [one for one in outcomes if isinstance(one, int)]
        lost = [one for one in outcomes if isinstance(one, VersionConflict)]
        data = await cp.load("t")
        assert data is not None
        assert len(won) + len(lost) == len(outcomes)
        assert sorted(won)[-1] == data.version
        assert len({*won}) == len(won)
        assert sum(m == {"n": 1} for m in data.messages) <= 1
        assert {"n": 4} not in data.messages
        assert all(one.actual != one.expected for one in lost)


async def test_a_thousand_threads_at_once(store: MakeStore) -> None:
    """A thousand threads at once, new and existing."""
    async with store() as cp:
        for version in (1, 2):
            versions = await asyncio.gather(
                *(cp.append(f"{i}", [{"i": i}]) for i in range(1000))
            )
            assert {*versions} == {version}

        assert len(await cp.list_threads(limit=2000)) == 1000


async def test_claims_of_one_key(store: MakeStore) -> None:
    """Of many at once in many threads, on two handles, one holds; attempts count up."""
    async with (
        store() as one,
        store() as two,
    ):
        for attempt in (1, 2, 3):
            calls = [ToolCall(f"{attempt} {i}", "x", {}, "key") for i in range(30)]
            outcomes: list[CallRecord | None] = await asyncio.gather(
                *(
                    (one, two)[i % 2].record_issued(f"t{i % 10}", call)
                    for i, call in enumerate(calls)
                )
            )
            assert outcomes.count(None) == 1
            holder = await one.find_call("key")
            assert holder is not None
            assert holder.attempt == attempt
            assert {one.call.call_id for one in outcomes if one} == {
                holder.call.call_id
            }
            await two.record_result(
                holder.thread_id, holder.call.call_id, None, success=False
            )


async def test_a_claim_waits_until_its_key_is_forgotten(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """Otherwise its number would count an attempt that is gone when it is made."""
    first, next_ = ToolCall("c", "pay", {}, "key"), ToolCall("c2", "pay", {}, "key")

    async with store() as cp, store() as other:
        await cp.record_issued("t", first)
        await cp.record_result("t", "c", None, success=False)

        async with raw.transaction():
            await raw.fetch(
                f"SELECT FROM {schema}.threads WHERE thread_id = 't' FOR UPDATE"
            )
            deletion = asyncio.create_task(cp.delete_thread("t", forget_keys=True))
            await _waiting(raw, schema, 1)
            claim = asyncio.create_task(other.record_issued("t2", next_))
            await _waiting(raw, schema, 2)

        await deletion
        assert await claim is None
        found = await cp.find_call("key")
        assert found is not None
        assert found.attempt == 1


@pytest.mark.parametrize("before", [2, 3, 9])
async def test_a_trim_waits_for_an_append(
    before: int, store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """It removes the message that it waited for, or goes on without a look at it."""
    async with store() as cp:
        await cp.append("t", [{"n": 0}, {"n": 1}])

        async with raw.transaction():
            await raw.execute(f"UPDATE {schema}.threads SET version = 3")
            await raw.execute(
                f"""INSERT INTO {schema}.messages VALUES (1, 2, '{{"n":2}}')"""
            )
            trim = asyncio.create_task(cp.trim("t", before))
            await _waiting(raw, schema, 1)

        assert await trim == min(before, 3)
        data = await cp.load("t")
        assert data is not None
        assert (data.first, data.version) == (min(before, 3), 3)
        assert not await raw.fetch(BROKEN.replace("{schema}", schema))


async def test_a_trim_waits_for_a_deletion(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """It trims no thread that began meanwhile under the same id, if it is fenced."""
    async with store() as cp, store() as other:
        await cp.append("t", [{}] * 3)

        async with raw.transaction():
            await raw.execute(f"DELETE FROM {schema}.messages")
            await raw.execute(f"DELETE FROM {schema}.threads")
            await raw.execute(
                f"""INSERT INTO {schema}.threads
                (thread_id, version, created_at, updated_at) VALUES ('t', 1, 1, 1)"""
            )
            await raw.execute(f"INSERT INTO {schema}.messages VALUES (2, 0, '{{}}')")
            trim = asyncio.create_task(cp.trim("t", 2, expected_version=3))
            free = asyncio.create_task(other.trim("t", 2))
            await _waiting(raw, schema, 2)

        with pytest.raises(VersionConflict) as caught:
            await trim

        assert caught.value.actual == 1
        assert await free == 1
        assert not await raw.fetch(BROKEN.replace("{schema}", schema))


async def test_trims_and_appends_at_once(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """Each message is removed by one trim, and a load has what is left, in order."""
    async with store() as one, store() as two:

        async def trims(cp: Store, ahead: int) -> int:
            removed = 0

            for turn in range(25):
                removed += await cp.trim("t", turn * 4 + ahead)

            return removed

        async def appends(cp: Store) -> None:
            for _ in range(20):
                await cp.append("t", [{}] * 2)

        async def loads() -> None:
            first = version = 0

            for _ in range(25):
                data = await one.load("t")
                assert data is not None
                assert first <= data.first <= data.version >= version
                assert data.version == data.first + len(data.messages)
                first, version = data.first, data.version

        await one.append("t", [{}])
        counting = [trims(cp, n) for cp in (one, two) for n in (0, 2, 9)]
        removed, _, _ = await asyncio.gather(
            asyncio.gather(*counting),
            asyncio.gather(appends(one), appends(two)),
            loads(),
        )
        data = await one.load("t")
        assert data is not None
        assert (sum(removed), data.version) == (data.first, 81)
        assert not await raw.fetch(BROKEN.replace("{schema}", schema))


async def test_a_thread_that_begins_while_it_is_restored(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """The restore is refused, also in one batch with writes that are applied."""
    async with store() as cp:
        await cp.append("t", [{}, {}])
        dump = await cp.dump_thread("t")
        assert dump is not None
        await cp.delete_thread("t")

        async with raw.transaction():
            await raw.execute(
                f"""INSERT INTO "{schema}".threads
                (thread_id, version, created_at, updated_at) VALUES ('t', 0, 1, 1)"""
            )
            writes = [cp.append("a", [{}]), cp.append("b", [{}])]
            tasks = [*map(asyncio.create_task, writes)]
            restore = asyncio.create_task(cp.restore_thread(dump))
            await _waiting(raw, schema, 1)

        with pytest.raises(VersionConflict):
            await restore

        assert await asyncio.gather(*tasks) == [1, 1]


async def _waiting(raw: asyncpg.Connection, schema: str, count: int) -> None:
    """Return when so many other connections wait for a lock in this schema."""
    query = """
        SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE NOT granted AND query LIKE '%' || $1 || '%'
    """

    # A transaction looks at the other connections once, and remembers their queries.
    while await raw.fetchval(query, schema) < count:
        await raw.execute("SELECT pg_stat_clear_snapshot()")


async def test_no_time_goes_back_while_the_clock_is_set_back(
    raw: asyncpg.Connection, store: MakeStore, schema: str
) -> None:
    """Each change moves a thread's time, in a single append and in a batch."""
    async with store() as cp:

        async def updated(thread_id: str) -> datetime:
            [info] = await cp.list_threads(prefix=thread_id)
            return info.updated_at

        threads = ["one", "two", "three"]
        await asyncio.gather(*(cp.append(one, [{}]) for one in threads))
        # As if the clock was ahead then.
        await raw.execute(
            f'UPDATE "{schema}".threads SET updated_at = updated_at + 86400000000'
        )
        call = ToolCall("c", "x", {}, "k")
        changes: list[Callable[[str], Awaitable[object]]] = [
            lambda one: cp.append(one, [{}]),
            lambda one: cp.append(one, [{}, {}]),
            lambda one: cp.save_extra(one, {"a": 1}),
            lambda one: cp.record_issued(one, replace(call, idempotency_key=one)),
            lambda one: cp.record_result(one, "c", 1),
        ]

        for change in changes:
            before = {one: await updated(one) for one in threads}
            await asyncio.gather(*map(change, threads))

            for one in threads:
                assert await updated(one) > before[one]
