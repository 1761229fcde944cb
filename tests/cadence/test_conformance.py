"""The wrapper passes the suite, with and without buffered messages."""

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
from tests.sweeps import sweep

CLAUSES = [one for one in all_clauses() if one.level in (Level.CORE, Level.OPTIONAL)]
# Of subjects that the wrapper hands on as they are: only `make test-long` runs them, in
# memory.
HANDED_ON = {"clock", "content", "damage", "ids", "limits", "sizes", "text", "threads"}
HANDED_ON |= {"typed", "values"}
BUFFERED = [one for one in CLAUSES if one.subject != "watch"]
SHORT = [one for one in BUFFERED if one.subject not in HANDED_ON]


@dataclass
class CadenceHarness(Harness):
    """A store behind the wrapper, which writes after ``messages`` messages."""

    url: str
    messages: int

    @property
    def shared(self) -> bool:  # type: ignore[override]  # depends on the cadence
        # Another handle does not see buffered messages.
        return self.messages == 1

    def elsewhere(self) -> Harness | None:
        return None if self.url.startswith("memory:") else self

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        return self._open(options)

    @asynccontextmanager
    async def _open(self, options: dict[str, Any]) -> AsyncIterator[Checkpointer[Any]]:
        mine = {name: options[name] for name in options.keys() - {"notify", "poll"}}

        async with (
            open_checkpointer(self.url, **options) as store,
            with_cadence(store, Cadence(self.messages), **mine) as buffered,
        ):
            yield buffered


class CadenceTests(ConformanceTests):
    """The levels with one handle: the wrapper's promises are for one handle."""

    rounds = ConformanceTests.rounds / 4

    @pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)


@pytest.mark.long
class TestStrictest(CadenceTests):
    """Without a buffer the wrapper behaves as the store."""

    @pytest.mark.parametrize(
        "clause",
        [one for one in CLAUSES if one.subject not in HANDED_ON],
        ids=lambda clause: clause.id,
    )
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)

    @pytest.fixture
    def harness(self) -> Harness:
        return CadenceHarness("memory://cadence", 1)


class TestBuffering(CadenceTests):
    """The handle that buffers messages keeps every promise as well.

    Watchers see a message when it is written: ``tests/watch`` checks that.
    """

    @pytest.mark.parametrize(
        "clause", sweep(BUFFERED, SHORT), ids=lambda clause: clause.id
    )
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)

    @pytest.fixture
    def harness(self) -> Harness:
        return CadenceHarness("memory://cadence", 50)


@pytest.mark.long
class TestBufferingOnDisk(CadenceTests):
    """The same on SQLite, which other processes share."""

    @pytest.mark.parametrize("clause", SHORT, ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        super().test_clause(clause, harness)

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return CadenceHarness(f"sqlite:///{tmp_path}/agent.db", 50)
