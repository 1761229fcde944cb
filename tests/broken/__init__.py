"""Backends that are broken on purpose, at least one for every clause.

They prove that each clause can fail, and show which defect it catches.
"""

from tests.broken import (  # noqa: F401  # each module registers its backends
    appends,
    appends_extra,
    cancelled,
    claims,
    clocks,
    costs,
    crashes,
    deletions,
    elsewhere,
    erasing,
    erasing_calls,
    extras,
    fences,
    handles,
    holders,
    huge,
    late,
    loads,
    moves,
    paths,
    patterns,
    places,
    powerloss,
    powerloss_writes,
    promises,
    races,
    races_of_processes,
    ranges,
    reading,
    remote,
    replicas,
    results,
    servers,
    sizes,
    texts,
    trimming,
    unsynced_servers,
    values,
    waiting,
    watches,
)
from tests.broken.store import BROKEN, Break

__all__ = ["BROKEN", "Break"]
