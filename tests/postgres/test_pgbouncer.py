"""Behind a PgBouncer that gives each transaction another server connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from conformance import (
    Clause,
    ConformanceTests,
    Harness,
    Level,
    URLHarness,
    select,
)
from cpkit import BackendUnavailable, ToolCall
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import MakeStore
from tests.postgres.proxy import Proxy
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer, shared_postgres

Store = PostgresCheckpointer[Any]


@pytest.fixture(scope="module")
def pooler() -> Iterator[PgBouncer]:
    """A PgBouncer in front of the shared server, with four server connections."""
    with PgBouncer(shared_postgres()) as pooler:
        yield pooler


@pytest.fixture(scope="module")
def wide() -> Iterator[PgBouncer]:
    """A PgBouncer that gives each of ten handles beside a fault a connection.

    A fault that stalls holds one until its client has gone.
    """
    with PgBouncer(shared_postgres(), size=12) as pooler:
        yield pooler


# Values, ids and answers are as without it: `tests/test_conformance.py` has them all.
POOLED = [
    one
    for one in select(["core", "optional", "concurrent", "durable"])
    if one.level in (Level.CONCURRENT, Level.DURABLE)
    or one.subject in ("append", "cancel", "claim", "handle", "move", "trim", "watch")
]


@pytest.mark.long
class TestPooled(ConformanceTests):
    """Each statement and each transaction runs on a connection of any client."""

    rounds = ConformanceTests.rounds / 4

    @pytest.mark.parametrize("clause", POOLED, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)

    @pytest.fixture
    def harness(self, wide: PgBouncer) -> Harness:
        return URLHarness(f"{wide.url}?pooler=transaction&schema=pooled")


async def test_many_clients_on_few_connections(
    pooler: PgBouncer, url: str, schema: str
) -> None:
    """Three handles with eight connections each share four, and create the schema."""
    stores = [Store(pooler.url, schema=schema, pooler="transaction") for _ in range(3)]

    async def use(cp: Store, name: str) -> None:
        async with cp:
            for turn in range(3):
                await asyncio.gather(
                    *(cp.append(f"t{i}", [{"by": name}]) for i in range(20)),
                    *(cp.save_extra(f"t{i}", {name: turn}) for i in range(20)),
                    *(cp.load(f"t{i}") for i in range(20)),
                    *(
                        cp.record_issued(
                            "t", ToolCall(f"{name} {turn} {i}", "x", {}, f"{i}")
                        )
                        for i in range(10)
                    ),
                )

    await asyncio.gather(*(use(cp, f"n{i}") for i, cp in enumerate(stores)))

    async with Store(pooler.url, schema=schema, pooler="transaction") as cp:
        for i in range(20):
            data = await cp.load(f"t{i}")
            assert data is not None
            assert data.version == 3 * 3
            assert data.extra == {"n0": 2, "n1": 2, "n2": 2}

        assert len(await cp.list_calls("t")) == 10


async def test_the_server_behind_it_restarts(schema: str) -> None:
    """The handle works on; errors say what may be lost."""
    with PostgresServer() as server, PgBouncer(server.url) as pooler:
        async with Store(
            pooler.url, schema=schema, pooler="transaction", connect_timeout=15
        ) as cp:
            await cp.append("t", [{}])
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            version = 1
            lost = []

            while version < 4:
                try:
                    version = await cp.append("t", [{}], expected_version=version)
                except BackendUnavailable as exc:
                    lost.append(exc.maybe_applied)
                    data = await cp.load("t")
                    version = data.version if data else 0

            assert all(lost)
            data = await cp.load("t")
            assert data is not None
            assert data.version == 4


# What a pooler of a hosted service lets pass, so that no error tells that it is there.
SETTINGS = "default_transaction_isolation, statement_timeout, row_security, "
SETTINGS += "tcp_keepalives_idle"


async def take_names(pooler: PgBouncer) -> None:
    """Leave statements with the names that asyncpg gives next, as another process."""
    beside = await asyncpg.connect(pooler.url)
    name = (await beside.prepare("SELECT 'of another program'")).get_name()
    start = int(name.rpartition("stmt_")[2].strip("_"), 16)

    for number in range(start + 1, start + 100):
        taken = f"__asyncpg_stmt_{number:x}__"
        await beside.execute(f'PREPARE "{taken}" AS SELECT $1 WHERE false')

    beside.terminate()


@pytest.mark.parametrize("mode", ["transaction", "session"])
@pytest.mark.parametrize("ignored", ["", SETTINGS])
async def test_a_pooler_is_found(
    mode: str, ignored: str, store: MakeStore, schema: str
) -> None:
    """Without the option too, no statement has a name that another process uses."""
    async with store():
        pass

    server = shared_postgres()

    with PgBouncer(server, mode=mode, size=1, ignored=ignored) as pooler:
        if mode == "transaction":
            await take_names(pooler)

        async with store(pooler.url, pool_size=1) as cp:
            assert cp.durability.settings["pooler"] == "transaction"
            await cp.append("t", [{}])
            await cp.record_issued("t", ToolCall("c", "pay", {}, "k"))
            await cp.record_result("t", "c", "paid")
            found = await cp.find_completed("k")
            assert found is not None
            assert found.result == "paid"
            assert len(await cp.list_calls("t")) == 1


async def test_a_store_is_created_through_a_pooler(url: str, store: MakeStore) -> None:
    """Whose server connection has statements of other processes."""
    with PgBouncer(shared_postgres(), size=1, ignored=SETTINGS) as pooler:
        await take_names(pooler)

        async with store(pooler.url) as cp:
            assert await cp.append("t", [{}]) == 1


async def test_a_direct_connection_has_no_pooler(store: MakeStore) -> None:
    """Statements are prepared once there, and a watch listens."""
    async with store() as cp:
        assert "pooler" not in cp.durability.settings


async def test_a_session_that_the_caller_is_sure_of(store: MakeStore) -> None:
    """With ``pooler=session`` statements have names: one round trip for each."""
    server = shared_postgres()

    with PgBouncer(server, mode="session", ignored=SETTINGS) as pooler:
        async with store(pooler.url, pooler="session") as cp:
            await cp.append("t", [{}])
            assert "pooler" not in cp.durability.settings


async def test_a_callers_pool_behind_a_pooler(
    pooler: PgBouncer, store: MakeStore
) -> None:
    """It is refused if it gives statements names; the error has the cure."""
    async with asyncpg.create_pool(pooler.url, min_size=0) as pool:
        with pytest.raises(BackendUnavailable, match="statement_cache_size=0") as told:
            async with store(pool):
                pass

    assert told.value.rejected
    unnamed = asyncpg.create_pool(pooler.url, min_size=0, statement_cache_size=0)

    async with unnamed as pool, store(pool) as cp:
        assert await cp.append("t", [{}]) == 1
        assert cp.durability.settings["pooler"] == "transaction"


async def test_a_setting_that_a_pooler_refuses(
    pooler: PgBouncer, store: MakeStore
) -> None:
    """The URL is told at once, and is not tried again."""
    with pytest.raises(BackendUnavailable, match="remove .* URL.*lock_timeout") as told:
        async with store(f"{pooler.url}?lock_timeout=99", connect_timeout=1000):
            pass

    assert told.value.rejected


@pytest.mark.parametrize(
    ("place", "words"),
    [("postgres@{}/nowhere", "does not exist"), ("stranger@{}/postgres", "failed")],
)
async def test_a_login_that_a_pooler_refuses(
    place: str, words: str, pooler: PgBouncer
) -> None:
    """No such database, no such user: told at once, as by the server itself."""
    url = f"postgresql://{place.format(f'127.0.0.1:{pooler.port}')}"

    with pytest.raises(BackendUnavailable, match=words) as told:
        async with Store(url, connect_timeout=1000):
            pass

    assert told.value.rejected


class OldServer(Proxy):
    """A relay that hides what a server before Postgres 14 does not tell."""

    async def pass_on(self, part: str, data: bytes, writer: Any) -> None:
        data = data.replace(b"in_hot_standby", b"no_hot_standby")
        await super().pass_on(part, data, writer)


async def test_an_old_server_behind_a_pooler(store: MakeStore) -> None:
    """asyncpg asks it whether it is the primary, by a statement that has a name."""
    async with store():
        pass

    with PgBouncer(shared_postgres(), size=1, ignored=SETTINGS) as pooler:
        await take_names(pooler)

        async with OldServer(pooler.url) as relay, store(relay.url) as cp:
            assert cp.durability.settings["pooler"] == "transaction"
            assert await cp.append("t", [{}]) == 1
