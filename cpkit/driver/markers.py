"""Markers of threads: a store's own, or digests of all that it has of a thread."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, TypeAlias

from cpkit.driver.store import (
    Store,
    StoresMarkers,
    StoresReceipts,
    StoresThreadLists,
)

__all__ = ["Markers", "can_scan", "read_markers"]

Markers: TypeAlias = Mapping[str, Hashable]

_PAGE = 1000


def can_scan(store: Store) -> bool:
    """Tell whether the markers of all threads can be read."""
    return isinstance(store, StoresMarkers | StoresThreadLists)


async def read_markers(store: Store, thread_ids: Collection[str] | None) -> Markers:
    """Return the markers of these threads, or of all."""
    if isinstance(store, StoresMarkers):
        return await store.markers(None if thread_ids is None else list(thread_ids))

    if thread_ids is None:
        thread_ids = await _all_ids(store)

    return {one: await _digest(store, one) for one in thread_ids}


async def _all_ids(store: Any) -> list[str]:
    found: list[str] = []

    while True:
        after = found[-1] if found else None
        page = await store.threads("", after, _PAGE, True)
        found += [info.thread_id for info in page]

        if len(page) < _PAGE:
            return found


async def _digest(store: Store, thread_id: str) -> Hashable:
    """Return a digest of the thread and its calls; ``None`` where there is nothing."""
    content = hashlib.sha256()

    def digest(bodies: Iterable[bytes | str], first: int) -> list[Any]:
        taken = 0

        for body in bodies:
            content.update(body.encode() if isinstance(body, str) else body)
            content.update(b"\0")  # JSON text has none
            taken += 1

        return [None] * taken  # a store counts them

    # A change between the two reads shows in the next digest at the latest.
    calls = await store.calls(thread_id) if isinstance(store, StoresReceipts) else []
    found = await store.snapshot(thread_id, 0, None, digest)

    if found is None and not calls:
        return None

    content.update(
        repr((found and (sorted(found.items), found.pending), calls)).encode()
    )
    return content.digest()
