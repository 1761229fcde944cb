"""The example for MariaDB on a Galera cluster of three: every node takes writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from uuid import uuid4

import pytest

from conformance import Clause, ConformanceTests, Harness, select
from cpkit import open_checkpointer
from tests.servers.galera import GaleraCluster, GaleraHarness

pytestmark = pytest.mark.long

CLAUSES = select(
    ids=[
        "concurrent.append-and-extra-are-one",
        "concurrent.loads-are-snapshots",
        "concurrent.one-claims-a-key",
        "concurrent.one-deletes-or-appends",
        "concurrent.one-restores",
        "concurrent.one-takes-over",
        "concurrent.one-wins-a-version",
        "concurrent.opens-at-once",
        "linearizable.deleted-calls",
        "linearizable.deleted-threads",
        "linearizable.keys-at-one-instant",
        "linearizable.keys-in-handles",
        "linearizable.threads-at-one-instant",
        "linearizable.threads-in-handles",
        "replicated",
    ]
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[GaleraCluster]:
    try:
        cluster = GaleraCluster()
    except FileNotFoundError as exc:
        pytest.skip(f"needs {exc}")

    with cluster:
        yield cluster


class TestGalera(ConformanceTests):
    """The handles of a clause begin with different nodes."""

    rounds = ConformanceTests.rounds / 2

    @pytest.fixture
    def harness(self, cluster: GaleraCluster) -> Harness:
        return GaleraHarness(cluster.url(connect_timeout=10), cluster)

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)


@pytest.mark.timeout(300)
async def test_an_aborted_transaction_is_not_acknowledged(
    cluster: GaleraCluster,
) -> None:
    """Another node commits to the same thread while large appends are written.

    A large append has several statements. One that was aborted between two of them was
    acknowledged while all were sent at once.
    """
    thread_id = f"aborted-{uuid4().hex}"
    large = [{"text": "x" * 100_000}] * 30
    reached: list[int] = []
    patient = {"timeout": 200, "connect_timeout": 200}

    async def append(messages: list[dict[str, str]], times: int) -> None:
        cluster.opened += 1

        async with open_checkpointer(cluster.url(), **patient) as cp:
            for _ in range(times):
                version = await cp.append(thread_id, messages)
                reached.append(version)

    await asyncio.gather(append(large, 5), append([{}], 100), append([{}], 100))
    assert max(reached) == 5 * len(large) + 2 * 100
    assert len(set(reached)) == len(reached)
