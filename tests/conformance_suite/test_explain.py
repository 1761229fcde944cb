"""A failure's facts: what was expected, what was seen, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance import Clause, Failure, Level, Outcome, Status, URLHarness, run_clause
from conformance.case import Case
from cpkit.driver import handle_over
from cpkit.memory import MemoryStore


def failed(check: Callable[[Case], Any]) -> Outcome:
    """Return the outcome of a check that fails."""
    clause = Clause("a.b", "It holds.", Level.CORE, (), 5, check)
    outcome = run_clause(clause, URLHarness("memory://explain"))
    assert outcome.status is Status.FAILED
    return outcome


def test_an_assert_gives_its_text_and_its_values() -> None:
    """A plain assert is expected as it is written; its variables are what was seen."""

    async def check(case: Case) -> None:
        version = await case.cp.append(case.id(), [{"n": 1}])
        assert version == 2

    outcome = failed(check)
    assert outcome.expected == "version == 2"
    assert outcome.seen == "version = 1"
    assert outcome.where.splitlines()[-1].startswith(f"{__file__}:")


def test_the_message_of_an_assert_says_where() -> None:
    """An assert in a loop says in its message which round failed."""

    async def check(case: Case) -> None:
        for n in range(3):
            assert n < 2, f"round {n}"

    outcome = failed(check)
    assert outcome.expected == "n < 2"
    assert outcome.seen == "n = 2"
    assert outcome.where.startswith("round 2\n")


def test_a_check_can_name_the_facts() -> None:
    """A raised `Failure` is reported field by field, whatever its texts contain."""

    async def check(case: Case) -> None:
        raise Failure("a, seen b", "c, seen d", "e")

    outcome = failed(check)
    facts = (outcome.expected, outcome.seen, outcome.where)
    assert facts == ("a, seen b", "c, seen d", "e")
    assert isinstance(outcome.error, Failure)


def test_a_failure_without_a_place_gets_one() -> None:
    """A `Failure` that does not say where is placed at the line that raised it."""

    async def check(case: Case) -> None:
        raise Failure("a", "b")

    assert failed(check).where.startswith(f"{__file__}:")


def test_an_assertion_inside_the_store_is_an_error() -> None:
    """A store's own failed assert is not mistaken for an expectation of the clause."""

    async def check(case: Case) -> None:
        exec(compile("assert 1 == 2, 'broken pool'", "store.py", "exec"))

    outcome = failed(check)
    assert outcome.expected == "no error"
    assert outcome.seen == "AssertionError: broken pool"
    assert outcome.where == "store.py:1 in <module>"


DRIVER = """
from cpkit.driver import StoreFailure


def fail(*args):
    try:
        raise OSError("disk 7")
    except OSError as exc:
        raise StoreFailure("rejected", str(exc)) from exc
"""


def _broken_driver() -> Any:
    """Return a function of a driver's file that fails as a store does."""
    names: dict[str, Any] = {}
    exec(compile(DRIVER, "/their/store.py", "exec"), names)
    return names["fail"]


def test_the_line_of_the_driver_comes_first() -> None:
    """The kit raises its error elsewhere, of the one that the driver raised."""
    fail = _broken_driver()

    async def check(case: Case) -> None:
        store: Any = MemoryStore()
        store.commit = fail

        async with handle_over(store) as cp:
            await cp.append("t", [{}])

    outcome = failed(check)
    first, *others = outcome.where.splitlines()
    assert first == "/their/store.py:7 in fail"
    assert "disk 7" in outcome.seen
    assert all("cpkit" in line for line in others)


def test_errors_that_only_their_number_tells_are_shown() -> None:
    """Answers that are not in the assert, each different error once, with its line."""
    fail = _broken_driver()

    async def check(case: Case) -> None:
        answers: list[object] = [1, None]

        for _ in range(4):
            try:
                fail()
            except Exception as exc:
                answers.append(exc)

        lost = len(answers)
        assert lost == 2

    outcome = failed(check)
    assert outcome.seen.splitlines() == [
        "lost = 6",
        "4 of answers: StoreFailure: disk 7 (rejected)",
        "  /their/store.py:7 in fail",
    ]
