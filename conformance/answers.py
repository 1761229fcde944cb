"""What every read of a store says about a thread and its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpkit import KeepsReceipts, ListsThreads, ReadsRanges

__all__ = ["answers"]


async def answers(cp: Any, thread: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return the answer of each read that the store has, by name."""
    found = {"load": await cp.load(thread)}

    for key in keys:
        found[f"find_completed {key}"] = await cp.find_completed(key)

    if isinstance(cp, KeepsReceipts):
        found["list_calls"] = await cp.list_calls(thread)

        for key in keys:
            found[f"find_call {key}"] = await cp.find_call(key)

    if isinstance(cp, ReadsRanges):
        found["read"] = await cp.read(thread)
        found["load_range"] = await cp.load_range(thread, -2)

    if isinstance(cp, ListsThreads):
        found["list_threads"] = await cp.list_threads(prefix=thread, erased=True)

    return found
