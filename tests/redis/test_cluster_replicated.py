"""What the failovers of a cluster lose, and that nothing else is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance import ConformanceTests, Harness, Status, run_clause, select
from conformance.clause import Clause
from conformance.failure import Failure
from tests.servers.redis_cluster import ClusterHarness, ClusterNodes, RedisCluster

REPLICATED = select(["replicated"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterHarness]:
    with RedisCluster(node_timeout=1.0, links=True) as started:
        yield ClusterHarness(started.url(connect_timeout=10), started)


@pytest.mark.long
class TestCluster(ConformanceTests):
    """Only writes around a fault are lost, and no key has two holders otherwise."""

    @pytest.fixture
    def harness(self, cluster: Harness) -> Harness:
        return cluster

    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("clause", REPLICATED, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("may_lose", [False, True])
def test_a_primary_that_is_cut_off_loses_writes(
    cluster: ClusterHarness, monkeypatch: pytest.MonkeyPatch, may_lose: bool
) -> None:
    """It acknowledges some until it gives up: they are counted, or found."""
    monkeypatch.setattr(ClusterNodes, "may_lose", may_lose)
    (clause,) = select(ids=["replicated.leader-cut-off"])
    outcome = run_clause(clause, cluster)

    if may_lose:
        assert outcome.status is Status.PASSED, outcome.reason
        assert outcome.acknowledged > outcome.lost > 0
    else:
        # Writes that are lost, or claims of one key by both sides.
        assert isinstance(outcome.error, Failure), outcome.reason
