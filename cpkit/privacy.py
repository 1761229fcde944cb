"""Rotation of keys, and erasure with a receipt.

`rewrap` puts the data keys of all threads under the newest key of the ring. After it,
older keys can be removed from the ring. `erase` deletes threads and says what is kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from cpkit.driver.examine import Seals, examine
from cpkit.driver.sealed import SealedStore
from cpkit.driver.writes import Append
from cpkit.errors import CorruptThread, KeyMissing, VersionConflict
from cpkit.records import ThreadInfo
from cpkit.tools.paging import INTERNAL, thread_pages

__all__ = ["Erasure", "Rewrapped", "erase", "rewrap"]

# Internal threads that belong to what their ids go on with: a run to a thread, say.
_OWNED = re.compile(
    "(?:cpkit:(?:run|langgraph|langgraph-store|openai-agents|pydantic-ai|mcp"
    "|claude-agent-sdk|google-adk|google-adk-user):)+"
)
# Kinds of internal threads whose ids do not say whom they belong to.
_NAMELESS = re.compile("cpkit:(?:once|langgraph-of|google-adk-app|runs)")

# How often a thread is tried that is written to at the same time.
_TRIES = 20


@dataclass(frozen=True)
class Rewrapped:
    """How many threads there are, how many got records, and how many have plain values.

    ``busy`` names the threads that other writers did not leave alone: run it again.
    ``damaged`` says where a value does not open in its place, and no other value of the
    thread has its data key: that key is not wrapped again. ``missing`` says where the
    ring lacks a key. ``in_use`` has the ids of the keys that the values need now; no
    other key of the ring is needed.
    """

    threads: int
    rewrapped: int
    with_plain: int
    busy: list[str]
    damaged: list[str]
    missing: list[str]
    in_use: list[str]


@dataclass(frozen=True)
class Erasure:
    """The receipt of an erasure, with numbers of what was deleted.

    ``kept`` has the calls that stay on record, so that nothing is paid twice: the key,
    the tool and the status, and neither args nor result.

    ``unmatched`` has how many threads of cpkit's own are there whose ids do not say
    whom they belong to, by kind: they were left alone.
    """

    prefix: str
    began_at: datetime
    ended_at: datetime
    threads: list[str] = field(default_factory=list)
    messages: int = 0
    extra: int = 0
    calls: int = 0
    kept: list[dict[str, str]] = field(default_factory=list)
    unmatched: dict[str, int] = field(default_factory=dict)


async def rewrap(
    cp: Any, *, prefix: str = "", progress: Callable[[int], None] = lambda _: None
) -> Rewrapped:
    """Wrap the data keys of all threads by the newest key of the ring.

    ``cp`` is a handle with a keyring, which lists its threads. It reads each thread
    once. Where it is interrupted, a second run does what is left. A thread is written
    to only at the version at which it was read. What another process writes meanwhile
    under an older key is for a second run.

    Raises ``TypeError`` for a handle without a keyring.
    """
    store = getattr(cp, "store", None)

    if not isinstance(store, SealedStore):
        raise TypeError("the store was opened without a keyring")

    threads = rewrapped = with_plain = 0
    busy: list[str] = []
    damaged: list[str] = []
    missing: list[str] = []
    in_use: set[str] = set()

    async for page in thread_pages(cp, prefix=prefix):
        for info in page:
            threads += 1

            try:
                outcome, seals = await _rewrap(cp, info.thread_id)
            except CorruptThread as exc:  # a row that the store cannot read
                damaged.append(str(exc))
                continue

            for fault in seals.faults:
                told = damaged if isinstance(fault, CorruptThread) else missing
                told.append(str(fault))

            rewrapped += outcome == "rewrapped"
            with_plain += bool(seals.plain)

            if seals.sealed:
                in_use.add(store.keyring.newest)

            if outcome == "busy":
                busy.append(info.thread_id)

            if outcome == "busy" or seals.faults:
                in_use |= seals.key_ids

        progress(len(page))

    used = sorted(in_use)
    return Rewrapped(threads, rewrapped, with_plain, busy, damaged, missing, used)


async def _rewrap(cp: Any, thread_id: str) -> tuple[str, Seals]:
    """Add the records that a thread lacks, unless other writers come first."""
    for _ in range(_TRIES):
        seals = await examine(cp, thread_id)

        if not seals.records:
            return "done", seals

        with suppress(VersionConflict):
            # Not by ``append``, which encrypts all that it gets.
            await cp._commits.run(Append(thread_id, [], seals.version, seals.records))
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

    Threads of cpkit's own go with them, where what follows their ``cpkit:…:`` starts
    with the prefix: runs, and threads of the adapters. The data keys of a thread go
    with its values, in one atomic step. Threads that are already erased are on the
    receipt with the calls that are kept of them. Where it is interrupted, a second run
    does what is left.
    """
    if not prefix:
        raise ValueError("a prefix has at least one character")

    began = datetime.now(UTC)
    threads = []
    messages = extra = calls = 0
    kept = []

    unmatched: Counter[str] = Counter()

    async for page in _pages(cp, prefix, unmatched):
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

    return Erasure(
        prefix,
        began,
        datetime.now(UTC),
        threads,
        messages,
        extra,
        calls,
        kept,
        dict(unmatched),
    )


async def _pages(
    cp: Any, prefix: str, unmatched: Counter[str]
) -> AsyncIterator[list[ThreadInfo]]:
    """Yield the threads of a prefix, and cpkit's own that belong to such threads."""
    async for page in thread_pages(cp, prefix=prefix, erased=True, internal=False):
        yield page

    if prefix.startswith(INTERNAL):
        return

    # Some adapters quote the parts of an id.
    starts = prefix, quote(prefix, safe="/")

    async for page in thread_pages(cp, prefix=INTERNAL, erased=True):
        ids = [(info, _OWNED.match(info.thread_id)) for info in page]
        yield [
            info
            for info, owned in ids
            if owned and info.thread_id.startswith(starts, owned.end())
        ]
        nameless = (_NAMELESS.match(info.thread_id) for info in page)
        unmatched.update(one[0] for one in nameless if one)
