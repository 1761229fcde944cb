"""Waiting for others and for answers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from random import Random

import pytest

from cpkit import BackendUnavailable
from cpkit.patience import Backoff, asked_again
from tests.simulation.loop import simulated_loop

LOST = BackendUnavailable("test", "answer lost", maybe_applied=True)
AWAY = BackendUnavailable("test", "refused")
BACKOFF = Backoff(0.5, 1.0, lambda: 1.0)


def asked(answers: Iterable[object], *, insist: bool = False) -> tuple[object, float]:
    """Ask for 10 virtual seconds at most; return the answer, and when it came."""
    left = iter(answers)

    async def operation() -> object:
        answer = next(left, AWAY)

        if isinstance(answer, Exception):
            raise answer

        return answer

    async def main() -> tuple[object, float]:
        answer = await asked_again(operation, BACKOFF, 10.0, insist=insist)
        return answer, asyncio.get_running_loop().time()

    return simulated_loop(Random(0)).run(main())


def test_a_lost_answer_is_asked_for_until_it_comes() -> None:
    """Also while the store is away in between: what it did is still to be learned."""
    assert asked([LOST, LOST, "done"]) == ("done", 1.5)
    assert asked([LOST, AWAY, AWAY, "done"]) == ("done", 2.5)


def test_an_operation_that_never_ran_is_not_repeated() -> None:
    """That is the caller's to decide, unless it insists."""
    with pytest.raises(BackendUnavailable) as refused:
        asked([AWAY, "done"])

    assert not refused.value.maybe_applied
    assert asked([AWAY, "done"], insist=True) == ("done", 0.5)


@pytest.mark.parametrize("answers", [[LOST] * 99, [LOST], [AWAY, LOST]])
def test_patience_ends_and_does_not_forget(answers: list[object]) -> None:
    """What may have been applied is not denied because the last try was refused."""
    with pytest.raises(BackendUnavailable) as lost:
        asked(answers, insist=True)

    assert lost.value.maybe_applied
