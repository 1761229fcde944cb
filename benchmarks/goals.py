"""The goals: ratios to reach. The report and the guard use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.wake import APPEND, CALLERS, DECISION, WATCH

__all__ = ["DRIVERS", "GOALS", "PEER_GOAL", "PEER_WORKLOAD", "Goal"]

DRIVERS = ("sqlite", "postgres", "redis", "redis-always", "file")


@dataclass(frozen=True)
class Goal:
    """A ratio to reach in one workload, for the drivers that have a limit.

    ``time``: cpkit's time divided by the floor's, at most the limit. ``rate``: cpkit's
    operations a second divided by the floor's, at least the limit. ``growth``: cpkit's
    time divided by its own time in the workload ``base``, at most the limit.
    ``figure``: what was measured, in ``unit``, at most the limit.
    """

    workload: str
    kind: Literal["time", "rate", "growth", "figure"]
    limits: dict[str, float]
    base: str = ""
    unit: str = "×"

    @property
    def title(self) -> str:
        if self.kind == "growth":
            return f"{self.workload} / {self.base}"

        return self.workload

    def ratio(self, ours: float, base: float) -> float:
        """Return the ratio of two figures, both in seconds (or bytes) per operation."""
        if self.kind == "figure":
            return ours

        return base / ours if self.kind == "rate" else ours / base

    def met(self, driver: str, ratio: float, *, slack: float = 1.0) -> bool:
        """Return whether a ratio reaches the goal, which ``slack`` makes easier."""
        limit = self.limits[driver]
        return ratio >= limit / slack if self.kind == "rate" else ratio <= limit * slack


def _all(limit: float, **others: float) -> dict[str, float]:
    return dict.fromkeys(DRIVERS, limit) | others


_APPEND = _all(1.3, sqlite=1.4, postgres=1.5)

# Milliseconds from a change in one process to another that waits for it.
_WAKES = _all(50.0, postgres=20.0, redis=20.0, **{"redis-always": 20.0})

GOALS = (
    Goal("append-first", "time", _all(1.3)),
    Goal("append@0", "time", _APPEND),
    Goal("append@1000", "time", _APPEND),
    Goal("append@10000", "time", _APPEND),
    Goal("append@10000", "growth", _all(1.05), base="append@0"),
    Goal(
        "tasks-64-many",
        "rate",
        {"sqlite": 2.4, "postgres": 2.0, "redis": 3.0, "file": 1.0},
    ),
    Goal(
        "tasks-64-one",
        "rate",
        {"sqlite": 3.0, "postgres": 2.0, "redis": 3.5, "file": 3.5},
    ),
    Goal("load@100", "time", _all(1.1)),
    Goal("load@1000", "time", _all(1.1)),
    Goal("load@10000", "time", _all(1.1)),
    Goal("load@100000", "time", _all(1.1)),
    Goal("calls-fresh", "time", _all(1.6, file=2.5)),
    Goal("calls-replayed", "time", _all(1.4)),
    Goal("extra", "time", _all(1.3)),
    # One sync for each append; the rest allows for checkpoints, which sync too.
    Goal(
        "fsyncs",
        "time",
        {"sqlite": 1.05, "postgres": 1.05, "redis-always": 1.05, "file": 1.05},
    ),
    Goal("bytes", "time", _all(1.05)),
    Goal("memory", "time", _all(1.0, sqlite=0.6)),
    Goal("import", "time", {"import": 1.5}),
    Goal(f"{WATCH}, p99 ms", "figure", _WAKES, unit=" ms"),
    Goal(f"{DECISION}, p99 ms", "figure", _WAKES, unit=" ms"),
    Goal(f"{CALLERS}, operations a second", "figure", _all(10.0), unit="/s"),
    Goal(f"{CALLERS}, last after first ms", "figure", _all(200.0), unit=" ms"),
    Goal(f"{APPEND[0]}, ratio", "figure", _all(1.02)),
    Goal(f"{APPEND[1]}, ratio", "figure", _all(1.1)),
)

# cpkit must be this many times faster than the whole-state savers of LangGraph.
PEER_WORKLOAD = "append@10000"
PEER_GOAL = 100.0
