"""The list of runs, and how one process waits for another.

``threads`` says what is stored for a run, and ``waiting`` how leases, workers and
effects find out that a runner has ended, or has died.
"""

from cpkit.runs.threads import (
    HINTS,
    RUNS,
    TAKEN_OVER,
    TERM,
    Ask,
    RunList,
    RunState,
    RunThread,
    Wake,
    hint,
    holder_of,
    read_all,
    stale_after_of,
    store_time,
    wake_run,
)

__all__ = [
    "HINTS",
    "RUNS",
    "TAKEN_OVER",
    "TERM",
    "Ask",
    "RunList",
    "RunState",
    "RunThread",
    "Wake",
    "hint",
    "holder_of",
    "read_all",
    "stale_after_of",
    "store_time",
    "wake_run",
]
