"""What ``cpkit doctor`` finds around a store, as in docs/operations.md#doctor."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from cpkit import StatesDurability
from cpkit_postgres import PostgresCheckpointer
from tests.cli.command import Ended, invoke
from tests.postgres.conftest import MakeStore
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer, shared_postgres

Store = PostgresCheckpointer[Any]


async def examined(url: str, *words: str) -> Ended:
    return await asyncio.to_thread(invoke, "doctor", url, *words)


@pytest.fixture
async def healthy(store: MakeStore, url: str) -> str:
    """The URL of a store with nothing to change."""
    async with store() as cp:
        await cp.append("t", [{}])

    ended = await examined(url)
    assert ended.code == 0
    assert "advice      none" in ended.out
    return url


@pytest.mark.parametrize(
    ("sql", "said", "code"),
    [
        ("ALTER TABLE {}.calls SET UNLOGGED", ["unlogged=calls", "SET LOGGED"], 1),
        (
            """
            CREATE FUNCTION {}.audit() RETURNS trigger LANGUAGE plpgsql
                AS 'BEGIN RETURN NEW; END';
            CREATE TRIGGER audit AFTER INSERT ON {}.calls
                FOR EACH ROW EXECUTE FUNCTION {}.audit()
            """,
            ["DROP TRIGGER, for calls.audit"],
            0,
        ),
        (
            "CREATE RULE keep AS ON DELETE TO {}.threads DO ALSO NOTHING",
            ["DROP RULE, for threads.keep"],
            0,
        ),
    ],
)
async def test_what_is_around_the_tables(
    sql: str, said: list[str], code: int, healthy: str, schema: str, raw: Any
) -> None:
    """UNLOGGED tables weaken the promise; triggers and rules are named."""
    await raw.execute(sql.replace("{}", schema))
    ended = await examined(healthy)
    assert ended.code == code
    assert all(words in ended.out for words in said)


async def test_a_weaker_promise_is_a_finding(healthy: str) -> None:
    """Also where the URL asks for it."""
    ended = await examined(f"{healthy}&synchronous_commit=off")
    assert ended.code == 1
    assert "less than this store's default: machine" in ended.out
    assert "synchronous_commit = on" in ended.out


async def test_a_pooler_in_between(healthy: str, schema: str) -> None:
    """It is named; the promise is the same."""
    with PgBouncer(shared_postgres()) as pooler:
        ended = await examined(f"{pooler.url}?schema={schema}")
        assert ended.code == 0
        assert "pooler=transaction" in ended.out
        assert "a pooler is in between" in ended.out


@pytest.mark.parametrize("limit", ["statement_timeout", "lock_timeout"])
async def test_the_limits_of_the_role(
    limit: str, clerk: str, healthy: str, schema: str, raw: asyncpg.Connection
) -> None:
    """They are named with their values."""
    await raw.execute(
        f"GRANT USAGE ON SCHEMA {schema} TO clerk;"
        f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO clerk;"
        f"ALTER ROLE clerk SET {limit} = '5000ms'"
    )
    ended = await examined(f"{clerk}?schema={schema}")
    assert ended.code == 0
    assert f"({limit}=5000ms)" in ended.out


async def test_row_level_security_is_named(
    clerk: str, healthy: str, schema: str, raw: asyncpg.Connection
) -> None:
    """The store does not open, and the error has the cure."""
    await raw.execute(
        f"GRANT USAGE ON SCHEMA {schema} TO clerk;"
        f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO clerk;"
        f"ALTER TABLE {schema}.calls ENABLE ROW LEVEL SECURITY"
    )
    ended = await examined(f"{clerk}?schema={schema}")
    assert ended.code == 3
    assert "row-level security hides rows of calls" in ended.err
    assert "BYPASSRLS" in ended.err


async def test_sessions_that_are_read_only(
    clerk: str, healthy: str, schema: str, raw: asyncpg.Connection
) -> None:
    """The probe fails, the report is whole, and the exit code is 1."""
    await raw.execute(
        f"GRANT USAGE ON SCHEMA {schema} TO clerk;"
        f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO clerk;"
        "ALTER ROLE clerk SET default_transaction_read_only = on"
    )
    ended = await examined(f"{clerk}?schema={schema}")
    assert ended.code == 1
    assert "RESET default_transaction_read_only" in ended.out
    assert "the server takes no writes" in ended.out
    assert (await examined(f"{clerk}?schema={schema}", "--read-only")).code == 0


async def test_a_standby(server: PostgresServer, schema: str) -> None:
    """It is refused, unless the URL takes any server: then doctor names it."""
    async with Store(server.url, schema=schema) as cp:
        assert isinstance(cp, StatesDurability)

    with server.standby() as other:
        query = f"schema={schema}&connect_timeout=0.1"
        refused = await examined(f"{other.url}?{query}")
        assert refused.code == 3
        assert "primary" in refused.err
        ended = await examined(f"{other.url}?target_session_attrs=any&{query}")
        assert ended.code == 1
        assert "the server is a standby" in ended.out
