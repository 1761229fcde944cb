"""The schema: any name, created with few rights; which databases are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from cpkit import (
    BackendUnavailable,
    InvalidURL,
    StatesDurability,
    Survives,
    ToolCall,
    open_checkpointer,
)
from cpkit_postgres import PostgresCheckpointer
from cpkit_postgres.schema import durability
from tests.postgres.conftest import MakeStore
from tests.servers.postgres import PostgresServer, shared_postgres

Store = PostgresCheckpointer[Any]

_HAS_SCHEMA = "SELECT FROM pg_namespace WHERE nspname = $1"

NAMES = [
    'quo"te',
    "apo'strophe; DROP SCHEMA public --",
    "$body$",
    "{schema} {call}",
    "%s $1 \\ é 雪",
    "UPPER and space",
    "public.threads",
    "é" * 31,
]


@pytest.mark.parametrize("name", NAMES)
async def test_any_legal_name(name: str, raw: asyncpg.Connection) -> None:
    """It is quoted, and the store works."""
    url = shared_postgres(schema=name)

    try:
        async with open_checkpointer(url) as cp:
            assert await cp.append("t", [{"i": 1}]) == 1
            await cp.save_extra("t", {"a": 1})
            data = await cp.load("t")
            assert data is not None
            assert (data.messages, data.extra) == ([{"i": 1}], {"a": 1})

        assert await raw.fetchval(
            "SELECT count(*) = 1 FROM pg_namespace WHERE nspname = $1", name
        )
    finally:
        identifier = name.replace('"', '""')
        await raw.execute(f'DROP SCHEMA "{identifier}" CASCADE')


@pytest.mark.parametrize("name", ["", "x" * 64, "é" * 32, "a\0b"])
def test_an_illegal_name(name: str) -> None:
    """Postgres would cut it, and two stores would be the same one."""
    with pytest.raises(InvalidURL, match="1 to 63 bytes"):
        open_checkpointer("postgresql://localhost/db", schema=name)


async def test_ids_are_inert(store: MakeStore) -> None:
    """SQL, patterns and escapes are ordinary characters of an id."""
    ids = [
        "'; DROP TABLE threads --",
        '"',
        "%",
        "_",
        "\\",
        "$1",
        "{a}",
        "a\tb",
        "é",
        "É",
    ]

    async with store() as cp:
        for i, name in enumerate(ids):
            await cp.append(name, [{"i": i}])
            await cp.save_extra(name, {name: i})
            await cp.record_issued(name, ToolCall(name, name, {name: i}, name))

        for i, name in enumerate(ids):
            data = await cp.load(name)
            assert data is not None
            assert (data.messages, data.extra) == ([{"i": i}], {name: i})
            assert [call.call.args for call in data.pending] == [{name: i}]
            listed = await cp.list_threads(prefix=name)
            assert [thread.thread_id for thread in listed] == [name]

        assert [t.thread_id for t in await cp.list_threads()] == sorted(ids)


async def test_schemas_are_stores_of_their_own(raw: asyncpg.Connection) -> None:
    """Two in one database share nothing, not even a lock."""
    try:
        async with (
            Store(shared_postgres(), schema="one of two") as one,
            Store(shared_postgres(), schema="two of two", timeout=5) as two,
        ):
            await one.append("t", [{}])
            assert await two.load("t") is None
            await raw.execute('BEGIN; LOCK TABLE "one of two".threads')
            assert await two.append("t", [{}]) == 1
    finally:
        await raw.execute("ROLLBACK")
        await raw.execute('DROP SCHEMA "one of two", "two of two" CASCADE')


async def test_no_right_to_create(
    clerk: str, store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """The error names the missing right; a schema created for the role is enough."""
    with pytest.raises(
        BackendUnavailable, match="may not create the schema.*GRANT CREATE"
    ):
        async with Store(clerk, schema=schema):
            pass

    await raw.execute(f"CREATE SCHEMA {schema} AUTHORIZATION clerk")

    async with Store(clerk, schema=schema) as cp:
        assert await cp.append("t", [{}]) == 1


async def test_no_right_to_write(
    clerk: str, store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """A role that may only read can load; its append says that nothing was written."""
    async with store() as cp:
        await cp.append("t", [{}])

    await raw.execute(
        f"GRANT USAGE ON SCHEMA {schema} TO clerk; "
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO clerk"
    )

    async with Store(clerk, schema=schema) as cp:
        assert await cp.load("t") is not None

        with pytest.raises(BackendUnavailable, match="permission denied") as caught:
            await cp.append("t", [{}])

        assert not caught.value.maybe_applied


async def test_another_isolation_level(
    clerk: str, store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """The store works under a stricter default of the role: it sets its own."""
    await raw.execute(
        f"CREATE SCHEMA {schema} AUTHORIZATION clerk;"
        "ALTER ROLE clerk SET default_transaction_isolation = 'serializable'"
    )

    async with Store(clerk, schema=schema) as one, Store(clerk, schema=schema) as two:

        async def use(cp: Store, name: str) -> None:
            for i in range(10):
                call = ToolCall(f"{name} {i}", "x", {}, f"{name} {i}")
                await asyncio.gather(
                    cp.append("t", [{}]),
                    cp.append("u", [{}, {}], extra={name: i}),
                    cp.record_issued("t", call),
                )
                await cp.record_result("t", call.call_id, i)

        await asyncio.gather(use(one, "one"), use(two, "two"))
        assert [await one.append(thread, []) for thread in "tu"] == [20, 40]
        assert {call.status for call in await one.list_calls("t")} == {"completed"}


@pytest.mark.parametrize(
    ("setting", "survives"),
    [("on", "machine"), ("local", "machine"), ("off", "none")],
)
async def test_durability_is_the_servers(
    setting: str, survives: str, url: str, schema: str
) -> None:
    """It is read from the connection."""
    async with open_checkpointer(f"{url}&synchronous_commit={setting}") as cp:
        assert isinstance(cp, StatesDurability)
        assert cp.durability.survives == survives
        assert f"synchronous_commit={setting}" in cp.durability.words


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
async def test_durability_without_syncs(
    setting: str, server: PostgresServer, schema: str
) -> None:
    """A server without syncs keeps its data only while the machine runs."""
    admin = await asyncpg.connect(server.url)
    await admin.execute(f"ALTER SYSTEM SET {setting} = off")
    await admin.execute("SELECT pg_reload_conf()")

    try:
        while await admin.fetchval(f"SHOW {setting}") != "off":
            await admin.execute("SELECT pg_sleep(0.002)")

        async with Store(server.url, schema=schema) as cp:
            assert cp.durability.survives is Survives.PROCESS
            assert f"{setting}=off" in cp.durability.words
    finally:
        await admin.execute(f"ALTER SYSTEM RESET {setting}")
        await admin.execute("SELECT pg_reload_conf()")
        await admin.close()


def test_durability_is_that_of_the_worst_setting() -> None:
    """Of several settings the worst one counts."""
    for values, survives in (
        (("off", "off", "off"), Survives.NONE),
        (("on", "off", "on"), Survives.PROCESS),
        (("on", "on", "on"), Survives.MACHINE),
    ):
        names = "synchronous_commit", "fsync", "full_page_writes"
        settings = dict(zip(names, values, strict=True))
        assert durability(settings).survives is survives


async def test_a_restore_of_data_alone(
    store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """``pg_restore --data-only`` into a store that was opened repeats its version."""
    async with store() as cp:
        await cp.append("t", [{}])

    await raw.execute(f"INSERT INTO {schema}.schema_version VALUES (1)")

    async with store() as cp:
        assert await cp.append("t", [{}]) == 2
