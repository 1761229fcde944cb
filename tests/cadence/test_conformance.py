"""The wrapper held to the contract: at its strictest, and holding messages back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance import Clause, ConformanceTests, Harness, Level, all_clauses
from cpkit import Checkpointer, open_checkpointer
from cpkit.cadence import Cadence, with_cadence

CLAUSES = [one for one in all_clauses() if one.level in (Level.CORE, Level.OPTIONAL)]


@dataclass
class CadenceHarness(Harness):
    """A store behind the wrapper; ``messages`` is how many may be held back, plus 1."""

    url: str
    messages: int

    @property
    def shared(self) -> bool:  # type: ignore[override]  # a fact of the cadence
        # What one handle holds back another does not see.
        return self.messages == 1

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        return self._open(options)

    @asynccontextmanager
    async def _open(self, options: dict[str, Any]) -> AsyncIterator[Checkpointer[Any]]:
        async with (
            open_checkpointer(self.url, **options) as store,
            with_cadence(store, Cadence(self.messages), **options) as buffered,
        ):
            yield buffered


class CadenceTests(ConformanceTests):
    """The levels that ask one handle, which is what the wrapper makes a promise for."""

    @pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)


class TestStrictest(CadenceTests):
    """Nothing held back: the wrapper is the store."""

    @pytest.fixture(params=["memory", "sqlite"])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
        return CadenceHarness(_url(request.param, tmp_path), 1)


class TestHoldingBack(CadenceTests):
    """On the handle that holds messages back every promise is kept as well."""

    @pytest.fixture(params=["memory", "sqlite"])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
        return CadenceHarness(_url(request.param, tmp_path), 50)


def _url(store: str, folder: Path) -> str:
    return "memory://cadence" if store == "memory" else f"sqlite:///{folder}/agent.db"
