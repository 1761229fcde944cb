"""What other people put around the tables: UNLOGGED, row-level security, triggers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from cpkit import BackendUnavailable, Survives, ToolCall
from cpkit.registry import examine_store
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import MakeStore
from tests.postgres.proxy import Proxy
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer

Store = PostgresCheckpointer[Any]

TABLES = ["threads", "messages", "extra", "calls", "schema_version"]


@pytest.mark.parametrize("table", TABLES)
async def test_an_unlogged_table_survives_nothing(
    table: str, store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """The durability names the table, and the cure."""
    async with store() as cp:
        assert cp.durability.survives is Survives.MACHINE

    await raw.execute(f"ALTER TABLE {schema}.{table} SET UNLOGGED")

    async with store() as cp:
        assert cp.durability.survives is Survives.NONE
        assert cp.durability.settings["unlogged"] == table
        assert "SET LOGGED" in cp.durability.words


async def test_an_unlogged_table_is_empty_after_a_crash(
    server: PostgresServer, schema: str
) -> None:
    """Which is why the level is "none": the engine does what its manual says."""
    async with Store(server.url, schema=schema) as cp:
        await cp.append("t", [{}])

    admin = await asyncpg.connect(server.url)
    await admin.execute(f"ALTER TABLE {schema}.threads SET UNLOGGED")
    admin.terminate()
    server.kill()
    server.start()

    async with Store(server.url, schema=schema) as cp:
        assert await cp.load("t") is None


@pytest.fixture
async def clerks_store(
    clerk: str, store: MakeStore, schema: str, raw: asyncpg.Connection
) -> str:
    """The URL of a role without special rights, whose store has a thread and a key."""
    async with store() as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", ToolCall("c", "pay", {}, "k"))

    await raw.execute(
        f"GRANT USAGE ON SCHEMA {schema} TO clerk;"
        f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO clerk"
    )
    return clerk


async def restrict(
    raw: asyncpg.Connection, table: str, command: str = "ALL", rows: str = "false"
) -> None:
    """Let roles see all rows of a table, except by one command."""
    await raw.execute(
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;"
        f"CREATE POLICY every ON {table} USING (true) WITH CHECK (true);"
        f"CREATE POLICY hides ON {table} AS RESTRICTIVE FOR {command} USING ({rows})"
    )


@pytest.mark.parametrize("table", TABLES)
async def test_row_level_security_is_refused(
    table: str, clerks_store: str, store: MakeStore, schema: str, raw: Any
) -> None:
    """At opening, for it may hide rows from reads; also by a pool of the caller."""
    await restrict(raw, f"{schema}.{table}")

    with pytest.raises(
        BackendUnavailable, match=f"row-level security.*{table}"
    ) as told:
        async with store(clerks_store):
            pass

    assert told.value.rejected

    async with asyncpg.create_pool(clerks_store, min_size=0) as pool:
        with pytest.raises(BackendUnavailable, match=f"security hides rows of {table}"):
            async with store(pool):
                pass


async def test_row_level_security_under_an_open_handle(
    clerks_store: str, store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """Postgres raises in place of hiding rows."""
    async with store(clerks_store) as cp:
        assert await cp.find_call("k") is not None
        await restrict(raw, f"{schema}.calls")

        with pytest.raises(BackendUnavailable, match="row-level security") as told:
            await cp.find_call("k")

        assert told.value.rejected

        with pytest.raises(BackendUnavailable, match="row-level security"):
            await cp.record_issued("u", ToolCall("c", "pay", {}, "k"))


async def test_row_level_security_behind_a_pooler(
    clerks_store: str, store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """A pooler takes no settings of a session, but the role's hold behind it."""
    for is_set in (False, True):
        with PgBouncer(clerks_store) as pooler:
            found = await examine_store(f"{pooler.url}?schema={schema}", whole=False)
            assert ("row_security = off" in " ".join(found.advice)) is not is_set

        await raw.execute("ALTER ROLE clerk SET row_security = off")

    with PgBouncer(clerks_store) as pooler:
        async with store(pooler.url) as cp:
            assert await cp.find_call("k") is not None
            await restrict(raw, f"{schema}.calls")

            with pytest.raises(BackendUnavailable, match="row-level security"):
                await cp.find_call("k")


HIDDEN: dict[str, tuple[str, str, Callable[[Store], Awaitable[object]]]] = {
    "a claim": (
        "calls",
        "SELECT",
        lambda cp: cp.record_issued("u", ToolCall("c", "pay", {}, "k")),
    ),
    "a result": ("calls", "UPDATE", lambda cp: cp.record_result("t", "c", "paid")),
    "an append": ("threads", "UPDATE", lambda cp: cp.append("t", [{}])),
    "a deletion": ("threads", "DELETE", lambda cp: cp.delete_thread("t")),
}


@pytest.mark.parametrize("name", HIDDEN)
async def test_no_statement_is_repeated_without_a_bound(
    name: str, clerks_store: str, store: MakeStore, schema: str, raw: Any
) -> None:
    """Where a pool of the caller hides rows in silence, a write gives up soon."""

    async def keep(connection: object) -> None:
        """Leave the connection as it is."""

    table, command, write = HIDDEN[name]

    async with Proxy(clerks_store) as proxy:
        async with (
            asyncpg.create_pool(proxy.url, min_size=1, max_size=1, reset=keep) as pool,
            store(pool, notify=False) as cp,
        ):
            await restrict(raw, f"{schema}.{table}", command, "thread_id <> 't'")
            before = proxy.trips

            with pytest.raises(
                BackendUnavailable, match="cannot see or change"
            ) as told:
                await write(cp)

            assert told.value.rejected
            assert not told.value.maybe_applied
            assert proxy.trips - before <= 110
