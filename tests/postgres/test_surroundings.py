"""What other people put around the tables: row-level security hides rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from cpkit import BackendUnavailable, ToolCall
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import MakeStore
from tests.postgres.proxy import Proxy
from tests.servers.pgbouncer import PgBouncer

Store = PostgresCheckpointer[Any]


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


async def test_row_level_security(
    clerks_store: str, store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """Postgres raises in place of hiding rows, in an open handle and in a new one."""
    async with store(clerks_store) as cp:
        assert await cp.find_call("k") is not None
        await restrict(raw, f"{schema}.calls")

        with pytest.raises(BackendUnavailable, match="row-level security") as told:
            await cp.find_call("k")

        assert told.value.rejected

    async with store(clerks_store) as cp:
        with pytest.raises(BackendUnavailable, match="row-level security"):
            await cp.record_issued("u", ToolCall("c", "pay", {}, "k"))


async def test_row_level_security_behind_a_pooler(
    clerks_store: str, store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """A pooler takes no settings of a session, but the role's hold behind it."""
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
