"""Rotation of keys, and erasure with a receipt.

`rewrap` puts the data keys of all threads under the newest key of the ring. After it,
older keys can be removed from the ring. `erase` deletes threads and says what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cpkit.driver.sealed import SealedStore, Seals
from cpkit.errors import CorruptThread, KeyMissing, VersionConflict
from cpkit.tools.paging import thread_pages

__all__ = ["Erasure", "Rewrapped", "erase", "rewrap"]

# How often a thread is tried that is written to at the same time.
_TRIES = 20


@dataclass(frozen=True)
class Rewrapped:
    """How many threads there are, how many got records, and how many have plain values.

    ``busy`` names the threads that other writers did not leave alone: run it again.
    ``damaged`` says where a value has no head that can be read: such a thread still
    needs the older keys.
    """

    threads: int
    rewrapped: int
    with_plain: int
    busy: list[str]
    damaged: list[str]


@dataclass(frozen=True)
class Erasure:
    """The receipt of an erasure, with numbers of what was deleted.

    ``kept`` has the calls that stay on record, so that nothing is paid twice: the key,
    the tool and the status, and neither args nor result. Where the ring hashes keys,
    the key is its hash.
    """

    prefix: str
    began_at: datetime
    ended_at: datetime
    threads: list[str] = field(default_factory=list)
    messages: int = 0
    extra: int = 0
    calls: int = 0
    kept: list[dict[str, str]] = field(default_factory=list)


async def rewrap(
    cp: Any, *, prefix: str = "", progress: Callable[[int], None] = lambda _: None
) -> Rewrapped:
    """Wrap the data keys of all threads by the newest key of the ring.

    ``cp`` is a handle with a keyring, which lists its threads. It reads each thread
    once. Where it is interrupted, a second run does what is left. A thread is written
    to only at the version at which it was read.

    Raises ``TypeError`` for a handle without a keyring, and ``KeyMissing`` where the
    ring lacks a key.
    """
    store = getattr(cp, "store", None)

    if not isinstance(store, SealedStore):
        raise TypeError("the store was opened without a keyring")

    threads = rewrapped = with_plain = 0
    busy = []
    damaged = []

    async for page in thread_pages(cp, prefix=prefix):
        for info in page:
            threads += 1

            try:
                outcome, seals = await _rewrap(cp, store, info.thread_id)
            except CorruptThread as exc:
                damaged.append(str(exc))
                continue

            rewrapped += outcome == "rewrapped"
            with_plain += bool(seals.plain)

            if outcome == "busy":
                busy.append(info.thread_id)

        progress(len(page))

    return Rewrapped(threads, rewrapped, with_plain, busy, damaged)


async def _rewrap(cp: Any, store: SealedStore, thread_id: str) -> tuple[str, Seals]:
    """Add the records that a thread lacks, unless other writers come first."""
    for _ in range(_TRIES):
        seals = await store.examine(thread_id)

        if not seals.records:
            return "done", seals

        with suppress(VersionConflict):
            await cp.append(
                thread_id, [], expected_version=seals.version, extra=seals.records
            )
            return "rewrapped", seals

    return "busy", seals


async def erase(
    cp: Any,
    prefix: str,
    *,
    forget_keys: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Erasure:
    """Delete every thread whose id starts with the prefix; return the receipt.

    The data keys of a thread go with its values, in one atomic step. Threads that are
    already erased are on the receipt with the calls that are kept of them. Where it is
    interrupted, a second run does what is left.
    """
    if not prefix:
        raise ValueError("a prefix has at least one character")

    began = datetime.now(UTC)
    threads = []
    messages = extra = calls = 0
    kept = []

    async for page in thread_pages(cp, prefix=prefix, erased=True):
        for info in page:
            thread_id, found, records = info.thread_id, None, []

            # What cannot be read is not counted, and goes all the same.
            with suppress(CorruptThread, KeyMissing):
                found = await cp.load_range(thread_id, 0, 0)
                records = await cp.list_calls(thread_id)

            await cp.delete_thread(thread_id, forget_keys=forget_keys)
            threads.append(thread_id)
            messages += 0 if found is None else found.version - found.first
            extra += 0 if found is None else len(found.extra)
            calls += len(records)
            kept += [
                {
                    "thread_id": thread_id,
                    "key": one.call.idempotency_key,
                    "tool": one.call.tool_name,
                    "status": one.status,
                }
                for one in await cp.list_calls(thread_id)
            ]

        progress(len(page))

    ended = datetime.now(UTC)
    return Erasure(prefix, began, ended, threads, messages, extra, calls, kept)
