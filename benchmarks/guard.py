"""A check of a minute for clear regressions.

``python -m benchmarks.guard [STORE ...]`` measures each store together with its floor.
A goal is missed if the ratio is more than twice the goal (for a rate: less than half),
both by the best rounds and by the median rounds, in each of several tries. Noise on the
machine does not last for all tries; a regression does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Sequence

from benchmarks.goals import DRIVERS, GOALS, Goal
from benchmarks.place import private_place
from benchmarks.roster import CPKIT, FLOOR, entry
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


def main(arguments: Sequence[str]) -> int:
    """Measure the stores that the arguments name; return 1 if one misses a goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard")
    parser.add_argument("stores", nargs="*", metavar="STORE", help=", ".join(DRIVERS))
    stores = parser.parse_args(arguments).stores or DRIVERS

    for store in stores:
        if store not in DRIVERS:
            parser.error(f"unknown store {store!r}; known are: {', '.join(DRIVERS)}")

    failures = 0

    with private_place(stores, None) as place:
        for driver in stores:
            pair = [entry(driver, name).make(place) for name in (FLOOR, CPKIT)]
            found = asyncio.run(_opened(*pair))
            failures += len(found)
            verdict = "; ".join(map(": ".join, found.items())) or "ok"
            sys.stdout.write(f"{driver}: {verdict}\n")

    return 1 if failures else 0


async def _opened(floor: Contender, ours: Contender) -> dict[str, str]:
    async with floor, ours:
        return await missed(floor, ours)


async def missed(
    floor: Contender, ours: Contender, goals: Sequence[Goal] = GOALS
) -> dict[str, str]:
    """Return the goals missed in every try, each with its ratios and its limit.

    The caller opens and closes both contenders.
    """
    driver = floor.driver
    left = [
        goal for goal in goals if goal.workload in WATCHED and driver in goal.limits
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
