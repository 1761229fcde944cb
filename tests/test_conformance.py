"""Every store of this repository passes every clause of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncpg
import pytest
from redis.asyncio import Redis

from conformance import (
    Clause,
    ConformanceTests,
    Harness,
    Level,
    Status,
    URLHarness,
    all_clauses,
    run_clause,
    select,
)
from tests.servers.harness import ServerHarness
from tests.servers.in_folder import PostgresInFolder, RedisInFolder, on_a_free_port
from tests.servers.postgres import PostgresServer, shared_postgres
from tests.servers.redis import RedisServer, redis_binary, shared_redis
from tests.servers.redis_cluster import ClusterHarness, RedisCluster
from tests.stores import memory
from tests.sweeps import sweep


class PostgresHarness(ServerHarness):
    server: PostgresServer

    async def in_folder(self, folder: str) -> Harness:
        url = on_a_free_port(self.url)
        return PostgresInFolder(url, folder, self.server.settings)

    async def gather_statistics(self) -> None:
        connection = await asyncpg.connect(self.server.url)

        try:
            await connection.execute("ANALYZE")
        finally:
            await connection.close()

    async def connections(self) -> int:
        connection = await asyncpg.connect(self.server.url)

        try:
            count = await connection.fetchval(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
            return int(count)
        finally:
            await connection.close()

    async def bytes_written(self) -> int:
        connection = await asyncpg.connect(self.server.url)

        try:
            position = await connection.fetchval(
                "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')"
            )
            return int(position)
        finally:
            await connection.close()


class RedisHarness(ServerHarness):
    server: RedisServer

    async def in_folder(self, folder: str) -> Harness:
        settings = {"appendfsync": self.server.appendfsync}
        return RedisInFolder(on_a_free_port(self.url), folder, settings)

    async def connections(self) -> int:
        async with Redis.from_url(self.server.url) as client:
            return len(await client.client_list()) - 1

    async def bytes_written(self) -> int:
        async with Redis.from_url(self.server.url) as client:
            info = await client.info("persistence")
            return int(info["aof_current_size"])


@pytest.fixture(scope="module")
def postgres() -> Iterator[Harness]:
    """Start a private server; without Postgres binaries, use the shared server."""
    try:
        server = PostgresServer()
    except FileNotFoundError:
        yield URLHarness(shared_postgres(schema="conformance"))
        return

    with server:
        # Each connection prepares its statements again.
        url = f"{server.url}?connect_timeout=3&pool_size=3"
        yield PostgresHarness(url, server)


@pytest.fixture(scope="module")
def redis() -> Iterator[Harness]:
    try:
        server = RedisServer()
    except FileNotFoundError:
        yield URLHarness(shared_redis(prefix="conformance"))
        return

    with server:
        yield RedisHarness(f"{server.url}?connect_timeout=3", server)


@pytest.fixture(scope="module")
def redis_cluster() -> Iterator[Harness]:
    try:
        redis_binary()
    except FileNotFoundError:
        pytest.skip("needs a redis-server")

    with RedisCluster() as cluster:
        yield ClusterHarness(cluster.url(connect_timeout=10), cluster)


LESS = ["linearizable.threads-in-processes", "linearizable.keys-in-processes"]
"""Clauses that find less than their kin ``at-one-instant`` does: `Sweeps` run them."""

CLAUSES = [clause for clause in all_clauses() if clause.id not in LESS]

SLOW = {
    *select(ids=["bounded", "faults", "powerloss", "kill.every-write-is-whole"]),
    *select(ids=["cancel.hundreds-on-one-handle", "wire.lost-answers-are-told"]),
    *select(ids=["cancel.close-waits", "limits.holds-what-it-states"]),
} - {*select(ids=["bounded.append-calls", "powerloss.acknowledged-survives"])}
"""Clauses that take seconds each: only `make test-long` runs them."""

QUICK = [clause for clause in CLAUSES if clause not in SLOW]


class Short(ConformanceTests):
    """The clauses that repeat do so an eighth as often: `Sweeps` repeat more."""

    rounds = ConformanceTests.rounds / 8

    @pytest.mark.parametrize(
        "clause", sweep(CLAUSES, QUICK), ids=lambda clause: clause.id
    )
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)


class Server(Short):
    """Without power losses, for which a server starts again and again."""

    @pytest.mark.parametrize(
        "clause",
        sweep([one for one in CLAUSES if one.level is not Level.POWERLOSS], QUICK),
        ids=lambda clause: clause.id,
    )
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)


class TestMemory(Short):
    """All handles of the process share one store."""

    @pytest.fixture
    def harness(self) -> Harness:
        return URLHarness("memory://conformance")


@pytest.mark.long
class TestAnonymousMemory(Short):
    """Each handle has its own store."""

    @pytest.fixture
    def harness(self) -> Harness:
        return URLHarness("memory://")


class TestSQLite(Short):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return URLHarness(f"sqlite:///{tmp_path}/agent.db")


@pytest.mark.long
class TestSQLiteInMemory(Short):
    @pytest.fixture
    def harness(self) -> Harness:
        return URLHarness("sqlite:///:memory:")


@pytest.fixture(scope="module")
def files() -> Iterator[Iterator[Harness]]:
    """A new store for every tenth clause, because each list reads all names in it."""
    with TemporaryDirectory(prefix="cpkit-", dir=memory()) as folder:
        yield (URLHarness(f"file://{folder}/{number // 10}") for number in count())


class TestFile(Short):
    @pytest.fixture
    def harness(
        self, clause: Clause, files: Iterator[Harness], tmp_path: Path
    ) -> Harness:
        """A store in memory promises less, so what is durable is asked of a disk."""
        if clause.level in (Level.DURABLE, Level.POWERLOSS):
            return URLHarness(f"file://{tmp_path}/store")

        return next(files)


class TestPostgres(Server):
    @pytest.fixture
    def harness(self, postgres: Harness) -> Harness:
        return postgres


@pytest.mark.long
def test_postgres_plans_with_few_threads(postgres: Harness) -> None:
    """The planner scans the table only where it knows of few threads: a new schema."""
    if not isinstance(postgres, PostgresHarness):
        pytest.skip("statistics of the shared server are not this test's")

    (clause,) = select(ids=["bounded.load-beside-huge"])
    url = f"{postgres.server.url}?schema=few_threads"
    outcome = run_clause(clause, PostgresHarness(url, postgres.server))
    assert outcome.status is Status.PASSED, outcome.reason


class TestRedis(Server):
    @pytest.fixture
    def harness(self, redis: Harness) -> Harness:
        return redis


@pytest.fixture(scope="module")
def redis_always() -> Iterator[Harness]:
    """Start a Redis server that syncs before it answers."""
    try:
        server = RedisServer(appendfsync="always")
    except FileNotFoundError:
        pytest.skip("needs a redis-server")

    with server:
        yield RedisHarness(f"{server.url}?connect_timeout=3", server)


POWERLOSS = [
    clause
    for clause in select(levels=["powerloss"])
    if clause.id != "powerloss.failed-sync"
]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("clause", POWERLOSS, ids=lambda clause: clause.id)
@pytest.mark.parametrize("store", ["redis_always", "postgres"])
def test_a_server_that_syncs_survives_a_power_loss(
    store: str, clause: Clause, request: pytest.FixtureRequest
) -> None:
    """The server starts on what a disk may hold, and has all that was acknowledged."""
    harness = request.getfixturevalue(store)

    if not isinstance(harness, ServerHarness):
        pytest.skip("the folder of the shared server is unknown")

    outcome = run_clause(clause, harness, rounds=ConformanceTests.rounds)
    assert outcome.status is Status.PASSED, outcome.reason


def test_redis_survives_a_power_loss(redis_always: Harness) -> None:
    """The same in short, for the server that starts quickly."""
    (clause,) = select(ids=["powerloss.acknowledged-survives"])
    outcome = run_clause(clause, redis_always, rounds=0.25)
    assert outcome.status is Status.PASSED, outcome.reason


WITHOUT_MACHINE = ["powerloss.kill-at-every-call", "powerloss.one-holder"]
"""What a store keeps that promises to survive a kill only."""


@pytest.mark.long
def test_redis_that_syncs_late_survives_a_kill(redis: Harness) -> None:
    """Every second is too late for a power loss; the certificate counts the losses.

    Redis keeps acknowledged writes in its memory while its disk stalls in a sync, and
    says so. Under strace on a busy machine that happens, so it has three tries.
    """
    for clause in select(levels=["powerloss"]):
        outcome = run_clause(clause, redis)

        for _ in range(2):
            if outcome.status is Status.FAILED:
                outcome = run_clause(clause, redis)

        if clause.id in WITHOUT_MACHINE:
            assert outcome.status is Status.PASSED, outcome.reason
        else:
            assert outcome.status is Status.SKIPPED, outcome.reason
            assert "promises process, not machine" in outcome.reason


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_minute_passes_on_redis(redis: Harness) -> None:
    """The one engine here that can expire a key; two rounds wait for a real minute."""
    [clause] = select(ids=["clock.nothing-expires"])
    outcome = run_clause(clause, redis, rounds=2)
    assert outcome.status is Status.PASSED, outcome.reason


@pytest.mark.long
def test_a_store_that_does_not_sync_keeps_one_holder(tmp_path: Path) -> None:
    """With ``durability=normal`` a power loss takes writes, and no key gets two."""
    harness = URLHarness(f"sqlite:///{tmp_path}/agent.db?durability=normal")

    for clause in select(ids=WITHOUT_MACHINE):
        outcome = run_clause(clause, harness)
        assert outcome.status is Status.PASSED, outcome.reason


# Values, ids and answers are those of one server: `tests/redis/test_cluster.py` tries
# random writes and hostile ids.
CLUSTERED = [
    one
    for one in CLAUSES
    if one.level in (Level.CONCURRENT, Level.DURABLE, Level.BOUNDED, Level.REPLICATED)
    or one.subject in ("append", "cancel", "claim", "handle", "move", "trim", "watch")
]


@pytest.mark.long
class TestRedisCluster(Server):
    @pytest.mark.parametrize("clause", CLUSTERED, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)

    @pytest.fixture
    def harness(self, redis_cluster: Harness) -> Harness:
        return redis_cluster


SWEEPS = select(
    ids=[
        "kill",
        "linearizable",
        "server.claims-survive",
        "server.writes-survive",
    ]
)


class Sweeps(ConformanceTests):
    """SIGKILL and linearizability, as long as for a certificate."""

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("clause", SWEEPS, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)


@pytest.mark.long
class TestSQLiteSweeps(Sweeps):
    harness = TestSQLite.harness


@pytest.mark.long
class TestFileSweeps(Sweeps):
    harness = TestFile.harness


@pytest.mark.long
class TestPostgresSweeps(Sweeps):
    harness = TestPostgres.harness


@pytest.mark.long
class TestRedisSweeps(Sweeps):
    harness = TestRedis.harness


@pytest.mark.long
class TestRedisClusterSweeps(Sweeps):
    harness = TestRedisCluster.harness
