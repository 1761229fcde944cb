"""Damaged rows, and schemas of other programs: typed errors, nothing is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, timedelta
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    SchemaMismatch,
    SerializationError,
    ToolCall,
)
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import MakeStore
from tests.servers.postgres import shared_postgres

Store = PostgresCheckpointer[Any]


async def test_a_body_that_is_not_json(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """The error names thread and position; ranges without it can be read."""
    async with store() as cp:
        await cp.append("t", [{"i": i} for i in range(5)])
        await raw.execute(
            f"UPDATE {schema}.messages SET body = '{{\"i\":' WHERE position = 3"
        )

        for work in (cp.load("t"), cp.read("t", 2)):
            with pytest.raises(CorruptThread, match="message 3") as caught:
                await work

            assert caught.value.thread_id == "t"

        assert await cp.read("t", 0, 3) == [{"i": 0}, {"i": 1}, {"i": 2}]
        assert await cp.append("t", [{"i": 5}]) == 6
        found = await raw.fetchval(
            f"SELECT body FROM {schema}.messages WHERE position = 3"
        )
        assert found == '{"i":'


async def test_a_row_that_is_missing(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """A missing position is corruption; the error names it."""
    async with store() as cp:
        await cp.append("t", [{"i": i} for i in range(5)])
        await raw.execute(f"DELETE FROM {schema}.messages WHERE position = 1")

        for work in (cp.load("t"), cp.read("t"), cp.read("t", 1, 3)):
            with pytest.raises(CorruptThread, match="message 1: it is missing"):
                await work

        assert await cp.read("t", 2) == [{"i": 2}, {"i": 3}, {"i": 4}]


async def test_a_first_row_that_is_missing(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """A missing first message is found as well."""
    async with store() as cp:
        await cp.append("t", [{"i": i} for i in range(3)])
        await raw.execute(f"DELETE FROM {schema}.messages WHERE position = 0")

        with pytest.raises(CorruptThread, match="message 0"):
            await cp.load("t")


async def test_extra_and_calls_that_are_damaged(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """The error names the key of extra, and the call."""
    async with store() as cp:
        await cp.save_extra("t", {"plan": 1})
        await cp.record_issued("u", ToolCall("c", "pay", {}, "k"))
        await raw.execute(f"UPDATE {schema}.extra SET value = 'nonsense'")
        await raw.execute(f"UPDATE {schema}.calls SET args = '[]'")

        with pytest.raises(CorruptThread, match="plan"):
            await cp.load("t")

        for work in (cp.load("u"), cp.list_calls("u"), cp.find_call("k")):
            with pytest.raises(CorruptThread, match="call 'c'"):
                await work

        await raw.execute(
            f"UPDATE {schema}.calls SET args = '{{}}', status = 'unheard-of'"
        )

        with pytest.raises(CorruptThread, match="not a status"):
            await cp.find_call("k")


async def test_a_message_of_another_type(store: MakeStore) -> None:
    """The error names thread and position."""
    async with store() as cp:
        await cp.append("t", [{"i": 1}, {"i": "one"}])

    async with store(message_type=dict[str, int]) as typed:
        with pytest.raises(SerializationError, match="'t'") as caught:
            await typed.load("t")

        assert caught.value.path == (1,)


async def test_a_newer_store(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """It is refused and not changed; the error advises to upgrade."""
    async with store() as cp:
        await cp.append("t", [{}])

    await raw.execute(f"UPDATE {schema}.schema_version SET version = 99")

    with pytest.raises(SchemaMismatch, match="version 99.*upgrade cpkit") as caught:
        async with store():
            pass

    assert (caught.value.found, caught.value.supported) == (99, 1)


async def test_a_store_without_a_version(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """Its version is unknown, so it is refused."""
    async with store():
        pass

    await raw.execute(f"DELETE FROM {schema}.schema_version")

    with pytest.raises(
        SchemaMismatch, match="does not have a schema that this cpkit knows"
    ):
        async with store():
            pass


@pytest.mark.parametrize(
    "table",
    [
        "extra (a int)",
        "threads (thread_id text)",
        "schema_version (installed_rank int, version text)",
        "schema_version (version integer)",
        "schema_version AS SELECT 1 AS version",
    ],
)
async def test_foreign_tables_of_the_same_name(
    table: str, store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """They are refused, they stay, and no other table is created beside them."""
    await raw.execute(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.{table}")

    with pytest.raises(SchemaMismatch):
        async with store():
            pass

    tables = await raw.fetch(
        "SELECT tablename FROM pg_tables WHERE schemaname = $1", schema
    )
    assert [table[0] for table in tables] == [table.split()[0]]


@pytest.mark.parametrize("options", [{}, {"dialect": "portable"}, {"partitions": 2}])
async def test_numbers_of_threads_that_start_again(
    options: dict[str, Any], store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """A new thread is refused at once, as after a copy without its sequences."""
    async with store(**options) as cp:
        for i in range(3):
            await cp.append(f"t{i}", [{}])

        await cp.record_issued("t0", ToolCall("c", "x", {}, "k"))
        dump = await cp.dump_thread("t0")
        assert dump is not None
        await cp.delete_thread("t0", forget_keys=True)

        one: list[dict[str, int]] = [{}]
        writes: list[Callable[[], Awaitable[object]]] = [
            lambda: cp.append("one", one),
            lambda: cp.append("many", one, extra={"a": 1}),
            lambda: cp.append("none", [], extra={"a": 1}),
            lambda: cp.save_extra("extra", {"a": 1}),
            lambda: cp.record_issued("claim", ToolCall("c", "x", {}, "k2")),
            lambda: cp.restore_thread(dump),
        ]

        for write in writes:
            await raw.execute(
                f"ALTER TABLE {schema}.threads ALTER COLUMN number RESTART WITH 2"
            )

            with pytest.raises(BackendUnavailable, match="threads_pkey") as caught:
                await write()

            assert not caught.value.maybe_applied

        listed = await cp.list_threads()
        assert [thread.thread_id for thread in listed] == ["t1", "t2"]

        # Another thread of the same batch is appended to.
        await raw.execute(
            f"ALTER TABLE {schema}.threads ALTER COLUMN number RESTART WITH 2"
        )
        refused, appended = await asyncio.gather(
            cp.append("one", one), cp.append("t1", one), return_exceptions=True
        )
        assert isinstance(refused, BackendUnavailable)
        assert appended == 2


# Postgres holds them all, and Python's datetime none.
TIMES = ["infinity", "-infinity", "20000-01-01", "0044-03-15 BC"]


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("column", ["created_at", "updated_at"])
async def test_times_of_a_thread_that_are_damaged(
    column: str, time: str, store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """Reading the thread, and a list that has it, names it; others can be read."""
    async with store() as cp:
        await cp.save_extra("t", {"a": 1})
        await cp.append("u", [{}])
        await raw.execute(
            f"UPDATE {schema}.threads SET {column} = '{time}' WHERE thread_id = 't'"
        )

        for work in (
            cp.load("t"),
            cp.read("t"),
            cp.dump_thread("t"),
            cp.list_threads(),
        ):
            with pytest.raises(CorruptThread, match="a time is out of range") as caught:
                await work

            assert caught.value.thread_id == "t"

        assert [one.thread_id for one in await cp.list_threads(prefix="u")] == ["u"]
        assert await cp.append("u", [{}], expected_version=1) == 2


async def test_the_time_of_a_message_that_is_damaged(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """It is the time of the thread's last change, so it is found with the thread."""
    async with store() as cp:
        await cp.append("t", [{}])
        await raw.execute(f"UPDATE {schema}.messages SET appended_at = 'infinity'")

        for work in (cp.load("t"), cp.dump_thread("t"), cp.list_threads()):
            with pytest.raises(CorruptThread, match="a time is out of range"):
                await work


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("column", ["issued_at", "resolved_at"])
async def test_times_of_a_call_that_are_damaged(
    column: str, time: str, store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """The error names thread and call, for a claim of the same key too."""
    async with store() as cp:
        call = ToolCall("c", "pay", {}, "k")
        await cp.record_issued("t", call)
        await cp.record_issued("t", ToolCall("sound", "pay", {}, "k2"))

        if column == "resolved_at":
            await cp.record_result("t", "c", 1)

        await raw.execute(
            f"UPDATE {schema}.calls SET {column} = '{time}' WHERE call_id = 'c'"
        )
        works: list[Awaitable[object]] = [
            cp.list_calls("t"),
            cp.dump_thread("t"),
            cp.find_call("k"),
            cp.record_issued("t", call),
            cp.record_issued("u", ToolCall("other", "pay", {}, "k")),
        ]

        if column == "issued_at":
            works.append(cp.load("t"))

        for work in works:
            with pytest.raises(CorruptThread, match="call 'c'") as caught:
                await work

            assert caught.value.thread_id == "t"

        with pytest.raises(CorruptThread) as caught:
            await cp.list_calls("t")

        assert caught.value.damaged_calls == ["c"]
        assert [one.call.call_id for one in caught.value.calls] == ["sound"]

        with pytest.raises(CorruptThread, match="call 'c'"):
            await cp.record_result("t", "c", 1)

        assert await cp.load("u") is None


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "America/St_Johns"])
async def test_times_are_utc_whatever_the_time_zone(
    zone: str, store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """The session's time zone and style of dates change nothing."""
    options = quote(f"-c TimeZone={zone} -c DateStyle=German")

    async with store(f"{shared_postgres()}?options={options}") as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", ToolCall("c", "pay", {}, "k"))
        await cp.record_result("t", "c", 1)
        now = await raw.fetchval("SELECT clock_timestamp()")
        (thread,) = await cp.list_threads()
        (call,) = await cp.list_calls("t")
        dump = await cp.dump_thread("t")
        assert dump is not None
        times = thread.created_at, thread.updated_at
        assert (dump.created_at, dump.updated_at) == times
        assert call.resolved_at is not None

        for time in (*times, call.issued_at, call.resolved_at):
            assert time.tzinfo is UTC
            assert timedelta(0) <= now - time < timedelta(minutes=10)

        stored = await raw.fetchrow(
            f"SELECT issued_at, resolved_at FROM {schema}.calls"
        )
        assert stored is not None
        assert (call.issued_at, call.resolved_at) == tuple(stored)
        assert (await cp.find_call("k")) == call
