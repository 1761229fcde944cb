"""The stored format, frozen: version 1 is written and read as it was."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import asyncpg

from cpkit import CallRecord, CheckpointData, ThreadInfo, ToolCall
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import MakeStore

Store = PostgresCheckpointer[Any]

# Once released, both change only with a new schema version and a migration to it.
VERSION_1 = Path(__file__).with_name("version_1.sql")
ROWS_1 = Path(__file__).with_name("rows_1.sql")

TABLES = {
    "threads": "thread_id",
    "messages": "thread_number, position",
    "extra": "thread_number, key",
    "calls": "sequence",
}

AT = datetime(2024, 1, 1, tzinfo=UTC)
MICROS = 1_704_067_200_000_000


def bare(sql: str) -> list[str]:
    """Return the statements without comments and layout."""
    sql = re.sub(r"--[^\n]*", "", sql)
    return [line for part in sql.split(";\n") if (line := " ".join(part.split()))]


async def write_one_of_each(cp: Store) -> None:
    await cp.append("thread é", [{"role": "user", "content": "é\0'"}, {"n": 10**20}])
    await cp.save_extra("thread é", {"plan": [1.5, None], "\0": {}})
    await cp.save_extra("only extra", {"k": "half of \ud83d"})
    await cp.record_issued("thread é", ToolCall("c1", "pay", {"a": 1}, "key 1"))
    await cp.record_issued("thread é", ToolCall("c2", "pay", {}, "key 2"))
    await cp.record_result("thread é", "c1", {"ok": True})
    await cp.record_result("thread é", "c2", "no", success=False)
    await cp.record_issued("thread é", ToolCall("c3", "pay", {}, "key 2"))
    await cp.append("deleted", [{}])
    await cp.record_issued("deleted", ToolCall("c4", "pay", {"b": 2}, "key 3"))
    await cp.delete_thread("deleted")


async def rows(raw: asyncpg.Connection, schema: str) -> list[str]:
    """Return every row as an INSERT, all times being the same."""
    found = []

    for table, order in TABLES.items():
        for row in await raw.fetch(f"SELECT * FROM {schema}.{table} ORDER BY {order}"):
            values = [
                str(MICROS) if name.endswith("_at") and value else _literal(value)
                for name, value in row.items()
            ]
            found.append(
                f"INSERT INTO {{schema}}.{table} OVERRIDING SYSTEM VALUE "
                f"VALUES ({', '.join(values)});"
            )

    return found


def _literal(value: object) -> str:
    if value is None:
        return "NULL"

    if isinstance(value, (bool, int)):
        return str(value)

    return "'{}'".format(str(value).replace("'", "''"))


def test_the_schema_is_as_it_was() -> None:
    """Tables and indexes, statement for statement."""
    now = files("cpkit_postgres").joinpath("schema.sql").read_text()
    assert bare(now) == bare(VERSION_1.read_text())


async def test_what_is_written_is_as_it_was(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """One row of each kind, column for column."""
    async with store() as cp:
        await write_one_of_each(cp)

    assert await rows(raw, schema) == ROWS_1.read_text().splitlines()


async def test_what_was_written_can_be_read(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """A store of version 1 opens, holds the same, and takes new writes."""
    await raw.execute(f"CREATE SCHEMA {schema}")

    for script in (VERSION_1, ROWS_1):
        await raw.execute(script.read_text().replace("{schema}", schema))

    async with store() as cp:
        assert await cp.load("thread é") == CheckpointData(
            [{"role": "user", "content": "é\0'"}, {"n": 10**20}],
            {"plan": [1.5, None], "\0": {}},
            [_call("c3", "pay", {}, "key 2", "issued", 2)],
            2,
        )
        assert await cp.list_calls("thread é") == [
            _call("c1", "pay", {"a": 1}, "key 1", "completed", 1, {"ok": True}),
            _call("c2", "pay", {}, "key 2", "failed", 1, "no"),
            _call("c3", "pay", {}, "key 2", "issued", 2),
        ]
        assert await cp.load("only extra") == CheckpointData(
            [], {"k": "half of \ud83d"}, [], 0
        )
        assert await cp.load("deleted") is None
        (erased,) = await cp.list_calls("deleted")
        assert (erased.call.args, erased.status, erased.erased) == ({}, "issued", True)
        assert await cp.list_threads() == [
            ThreadInfo("only extra", 0, AT, AT),
            ThreadInfo("thread é", 2, AT, AT),
        ]
        assert await cp.append("thread é", [{}], expected_version=2) == 3


async def test_a_trim_changes_first_and_nothing_else(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """The rows of the messages are gone, and every other row is as it was."""
    async with store() as cp:
        await write_one_of_each(cp)
        threads = await raw.fetch(f"SELECT * FROM {schema}.threads ORDER BY number")
        before = await rows(raw, schema)
        assert await cp.trim("thread é", 1) == 1
        after = await rows(raw, schema)
        trimmed = before[1].replace("(1, 0,", "(1, 1,")
        assert after == [before[0], trimmed, *before[3:]]
        assert ", 0, '{\"role" in before[2]
        assert await cp.trim("thread é", 2) == 1
        now = await raw.fetch(f"SELECT * FROM {schema}.threads ORDER BY number")
        changed = {**threads[0], "first": 2}
        assert [*map(dict, now)] == [changed, *map(dict, threads[1:])]


def _call(
    call_id: str,
    tool: str,
    args: dict[str, Any],
    key: str,
    status: Any,
    attempt: int,
    result: Any = None,
) -> CallRecord:
    resolved = None if status == "issued" else AT
    call = ToolCall(call_id, tool, args, key)
    return CallRecord("thread é", call, status, attempt, AT, result, resolved)
