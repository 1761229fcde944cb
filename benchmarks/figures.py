"""The figures of a run by driver, workload and name, compared with the goals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.goals import GOALS, PEER_GOAL, PEER_WORKLOAD, Goal
from benchmarks.roster import CPKIT, FLOOR, FULL_STATE

__all__ = ["Figures", "Verdict"]

# Workloads where the figures of different stores do not mean the same.
_INCOMPARABLE = {"open-close"}


@dataclass(frozen=True)
class Verdict:
    """A goal for a driver, the ratio in this run, and whether the goal is met."""

    driver: str
    title: str
    wanted: str
    ratio: float
    met: bool
    unit: str = "×"

    @property
    def here(self) -> str:
        """The ratio, or the figure in its unit."""
        return f"{self.ratio:.{1 if self.unit == ' ms' else 2}f}{self.unit}"


class Figures:
    """``of[driver, workload]`` has the time or cost of one operation, by contender.

    Built from the results file, so a report can be rendered again without a new run.
    """

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        self.of: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)

        for result in run["results"]:
            if result["error"] is None:
                place = self.of[result["driver"], result["workload"]]
                place[result["name"]] = result["median"]

        for cost in run["costs"]:
            for counted in ("fsyncs", "bytes"):
                if cost[counted] is not None:
                    self.of[cost["driver"], counted][cost["name"]] = cost[counted]

        for one in run["memory"]:
            self.of[one["driver"], "memory"][one["name"]] = one["bytes"]

        for one in run["crowd"]:
            rate = one["rate"]
            self.of[one["driver"], "four-processes"][one["name"]] = 1 / rate

        for row in run["wake"]:
            for column in row.keys() - {"driver", "what", "changes"}:
                place = self.of[row["driver"], f"{row['what']}, {column}"]
                place[CPKIT] = row[column]

        if run["imports"]:
            self.of["import", "import"] = {
                FLOOR: run["imports"]["pydantic"],
                CPKIT: run["imports"]["cpkit"],
            }

    def ratio(self, driver: str, goal: Goal) -> float | None:
        """Return the ratio that the goal bounds, or None if it was not measured."""
        found = self.of.get((driver, goal.workload), {})
        base = found.get(FLOOR)

        if goal.kind == "figure":
            return found.get(CPKIT)

        if goal.kind == "growth":
            base = self.of.get((driver, goal.base), {}).get(CPKIT)

        if CPKIT not in found or base is None:
            return None

        return goal.ratio(found[CPKIT], base)

    def verdicts(self) -> list[Verdict]:
        """Return a verdict for each goal that was measured."""
        found = []

        for goal in GOALS:
            for driver, limit in goal.limits.items():
                ratio = self.ratio(driver, goal)

                if ratio is not None:
                    sign = "≥" if goal.kind == "rate" else "≤"
                    wanted = f"{sign} {limit:g}{goal.unit}"
                    met = goal.met(driver, ratio)
                    found.append(
                        Verdict(driver, goal.title, wanted, ratio, met, goal.unit)
                    )

        return found + list(self._full_state())

    def slower_than(self) -> list[tuple[str, str, str, float]]:
        """Return driver, workload, peer and ratio where a peer is as fast or faster."""
        floors = {FLOOR, "floor, clustered key"}
        return [
            (driver, workload, name, ours[CPKIT] / figure)
            for (driver, workload), ours in self.of.items()
            if CPKIT in ours and workload not in _INCOMPARABLE and driver != "import"
            for name, figure in ours.items()
            if name != CPKIT and name not in floors and figure <= ours[CPKIT]
        ]

    def _full_state(self) -> Iterator[Verdict]:
        for (driver, workload), found in self.of.items():
            for name in FULL_STATE:
                if workload == PEER_WORKLOAD and CPKIT in found and name in found:
                    ratio = found[name] / found[CPKIT]
                    title = f"{workload}, {name} by cpkit"
                    wanted, met = f"≥ {PEER_GOAL:g}×", ratio >= PEER_GOAL
                    yield Verdict(driver, title, wanted, ratio, met)
