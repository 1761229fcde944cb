"""``?dialect=portable`` on a real Postgres that refuses what other engines lack."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlencode

import asyncpg
import pytest

from conformance import Clause, ConformanceTests, Harness
from cpkit import BackendUnavailable, SchemaMismatch, ToolCall, open_checkpointer
from cpkit.driver import StoreFailure
from cpkit_postgres import PostgresCheckpointer, portable
from cpkit_postgres.connections import Connections
from cpkit_postgres.errors import failure
from cpkit_postgres.options import PostgresOptions
from tests.postgres.conftest import MakeStore
from tests.servers.postgres import PostgresServer, shared_postgres
from tests.test_conformance import WITHOUT_POWERLOSS, PostgresHarness

# A role without what can be taken from a role. The server's log shows the rest.
ROLE = """
CREATE ROLE plain LOGIN;
GRANT CREATE ON DATABASE postgres TO plain;
REVOKE USAGE ON LANGUAGE plpgsql FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION pg_advisory_lock_shared(integer, integer) FROM PUBLIC;
"""

FORBIDDEN = re.compile(
    r"advisory|plpgsql|DO \$|COLLATE|LISTEN\b|NOTIFY|xmin|LOCK TABLE"
    r"|INDEX \w+ ON [^(]*\([^)]*\)\s*WHERE",
    re.IGNORECASE,
)

HAS_SCHEMA = "SELECT FROM pg_namespace WHERE nspname = $1"
ROLLED_BACK = "could not serialize access"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that logs every statement; the log has nothing that is forbidden."""
    with PostgresServer(settings={"log_statement": "all"}) as server:
        asyncio.run(_prepare(server))
        begin = len(server.log)
        yield server
        log = server.log[begin:]
        statements = re.sub(r"(?m)^.*DETAIL:.*$", "", log)  # arguments
        assert "INSERT INTO" in statements
        assert {found.group() for found in FORBIDDEN.finditer(statements)} == set()


async def _prepare(server: PostgresServer) -> None:
    connection = await asyncpg.connect(server.url)
    await connection.execute(ROLE)
    await connection.close()


def _url(server: PostgresServer, **options: object) -> str:
    place = f"postgresql://plain@127.0.0.1:{server.port}/postgres"
    return f"{place}?{urlencode({'dialect': 'portable', **options})}"


@pytest.fixture
async def conflicts(server: PostgresServer) -> AsyncIterator[None]:
    """Transactions that read and write what the store does, as long as a test runs."""
    connection = await asyncpg.connect(server.url)

    async def conflict() -> None:
        while True:
            try:
                async with connection.transaction(isolation="serializable"):
                    await connection.fetch("SELECT * FROM cpkit.messages, cpkit.calls")
                    await connection.execute("UPDATE cpkit.threads SET changes = 7")
            except asyncpg.PostgresError:
                await asyncio.sleep(0)

    async with open_checkpointer(_url(server)):
        conflicting = asyncio.create_task(conflict())
        yield
        conflicting.cancel()
        await asyncio.wait([conflicting])

    connection.terminate()


@pytest.mark.long
class TestPortable(ConformanceTests):
    """The whole contract holds for a role that may not use what is forbidden.

    Without power losses: a server in a folder does not have that role.
    """

    @pytest.fixture
    def harness(self, server: PostgresServer) -> Harness:
        return PostgresHarness(_url(server, schema="suite"), server)

    @pytest.mark.parametrize("clause", WITHOUT_POWERLOSS, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)


async def test_what_is_rolled_back_is_run_again(
    server: PostgresServer, conflicts: None
) -> None:
    """The server raises 40001, and every write is applied once."""
    before = server.log.count(ROLLED_BACK)

    async with open_checkpointer(_url(server, connect_timeout=60, timeout=60)) as cp:

        async def use(thread: str) -> None:
            for i in range(5):
                assert await cp.append(thread, [{"i": i}], expected_version=i) == i + 1
                await cp.save_extra(thread, {f"k{i}": i})
                call = ToolCall(f"c{i}", "pay", {}, f"{thread} {i}")
                assert await cp.record_issued(thread, call) is None
                assert (await cp.record_result(thread, f"c{i}", i)).result == i

        threads = ["a", "b", "c"]
        await asyncio.gather(*map(use, threads))

        for thread in threads:
            data = await cp.load(thread)
            assert data is not None
            assert data.messages == [{"i": i} for i in range(5)]
            assert data.extra == {f"k{i}": i for i in range(5)}

    assert server.log.count(ROLLED_BACK) > before


async def test_a_commit_that_fails_is_not_acknowledged(
    store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """A statement's own commit can fail after the server has sent its rows."""
    async with store(dialect="portable") as cp:
        await cp.append("t", [{}])
        await raw.execute(f"CREATE TABLE {schema}.none (body text PRIMARY KEY)")
        await raw.execute(
            f"ALTER TABLE {schema}.messages ADD FOREIGN KEY (body) "
            f"REFERENCES {schema}.none DEFERRABLE INITIALLY DEFERRED NOT VALID"
        )

        one: list[dict[str, int]] = [{}]

        for many in (one, one * 2):
            with pytest.raises(BackendUnavailable, match="foreign key") as caught:
                await cp.append("t", many)

            assert not caught.value.maybe_applied

        assert len(await cp.read("t")) == 1


@pytest.mark.parametrize(
    ("code", "fate"),
    [("40001", "not sent"), ("40003", "unknown"), ("23514", "rejected")],
)
def test_what_the_engine_says_of_a_transaction(code: str, fate: str) -> None:
    """40001 is retried, and after 40003 the write may be applied."""
    error = asyncpg.PostgresError.new({"C": code, "M": "as an engine says it"})
    found = failure(error, "store")
    assert isinstance(found, StoreFailure)
    assert found.fate == fate


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
async def test_weaker_isolation_is_refused(
    level: str, store: MakeStore, schema: str, url: str
) -> None:
    """Opening finds an engine whose SERIALIZABLE is only a snapshot, or less."""
    async with store(dialect="portable"):
        pass

    where = f"{shared_postgres()}?{urlencode({'default_transaction_isolation': level})}"
    weaker = Connections(where, "weaker", PostgresOptions(schema=schema))

    with pytest.raises(StoreFailure, match="both committed") as caught:
        await portable.check_engine(weaker)

    await weaker.close()
    assert caught.value.fate == "rejected"


async def test_processes_that_open_at_once(store: MakeStore) -> None:
    """Each checks the engine beside the others."""
    async with store(dialect="portable"):
        pass

    async def use() -> None:
        async with store(dialect="portable", connect_timeout=30) as cp:
            await cp.load("t")

    await asyncio.gather(*(use() for _ in range(8)))


async def test_a_pooler_is_refused(
    store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """The check needs two sessions of its own. Nothing is created before."""
    with pytest.raises(BackendUnavailable, match="two connections"):
        async with store(dialect="portable", pooler="transaction"):
            pass

    assert not await raw.fetch(HAS_SCHEMA, schema)


async def test_a_pool_of_one_connection_is_refused(
    schema: str, url: str, raw: asyncpg.Connection
) -> None:
    """The check needs two of it. Nothing is created before."""
    async with asyncpg.create_pool(
        shared_postgres(),
        min_size=1,
        max_size=1,
        server_settings={"default_transaction_isolation": "serializable"},
    ) as pool:
        with pytest.raises(BackendUnavailable, match="two connections"):
            async with PostgresCheckpointer[Any](
                pool, schema=schema, dialect="portable"
            ):
                pass

    assert not await raw.fetch(HAS_SCHEMA, schema)


async def test_another_order_of_text_is_refused(
    store: MakeStore,
    schema: str,
    raw: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids would be listed in another order. Nothing is created before."""
    # Not every server has a locale whose order is another one.
    monkeypatch.setattr(portable, "_ORDER", "SELECT false")

    with pytest.raises(BackendUnavailable, match="does not order text by bytes"):
        async with store(dialect="portable"):
            pass

    assert not await raw.fetch(HAS_SCHEMA, schema)


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [("postgres", "portable", "without"), ("portable", "postgres", "with")],
)
async def test_the_other_dialect_is_refused(
    first: str, second: str, word: str, store: MakeStore
) -> None:
    """Transactions of both kinds would not be checked against each other."""
    async with store(dialect=first) as cp:
        await cp.append("t", [{}])

    with pytest.raises(SchemaMismatch, match=f"made {word} dialect=portable"):
        async with store(dialect=second):
            pass

    async with store(dialect=first) as cp:
        assert await cp.append("t", [{}]) == 2
