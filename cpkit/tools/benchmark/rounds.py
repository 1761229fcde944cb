"""Run trials in turn, round by round, so that a disturbance affects all of them.

A figure is the median of the rounds' medians, in seconds per operation. Its spread is
the distance between the quartiles of the rounds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles

from cpkit.tools.benchmark.workloads import Trial

__all__ = ["Result", "interleaved"]


@dataclass
class Result:
    """The figures of a trial, or the ``error`` that makes them invalid.

    ``rounds`` has the median seconds per operation of each round. ``mean`` is over all
    operations of all rounds, so that it includes rare slow operations.
    """

    workload: str
    driver: str
    name: str
    kind: str
    rounds: list[float] = field(default_factory=list)
    mean: float = 0.0
    operations: int = 0
    error: str | None = None

    @property
    def median(self) -> float:
        return median(self.rounds)

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def spread(self) -> float:
        """The distance between the quartiles; 0 for a single round."""
        if len(self.rounds) < 2:
            return 0.0

        low, _, high = quantiles(self.rounds, n=4, method="inclusive")
        return high - low

    def add(self, took: Sequence[float]) -> None:
        """Add the operations of one round."""
        self.rounds.append(median(took))
        total = self.mean * self.operations + fmean(took) * len(took)
        self.operations += len(took)
        self.mean = total / self.operations


async def interleaved(
    trials: Sequence[Trial],
    rounds: int,
    tell: Callable[[Trial, str], None] | None = None,
) -> list[Result]:
    """Run the trials in turn, in another order each round, and check their effect.

    One more round runs first and is not counted. A trial that raises ends, with the
    error in its result; the others continue. ``tell`` is called before each step, with
    the trial and the name of the step.
    """
    results = [
        Result(
            trial.workload,
            trial.contender.driver,
            trial.contender.name,
            trial.contender.kind,
        )
        for trial in trials
    ]
    pairs = list(zip(trials, results, strict=True))

    async def step(trial: Trial, result: Result, number: int) -> None:
        if tell is not None:
            tell(trial, _name_of(number, rounds))

        try:
            if number == -2:
                await trial.prepare()
            elif number == rounds:
                await trial.check()
            else:
                gc.collect()
                took = await trial.measure()

                if number >= 0:
                    result.add(took)
        except Exception as exc:
            result.error = f"{type(exc).__name__}: {exc}"

    # Freezing keeps the collector from traversing one trial's objects in another
    # trial's time. A trial that measures the collector's time too needs it as usual.
    collector_counts = any(trial.collector_counts for trial in trials)

    try:
        for number in range(-2, rounds + 1):
            start = number % len(pairs) if pairs else 0

            for trial, result in pairs[start:] + pairs[:start]:
                if result.error is None:
                    await step(trial, result, number)

            if not collector_counts:
                gc.collect()
                gc.freeze()
    finally:
        gc.unfreeze()

    return results


def _name_of(number: int, rounds: int) -> str:
    named = {-2: "prepare", -1: "warm up", rounds: "check"}
    return named.get(number, f"round {number + 1} of {rounds}")
