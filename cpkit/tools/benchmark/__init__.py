"""How long a store takes, measured in rounds that contenders take in turn.

`workloads` says what is done, `rounds` in which order and with what outcome, and
`contender` what a store has to offer for it. ``cpkit bench`` runs it on stores by URL;
``benchmarks/`` in the repository adds floors, peers, and what a report needs.
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
