"""Running a clause: outcomes, deadlines, and the facts of a failure."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import pytest

from conformance import (
    Clause,
    FactoryHarness,
    Level,
    Status,
    URLHarness,
    run_clause,
    runner,
)
from conformance.case import Case, raises
from conformance.clause import Check
from conformance.failure import Failure
from conformance.runner import GRACE, Patience
from conformance.slowdown import VARIABLE, slowdown
from cpkit import ListsThreads, MemoryCheckpointer, VersionConflict

MEMORY = URLHarness("memory://runner")


def made(check: Check, *needs: Any, deadline: float = 5) -> Clause:
    return Clause("a.b", "It holds.", Level.CORE, needs, deadline, check)


class Plain:
    """A store with only the six methods."""

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


def test_a_missing_protocol_is_unsupported() -> None:
    """A clause is unsupported if the store lacks its protocol."""

    async def check(case: Case) -> None:
        raise AssertionError("must not run")

    outcome = run_clause(made(check, ListsThreads), PLAIN)
    assert outcome.status is Status.UNSUPPORTED
    assert "ListsThreads" in outcome.reason


def test_a_missing_ability_is_skipped() -> None:
    """A clause is skipped, with the reason, if the harness lacks its ability."""

    async def check(case: Case) -> None:
        raise AssertionError("must not run")

    outcome = run_clause(made(check, "server"), MEMORY)
    assert outcome.status is Status.SKIPPED
    assert "server" in outcome.reason


def test_a_clause_can_skip_itself() -> None:
    """A check can skip after the store is open."""

    async def check(case: Case) -> None:
        case.skip("the store is too old")

    outcome = run_clause(made(check), MEMORY)
    assert (outcome.status, outcome.reason) == (Status.SKIPPED, "the store is too old")


def test_a_store_that_waits_forever_fails() -> None:
    """A clause that waits is cancelled at its deadline, and reports the line."""
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
    assert outcome.expected == f"an end within {0.1 * slowdown():g} s"
    assert "never" in outcome.where
    assert ended.is_set()


@pytest.mark.parametrize("is_async", [True, False])
def test_a_deadline_grows_with_the_load(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that becomes busy while a clause runs makes none fail."""
    monkeypatch.setenv(VARIABLE, "1")
    slowdown.cache_clear()

    async def check(case: Case) -> None:
        os.environ[VARIABLE] = "900"

        while slowdown() < 900:  # noqa: ASYNC110  # measured after the deadline
            await asyncio.sleep(0.01)

    def check_in_its_own_loop(case: Case) -> None:
        asyncio.run(check(case))

    try:
        one = made(check if is_async else check_in_its_own_loop, deadline=0.1)
        assert run_clause(one, MEMORY).status is Status.PASSED
    finally:
        slowdown.cache_clear()


class Hanging(MemoryCheckpointer[Any]):
    """Answers no load."""

    async def load(self, thread_id: str) -> Any:
        await asyncio.Event().wait()


class HangingRead(MemoryCheckpointer[Any]):
    """Answers no read of a key, and all else."""

    async def find_completed(self, idempotency_key: str) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("store", "reason"),
    [("Hanging", "not run: the store hangs since a.b"), ("HangingRead", "not decided")],
)
def test_a_store_that_hangs_costs_one_deadline(
    store: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later clauses are skipped: at once, or after a short time where some work."""
    monkeypatch.setattr(runner, "HURRIED", 0.1)
    begun = []

    async def hangs(case: Case) -> None:
        begun.append("hangs")
        await case.cp.load(case.id())
        await case.cp.find_completed(case.id())

    async def works(case: Case) -> None:
        begun.append("works")
        assert await case.cp.append(case.id(), [{}]) == 1

    harness, patience = FactoryHarness(f"{__name__}:{store}"), Patience()
    first, second, third = (
        run_clause(made(check, deadline=deadline), harness, patience=patience)
        for check, deadline in ((hangs, 0.2), (hangs, 300), (works, 300))
    )
    assert first.status is Status.FAILED
    assert second.status is Status.SKIPPED
    assert second.reason.startswith(reason)

    if store == "Hanging":
        assert third.status is Status.SKIPPED
        assert begun == ["hangs"]
    else:
        assert third.status is Status.PASSED


def test_a_store_that_resists_cancellation_fails() -> None:
    """The runner cancels again until the clause ends."""
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
    """The thread of a blocked event loop is abandoned, and its line is reported."""
    monkeypatch.setattr("conformance.runner.GRACE", GRACE / 30)
    freed = threading.Event()

    async def check(case: Case) -> None:
        freed.wait(20)

    outcome = run_clause(made(check, deadline=0.1), MEMORY)
    freed.set()
    assert outcome.status is Status.FAILED
    assert "wait" in outcome.where


def test_an_error_is_a_failure() -> None:
    """An unexpected exception is reported with its type."""

    async def check(case: Case) -> None:
        raise KeyError("oops")

    outcome = run_clause(made(check), MEMORY)
    assert outcome.status is Status.FAILED
    assert outcome.expected == "no error"
    assert "KeyError: 'oops'" in outcome.seen


def test_a_missing_error_is_reported() -> None:
    """The failure names the expected error and the reason."""

    async def check(case: Case) -> None:
        with raises(VersionConflict, "a stale version"):
            await case.cp.load(case.id())

    outcome = run_clause(made(check), MEMORY)
    assert outcome.expected == "VersionConflict for a stale version"
    assert outcome.seen == "no error"


def test_random_choices_depend_on_the_seed() -> None:
    """The same seed gives the same choices; ids are always fresh."""
    seen: list[tuple[float, str]] = []

    async def check(case: Case) -> None:
        seen.append((case.random.random(), case.id()))

    for seed in (1, 1, 2):
        run_clause(made(check), MEMORY, seed=seed)

    choices, ids = zip(*seen, strict=True)
    assert choices[0] == choices[1] != choices[2]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, GeneratorExit])
def test_a_store_that_raises_what_ends_a_program_fails(
    error: type[BaseException],
) -> None:
    """The clause fails, and the run continues."""

    async def check(case: Case) -> None:
        raise error

    outcome = run_clause(made(check), MEMORY)
    assert outcome.status is Status.FAILED
    assert outcome.seen.startswith(error.__name__)


def test_a_failure_keeps_what_was_counted() -> None:
    """A clause that fails in a failover has lost most."""

    async def check(case: Case) -> None:
        case.acknowledged, case.lost = 10, 3
        raise Failure("all of them", "7")

    outcome = run_clause(made(check), MEMORY)
    assert (outcome.status, outcome.acknowledged, outcome.lost) == ("failed", 10, 3)


def test_an_error_near_the_deadline_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To look whether handles share a store takes time that the clause has not."""
    monkeypatch.setattr("conformance.runner.GRACE", 0.2)

    class Slow(URLHarness):
        opened = 0

        def open(self, **options: Any) -> Any:
            Slow.opened += 1

            if Slow.opened > 2:
                time.sleep(1)

            return super().open(**options)

    async def check(case: Case) -> None:
        async with case.open():
            raise Failure("two", "three")

    outcome = run_clause(made(check, "handles", deadline=0.1), Slow("memory://near"))
    assert (outcome.expected, outcome.seen) == ("two", "three")
