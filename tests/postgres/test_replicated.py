"""A primary and a synchronous standby: what a failover loses, and how it is found."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from conformance import ConformanceTests, Harness, Status, run_clause, select
from conformance.clause import Clause
from cpkit_postgres.options import next_host_first
from tests.postgres.conftest import MakeStore
from tests.servers.postgres import shared_postgres
from tests.servers.postgres_pair import PairHarness, PostgresPair

REPLICATED = select(["replicated"])


@pytest.fixture(scope="module")
def pair() -> Iterator[PostgresPair]:
    with PostgresPair() as pair:
        yield pair


@pytest.mark.long
class TestPair(ConformanceTests):
    """Nothing acknowledged is lost."""

    @pytest.fixture
    def harness(self, pair: PostgresPair) -> Harness:
        return PairHarness(f"{pair.url}?target_session_attrs=read-write", pair)

    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("clause", REPLICATED, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("may_lose", [False, True])
def test_an_asynchronous_standby_loses_writes(may_lose: bool) -> None:
    """A primary that commits alone while it is cut off is found, or counted."""
    (clause,) = select(ids=["replicated.leader-cut-off"])

    with PostgresPair({"synchronous_commit": "local"}) as pair:
        pair.may_lose = may_lose
        outcome = run_clause(clause, PairHarness(f"{pair.url}?connect_timeout=5", pair))

    if may_lose:
        assert outcome.status is Status.PASSED, outcome.reason
        assert outcome.acknowledged > outcome.lost > 0
    else:
        assert outcome.status is Status.FAILED
        assert "are lost" in outcome.seen


def test_the_next_host_comes_first() -> None:
    """Everything else in the URL stays as it is."""
    assert next_host_first("postgresql://u:p@a:1,b,[::1]:3/d?x=a,b") == (
        "postgresql://u:p@b,[::1]:3,a:1/d?x=a,b",
        3,
    )
    assert next_host_first("postgres:///d") == ("postgres:///d", 1)
    assert next_host_first("postgres://a,b") == ("postgres://b,a", 2)


async def test_a_host_that_does_not_answer_is_passed_over(
    store: MakeStore, url: str
) -> None:
    """A paused machine takes connections; the host behind it is found in time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        where = shared_postgres().replace("127.0.0.1", f"127.0.0.1:{port},127.0.0.1")

        async with store(where, connect_timeout=4) as cp:
            assert await asyncio.gather(*(cp.append(f"{n}", [{}]) for n in range(20)))
