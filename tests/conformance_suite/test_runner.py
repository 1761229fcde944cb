"""Running a clause: outcomes, deadlines, and what is said of a failure."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from conformance import Clause, FactoryHarness, Level, Status, URLHarness, run_clause
from conformance.case import Case, raises
from conformance.clause import Check
from conformance.runner import GRACE
from cpkit import ListsThreads, MemoryCheckpointer, VersionConflict

MEMORY = URLHarness("memory://runner")


def made(check: Check, *needs: Any, deadline: float = 5) -> Clause:
    return Clause("a.b", "It holds.", Level.CORE, needs, deadline, check)


class Plain:
    """The six methods and no more."""

    def __init__(self, **options: Any) -> None:
        self._inner = MemoryCheckpointer[Any](**options)
        self.load = self._inner.load
        self.append = self._inner.append
        self.save_extra = self._inner.save_extra
        self.record_issued = self._inner.record_issued
        self.record_result = self._inner.record_result
        self.find_completed = self._inner.find_completed

    async def __aenter__(self) -> Plain:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._inner.aclose()


PLAIN = FactoryHarness(f"{__name__}:Plain")


def test_a_clause_that_holds_passes() -> None:
    """The check runs with an open store."""

    async def check(case: Case) -> None:
        assert await case.cp.append(case.id(), [{"n": 1}]) == 1

    assert run_clause(made(check), MEMORY).status is Status.PASSED


def test_what_a_store_does_not_declare_is_unsupported() -> None:
    """An optional protocol that is not there makes no failure."""

    async def check(case: Case) -> None:
        raise AssertionError("not asked")

    outcome = run_clause(made(check, ListsThreads), PLAIN)
    assert outcome.status is Status.UNSUPPORTED
    assert "ListsThreads" in outcome.reason


def test_what_a_harness_cannot_do_is_skipped() -> None:
    """An ability that the harness lacks makes no failure, and the reason is told."""

    async def check(case: Case) -> None:
        raise AssertionError("not asked")

    outcome = run_clause(made(check, "server"), MEMORY)
    assert outcome.status is Status.SKIPPED
    assert "server" in outcome.reason


def test_a_clause_can_skip_itself() -> None:
    """What shows only when the store is open can still be a reason to skip."""

    async def check(case: Case) -> None:
        case.skip("no moon tonight")

    outcome = run_clause(made(check), MEMORY)
    assert (outcome.status, outcome.reason) == (Status.SKIPPED, "no moon tonight")


def test_a_store_that_waits_for_ever_fails() -> None:
    """A clause that waits is cancelled at its deadline, and says where it waited."""
    ended = threading.Event()

    async def never() -> None:
        await asyncio.Event().wait()

    async def check(case: Case) -> None:
        try:
            await never()
        finally:
            ended.set()

    outcome = run_clause(made(check, deadline=0.1), MEMORY)
    assert outcome.status is Status.FAILED
    assert outcome.expected == "an end within 0.1 s"
    assert "never" in outcome.where
    assert ended.is_set()


def test_a_store_that_resists_cancellation_fails() -> None:
    """One cancellation may be lost; the run goes on all the same."""
    lost = 0

    async def check(case: Case) -> None:
        nonlocal lost

        while lost < 3:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                lost += 1

    outcome = run_clause(made(check, deadline=0.1), MEMORY)
    assert outcome.status is Status.FAILED
    assert lost == 3


def test_a_store_that_blocks_the_loop_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocked event loop is left behind in its thread, and said where it is."""
    monkeypatch.setattr("conformance.runner.GRACE", GRACE / 30)
    freed = threading.Event()

    async def check(case: Case) -> None:
        freed.wait(20)

    outcome = run_clause(made(check, deadline=0.1), MEMORY)
    freed.set()
    assert outcome.status is Status.FAILED
    assert "wait" in outcome.where


def test_an_error_is_a_failure() -> None:
    """What a store raises and should not is told with its type."""

    async def check(case: Case) -> None:
        raise KeyError("oops")

    outcome = run_clause(made(check), MEMORY)
    assert outcome.status is Status.FAILED
    assert outcome.expected == "no error"
    assert "KeyError: 'oops'" in outcome.seen


def test_an_error_expected_and_not_raised_is_told() -> None:
    """The report says which error, and for what."""

    async def check(case: Case) -> None:
        with raises(VersionConflict, "a stale version"):
            await case.cp.load(case.id())

    outcome = run_clause(made(check), MEMORY)
    assert outcome.expected == "VersionConflict for a stale version"
    assert outcome.seen == "no error"


def test_chance_comes_from_the_seed() -> None:
    """The same seed gives the same chance, ids are fresh always."""
    seen: list[tuple[float, str]] = []

    async def check(case: Case) -> None:
        seen.append((case.random.random(), case.id()))

    for seed in (1, 1, 2):
        run_clause(made(check), MEMORY, seed=seed)

    chances, ids = zip(*seen, strict=True)
    assert chances[0] == chances[1] != chances[2]
    assert len(set(ids)) == 3
