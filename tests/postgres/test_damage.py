"""Damaged rows, and schemas of other programs: typed errors, nothing is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

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


@pytest.mark.parametrize("position", [0, 1, 4])
async def test_a_row_that_is_missing(
    position: int, store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """A range that should have it has a message too few; the version stays."""
    async with store() as cp:
        await cp.append("t", [{"i": i} for i in range(5)])
        await raw.execute(f"DELETE FROM {schema}.messages WHERE position = {position}")

        for work in (cp.load("t"), cp.read("t", position, position + 1)):
            with pytest.raises(CorruptThread, match="there are"):
                await work

        assert await cp.read("t", 2, 4) == [{"i": 2}, {"i": 3}]
        assert await cp.append("t", [{"i": 5}]) == 6


async def test_extra_and_calls_that_are_damaged(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """The error names the key of extra, and the call."""
    async with store() as cp:
        await cp.save_extra("t", {"plan": 1})
        await cp.record_issued("u", ToolCall("c", "pay", {}, "k"))
        await raw.execute(f"UPDATE {schema}.extra SET value = 'nonsense'")
        await raw.execute(f"UPDATE {schema}.calls SET args = '{{\"a\":'")

        with pytest.raises(CorruptThread, match="plan"):
            await cp.load("t")

        again = cp.record_issued("v", ToolCall("c2", "pay", {}, "k"))

        for work in (cp.load("u"), cp.list_calls("u"), cp.find_call("k"), again):
            with pytest.raises(CorruptThread, match="call 'c'"):
                await work

        assert await cp.load("v") is None


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


async def test_numbers_of_threads_that_start_again(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """A new thread is refused at once, as after a copy without its sequences."""
    async with store() as cp:
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
