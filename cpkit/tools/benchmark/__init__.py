"""Measure how long the operations of stores take.

`workloads` defines the operations, `rounds` runs them in an order that is fair to all
stores, and `contender` has the interface that a measured store needs. ``cpkit bench``
measures stores by URL. ``benchmarks/`` adds floors, peers and reports.
"""

from cpkit.tools.benchmark.contender import Contender, Stored
from cpkit.tools.benchmark.rounds import Result, interleaved
from cpkit.tools.benchmark.workloads import (
    ABILITIES,
    FAMILIES,
    NORMAL,
    QUICK,
    Scale,
    Trial,
    trials,
)

__all__ = [
    "ABILITIES",
    "FAMILIES",
    "NORMAL",
    "QUICK",
    "Contender",
    "Result",
    "Scale",
    "Stored",
    "Trial",
    "interleaved",
    "trials",
]
