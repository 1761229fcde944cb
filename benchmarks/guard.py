"""A clear regression, found in seconds: ratios to the floor of the same minute.

A goal is missed where the ratio is more than twice what it should be (for a rate, less
than half), by the best rounds and by the median ones alike, in each of several tries. A
disturbance passes and fails no try; a mistake stays and fails them all.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.goals import GOALS, HELD, Goal
from cpkit.tools.benchmark import Contender, Result, Scale, interleaved
from cpkit.tools.benchmark.workloads import Append, Calls, Extra, Load, Tasks, Trial

__all__ = ["SLACK", "WATCHED", "missed"]

SLACK = 2.0
ROUNDS = 3
TRIES = 3

SCALE = Scale(operations=25, seconds=0.25, appends=256)

# What a guard can afford; the rest of the goals is for ``make bench``.
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
    """Return what the store missed in every try: by goal, the ratios and the limit.

    Both contenders are open, and stay so.
    """
    driver = floor.driver
    left = [
        replace(goal, limits=goal.limits | _held(driver, goal))
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
        gc.freeze()  # what the tests before have left is no part of any load
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
            ratio = _kindest(goal, found[ours.name, goal.workload], base)
            ratios[goal.title].append(f"{ratio:.2f}")

            if goal.met(driver, ratio, slack=SLACK):
                left.remove(goal)

        if not left:
            break

    return {
        goal.title: f"{', '.join(ratios[goal.title])} (goal {goal.limits[driver]:g})"
        for goal in left
    }


def _held(driver: str, goal: Goal) -> dict[str, float]:
    place = (driver, goal.title)
    return {driver: HELD[place]} if place in HELD else {}


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


def _kindest(goal: Goal, ours: Result, base: Result) -> float:
    """Return the better of two ratios: of the best rounds, and of the median ones."""
    both = (goal.ratio(ours.best, base.best), goal.ratio(ours.median, base.median))
    return max(both) if goal.kind == "rate" else min(both)
