"""Rows damaged by hand, and schemas that are not ours: typed errors, nothing mended."""

from __future__ import annotations

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


async def test_a_body_that_is_no_json(
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
    """A hole is corruption, named by its position, never closed in silence."""
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
    """The beginning is missed as much as the middle."""
    async with store() as cp:
        await cp.append("t", [{"i": i} for i in range(3)])
        await raw.execute(f"DELETE FROM {schema}.messages WHERE position = 0")

        with pytest.raises(CorruptThread, match="message 0"):
            await cp.load("t")


async def test_extra_and_calls_that_are_damaged(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """They are named as well."""
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

        with pytest.raises(CorruptThread, match="no status"):
            await cp.find_call("k")


async def test_a_message_of_another_type(store: MakeStore) -> None:
    """It is named by thread and position, too."""
    async with store() as cp:
        await cp.append("t", [{"i": 1}, {"i": "one"}])

    async with store(message_type=dict[str, int]) as typed:
        with pytest.raises(SerializationError, match="'t'") as caught:
            await typed.load("t")

        assert caught.value.path == (1,)


async def test_a_newer_store(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """It is refused, untouched, with the advice to upgrade."""
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
    """Nobody knows what it is, so it is left alone."""
    async with store():
        pass

    await raw.execute(f"DELETE FROM {schema}.schema_version")

    with pytest.raises(SchemaMismatch, match="no schema that this cpkit knows"):
        async with store():
            pass


async def test_a_schema_of_somebody_else(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """Its tables stay, and nothing of ours is left among them."""
    await raw.execute(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.extra (a int)")

    with pytest.raises(BackendUnavailable, match="holds something else"):
        async with store():
            pass

    tables = await raw.fetch(
        "SELECT tablename FROM pg_tables WHERE schemaname = $1", schema
    )
    assert [table[0] for table in tables] == ["extra"]
