"""Markers of threads: a store's own, or digests of all that it has of a thread."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TypeAlias

from cpkit.driver.store import Store, StoresMarkers, StoresReceipts, StoresThreadLists

__all__ = ["Markers", "can_scan", "read_markers"]

Markers: TypeAlias = Mapping[str, Hashable]


def can_scan(store: Store) -> bool:
    """Tell whether the markers of all threads can be read."""
    return isinstance(store, StoresMarkers | StoresThreadLists)


async def read_markers(store: Store, thread_ids: Collection[str] | None) -> Markers:
    """Return the markers of these threads, or of all."""
    if isinstance(store, StoresMarkers):
        return await store.markers(None if thread_ids is None else list(thread_ids))

    if thread_ids is None:
        assert isinstance(store, StoresThreadLists)  # see `can_scan`
        found = await store.threads("", None, 2**31 - 1, True)
        thread_ids = [info.thread_id for info in found]

    return {one: await _digest(store, one) for one in thread_ids}


async def _digest(store: Store, thread_id: str) -> Hashable:
    """Return a digest of the thread and its calls; ``None`` where there is nothing."""
    # A change between the two reads shows in the next digest at the latest.
    calls = await store.calls(thread_id) if isinstance(store, StoresReceipts) else []
    found = await store.snapshot(thread_id, 0, None, lambda bodies, _: list(bodies))

    if found is None:
        return hash(repr(calls)) if calls else None

    return hash(repr((found._replace(items=sorted(found.items)), calls)))
