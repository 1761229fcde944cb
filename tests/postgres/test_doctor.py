"""What ``cpkit doctor`` finds around a store, as in docs/operations.md#doctor."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from cpkit import StatesDurability, ToolCall
from cpkit.driver import Findings
from cpkit.registry import examine_store
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
        ended = await examined(f"{other.url}?target_session_attrs=any&schema={schema}")
        assert ended.code == 1
        assert "the server is a standby" in ended.out


# What is stored


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        (
            "DELETE FROM {}.messages WHERE position = 1",
            "thread 't' is at version 3, and has 2 of its messages",
        ),
        (
            "UPDATE {}.messages SET position = 7 WHERE position = 1",
            "thread 't' is at version 3, and has 3 of its messages",
        ),
        (
            "DELETE FROM {}.threads",
            "call 'c' is of thread 't', which is missing",
        ),
        (
            "DELETE FROM {}.threads",
            "there are messages or extra of 2 threads that are missing",
        ),
        (
            """
            DROP INDEX {}.calls_attempt;
            INSERT INTO {}.calls (thread_id, call_id, tool_name, args, idempotency_key,
                status, attempt, issued_at)
            VALUES ('t', 'd', 'x', '{}', 'k', 'issued', 1, 1)
            """,
            "key 'k' has two calls that have not failed",
        ),
    ],
)
async def test_the_check_counts_what_is_stored(
    sql: str, said: str, store: MakeStore, url: str, schema: str, raw: Any
) -> None:
    """Messages, positions, holders of keys, and rows without their thread."""
    async with store() as cp:
        await cp.append("t", [{}] * 3, extra={"a": 1})
        await cp.append("empty", [], extra={"a": 1})
        await cp.record_issued("t", ToolCall("c", "x", {}, "k"))

    assert (await examine_store(url, whole=True)).damaged == []
    await raw.execute(sql.replace("{}.", f"{schema}."))
    assert any(said in one for one in (await examine_store(url, whole=True)).damaged)
    assert (await examine_store(url, whole=False)).damaged == ()


async def test_the_check_of_the_engine_reads_the_indexes(
    clerk: str, store: MakeStore, url: str, schema: str, raw: asyncpg.Connection
) -> None:
    """With Postgres' own extension, for a role that may execute it."""
    async with store() as cp:
        await cp.append("t", [{}])

    await raw.execute(
        f"GRANT USAGE ON SCHEMA {schema} TO clerk;"
        f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO clerk"
    )
    assert "CREATE EXTENSION" in (await examine_store(url, whole=True)).facts["indexes"]
    await raw.execute("CREATE EXTENSION amcheck")
    is_ready = (
        "UPDATE pg_index SET indisready = $1 WHERE indexrelid = "
        f"'{schema}.calls_attempt'::regclass"
    )

    try:
        denied = await examine_store(f"{clerk}?schema={schema}", whole=True)
        assert "the right" in denied.facts["indexes"]
        assert await examine_store(url, whole=True) == Findings([], [], {})
        await raw.execute(is_ready, False)

        async with store() as cp:
            await cp.record_issued("t", ToolCall("c", "x", {}, "k"))

        await raw.execute(is_ready, True)
        [found] = (await examine_store(url, whole=True)).damaged
        assert 'lacks matching index tuple within index "calls_attempt"' in found
    finally:
        await raw.execute("DROP EXTENSION amcheck")


async def test_a_page_that_is_damaged_on_disk() -> None:
    """The check meets it, and then the server's own count says so without a check."""
    with PostgresServer(has_checksums=True) as server:
        admin = await asyncpg.connect(server.url)

        async with Store(server.url) as cp:
            await cp.append("t", [{"pad": "x" * 900}] * 20)

        path = await admin.fetchval("SELECT pg_relation_filepath('cpkit.messages')")
        await admin.execute("CHECKPOINT")
        await admin.close()
        await asyncio.to_thread(server.stop)

        with open(server.data / path, "r+b") as file:
            file.seek(8192 + 4000)
            file.write(b"\xff" * 8)

        await asyncio.to_thread(server.start)
        assert (await examine_store(server.url, whole=False)).advice == []
        found = await examine_store(server.url, whole=True)
        assert "invalid page in block 1" in found.damaged[0]
        [advice] = (await examine_store(server.url, whole=False)).advice
        assert "1 damaged pages" in advice
