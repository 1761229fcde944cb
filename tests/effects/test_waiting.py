"""Retrying operations whose answer was lost, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain, repeat
from random import Random

import pytest

from cpkit import BackendUnavailable
from cpkit.runs.waiting import retry_unclear
from tests.simulation.loop import simulated_loop

LOST = BackendUnavailable("test", "answer lost", maybe_applied=True)
REFUSED = BackendUnavailable("test", "refused")


@pytest.fixture(autouse=True)
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each pause be as long as it may be, so that times are exact."""
    monkeypatch.setattr(
        "cpkit.runs.waiting.backoff_pauses", lambda: chain([0.5], repeat(1.0))
    )


def retried(
    answers: Iterable[object], *, retry_rejected: bool = False
) -> tuple[object, float]:
    """Retry for at most 10 virtual seconds; return the answer and the time it took."""
    left = iter(answers)

    async def operation() -> object:
        answer = next(left, REFUSED)

        if isinstance(answer, Exception):
            raise answer

        return answer

    async def main() -> tuple[object, float]:
        answer = await retry_unclear(operation, 10.0, retry_rejected=retry_rejected)
        return answer, asyncio.get_running_loop().time()

    return simulated_loop(Random(0)).run(main())


def test_an_operation_with_a_lost_answer_is_retried_until_it_is_answered() -> None:
    """A refused retry does not end this, because the first try may have run."""
    assert retried([LOST, LOST, "done"]) == ("done", 1.5)
    assert retried([LOST, REFUSED, REFUSED, "done"]) == ("done", 2.5)


def test_an_operation_that_did_not_run_is_retried_only_on_request() -> None:
    """By default the caller decides whether to try again."""
    with pytest.raises(BackendUnavailable) as refused:
        retried([REFUSED, "done"])

    assert not refused.value.maybe_applied
    assert retried([REFUSED, "done"], retry_rejected=True) == ("done", 0.5)


@pytest.mark.parametrize("answers", [[LOST] * 99, [LOST], [REFUSED, LOST]])
def test_after_the_timeout_the_error_still_says_maybe_applied(
    answers: list[object],
) -> None:
    """A last try that was refused does not prove that an earlier one did not run."""
    with pytest.raises(BackendUnavailable) as lost:
        retried(answers, retry_rejected=True)

    assert lost.value.maybe_applied
