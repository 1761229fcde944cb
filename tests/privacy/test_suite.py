"""An encrypted handle keeps the contract on every store.

SQLite has every clause but the slow ones, which look at files and syncs; the other
stores have those in which the encryption has a part: values, places, and writers that
come first. ``make certificates`` certifies an encrypted SQLite store whole. Handles of
all processes get the keyring from the environment. In memory the same clauses, and
those about calls that are erased, hold where idempotency keys are hashed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance import Clause, Harness, URLHarness, select
from cpkit.keyring import add_key
from tests.sweeps import sweep
from tests.test_conformance import QUICK, Short, files, postgres, redis

__all__ = ["files", "postgres", "redis"]  # fixtures

# What `make test` runs, in memory: the clauses in which the encryption does most.
SHORT = select(ids=["append", "claim", "find", "move", "trim"])
# Where idempotency keys are hashed, and what `make test` runs of it.
HASHED = select(ids=["append", "claim", "content", "erase", "find", "model", "move"])
ERASED = select(ids=["append.expected-version-of-any-size", "erase.receipts-stay"])
PART = [*SHORT, *select(ids=["content", "linearizable", "text"])]


@pytest.fixture(scope="module", autouse=True)
def _keyring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = tmp_path_factory.mktemp("keyring") / "ring.json"
    add_key(place, name="conformance")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPKIT_KEYRING", str(place))
        yield


class Part(Short):
    @pytest.mark.parametrize("clause", PART, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)


class TestMemory(Part):
    @pytest.mark.parametrize(
        "clause",
        sweep([*PART, *select(ids=["model"])], SHORT),
        ids=lambda clause: clause.id,
    )
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)

    @pytest.fixture
    def harness(self) -> Harness:
        return URLHarness("memory://encrypted")


class TestHashedKeys(Part):
    @pytest.fixture(autouse=True)
    def _hashed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        add_key(tmp_path / "ring.json", name="conformance", hash_keys=True)
        monkeypatch.setenv("CPKIT_KEYRING", str(tmp_path / "ring.json"))

    @pytest.mark.parametrize(
        "clause", sweep(HASHED, ERASED), ids=lambda clause: clause.id
    )
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return URLHarness(f"memory://{tmp_path.name}")


@pytest.mark.long
class TestSQLite(Short):
    @pytest.mark.parametrize("clause", QUICK, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return URLHarness(f"sqlite:///{tmp_path}/agent.db")


@pytest.mark.long
class TestFile(Part):
    @pytest.fixture
    def harness(self, files: Iterator[Harness]) -> Harness:
        return next(files)


@pytest.mark.long
class TestPostgres(Part):
    @pytest.fixture
    def harness(self, postgres: Harness) -> Harness:
        return postgres


@pytest.mark.long
class TestRedis(Part):
    @pytest.fixture
    def harness(self, redis: Harness) -> Harness:
        return redis
