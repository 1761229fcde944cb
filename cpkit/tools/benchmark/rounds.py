"""Rounds in which trials take turns, so that what disturbs one disturbs all.

A figure is the median over rounds of the round's median, in seconds per operation;
the spread beside it is the distance of the quartiles over rounds.
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
    """What a trial gave; ``error`` says why it gave nothing, or is not to be trusted.

    ``rounds`` are seconds per operation, ``mean`` is over every operation of all
    rounds: what happens at each hundredth operation shows there alone.
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
        """The distance of the quartiles; 0 for a single round."""
        if len(self.rounds) < 2:
            return 0.0

        low, _, high = quantiles(self.rounds, n=4, method="inclusive")
        return high - low

    def add(self, took: Sequence[float]) -> None:
        """Take in the operations of one round."""
        self.rounds.append(median(took))
        total = self.mean * self.operations + fmean(took) * len(took)
        self.operations += len(took)
        self.mean = total / self.operations


async def interleaved(
    trials: Sequence[Trial],
    rounds: int,
    tell: Callable[[Trial, str], None] | None = None,
) -> list[Result]:
    """Run the trials in turn, each round in another order, and check what they did.

    A round more is run before the counted ones. A trial that raises ends, with its
    error in its result; the others go on. ``tell`` hears before each step what is
    done to which trial.
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

    # What some keep in memory is not for the collector to walk in the time of others.
    # Where the collector is a part of what is measured, it is left as it comes.
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
