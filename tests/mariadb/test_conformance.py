"""The example for MariaDB keeps the contract, clause by clause."""

from __future__ import annotations

import pytest

from conformance import Clause, ConformanceTests, Harness, Level, all_clauses, select
from tests.servers.mariadb import MariaDBHarness, MariaDBServer
from tests.sweeps import sweep

CLAUSES = [one for one in all_clauses() if one.level is not Level.REPLICATED]
# The rest is for `make test-long`.
QUICK = select(ids=["append", "claim"])


class TestMariaDB(ConformanceTests):
    rounds = ConformanceTests.rounds / 4

    @pytest.fixture
    def harness(self, server: MariaDBServer) -> Harness:
        return MariaDBHarness(f"{server.url}?connect_timeout=3", server)

    @pytest.mark.parametrize(
        "clause", sweep(CLAUSES, QUICK), ids=lambda clause: clause.id
    )
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)
