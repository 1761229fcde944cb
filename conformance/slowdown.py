"""How much longer work takes now than on an idle machine: time limits scale with it."""

from __future__ import annotations

import os
import time
from functools import cache

__all__ = ["VARIABLE", "growth", "slowdown"]

VARIABLE = "CPKIT_TEST_SLOWDOWN"
"""The variable that sets the factor, for child processes and for tests of limits."""

SAMPLE = 0.05
"""Seconds of processor time that the measurement takes."""

MOST = 8.0
"""A limit of one minute stays below ten."""


@cache
def slowdown() -> float:
    """Return a factor of at least 1 for time limits, measured when it is first asked.

    It is the larger of two figures: by how much other processes delay this one, and
    the load of each processor, which also counts processes that wait for the disk.
    """
    given = os.environ.get(VARIABLE)

    if given:
        return float(given)

    start, used = time.perf_counter(), time.thread_time()

    while time.thread_time() - used < SAMPLE:
        continue

    delayed = (time.perf_counter() - start) / SAMPLE
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(1.0, delayed, load), MOST)


def growth() -> float:
    """Measure again, and return by which factor time limits grow; at least 1."""
    before = slowdown()
    slowdown.cache_clear()
    return max(1.0, slowdown() / before)
