"""A check of seconds for clear regressions: ratios to the floor, measured together.

A goal is missed if the ratio is more than twice the goal (for a rate: less than half),
both by the best rounds and by the median rounds, in each of several tries. Noise on the
machine does not last for all tries; a regression does.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.goals import GOALS, KNOWN_SHORTFALLS, Goal
from cpkit.tools.benchmark import Contender, Result, Scale, interleaved
from cpkit.tools.benchmark.workloads import Append, Calls, Extra, Load, Tasks, Trial

__all__ = ["SLACK", "WATCHED", "missed"]

SLACK = 2.0
ROUNDS = 3
TRIES = 3

SCALE = Scale(operations=25, seconds=0.25, appends=256)

# The workloads that are fast enough for a test; ``make bench`` measures the others.
WATCHED = {
    "append@0",
    "append@10000",
    "tasks-64-many",
    "tasks-64-one",
    "load@1000",
    "calls-fresh",
    "calls-replayed",
    "extra",
}


async def missed(
    floor: Contender, ours: Contender, goals: Sequence[Goal] = GOALS
) -> dict[str, str]:
    """Return the goals missed in every try, each with its ratios and its limit.

    The caller opens and closes both contenders.
    """
    driver = floor.driver
    left = [
        replace(goal, limits=goal.limits | _shortfall(driver, goal))
        for goal in goals
        if goal.workload in WATCHED and driver in goal.limits
    ]
    ratios: dict[str, list[str]] = {goal.title: [] for goal in left}

    for _ in range(TRIES):
        wanted = {goal.workload for goal in left} | {goal.base for goal in left}
        trials = [
            trial
            for contender in (floor, ours)
            for trial in _trials(contender)
            if trial.workload in wanted
        ]
        gc.freeze()  # objects of earlier tests must not slow down a load
        results = await interleaved(trials, ROUNDS)
        found = {(result.name, result.workload): result for result in results}

        for result in results:
            if result.error is not None:
                raise AssertionError(
                    f"{result.name}, {result.workload}: {result.error}"
                )

        for goal in [*left]:
            base = (
                found[ours.name, goal.base]
                if goal.kind == "growth"
                else found[floor.name, goal.workload]
            )
            ratio = _better_ratio(goal, found[ours.name, goal.workload], base)
            ratios[goal.title].append(f"{ratio:.2f}")

            if goal.met(driver, ratio, slack=SLACK):
                left.remove(goal)

        if not left:
            break

    return {
        goal.title: f"{', '.join(ratios[goal.title])} (goal {goal.limits[driver]:g})"
        for goal in left
    }


def _shortfall(driver: str, goal: Goal) -> dict[str, float]:
    place = (driver, goal.title)
    return {driver: KNOWN_SHORTFALLS[place]} if place in KNOWN_SHORTFALLS else {}


def _trials(contender: Contender) -> list[Trial]:
    return [
        *(Append(contender, size, SCALE) for size in (0, 10_000)),
        Tasks(contender, 64, SCALE, one=False),
        Tasks(contender, 64, SCALE, one=True),
        Load(contender, 1_000, SCALE),
        Calls(contender, SCALE, fresh=True),
        Calls(contender, SCALE, fresh=False),
        Extra(contender, SCALE),
    ]


def _better_ratio(goal: Goal, ours: Result, base: Result) -> float:
    """Return the better of two ratios: of the best rounds and of the median rounds."""
    both = (goal.ratio(ours.best, base.best), goal.ratio(ours.median, base.median))
    return max(both) if goal.kind == "rate" else min(both)
