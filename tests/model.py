"""What every store is compared with: the store in memory."""

from __future__ import annotations

import random
from itertools import groupby
from typing import Any

import pytest

from cpkit import MemoryCheckpointer, ToolCall, VersionConflict
from cpkit.driver import (
    Append,
    Claim,
    Erase,
    EraseCalls,
    FullHandle,
    Merge,
    Resolve,
    Restore,
    Store,
    StoredCall,
    StoresDumps,
    StoresReceipts,
    StoresThreadLists,
    Trim,
    Write,
)
from cpkit.memory import MemoryStore
from cpkit.records import CallStatus

THREADS = ["a", "ab", "b"]
KEYS = ["k1", "k2", "k3"]
TIMES = ("issued_at", "resolved_at", "created_at", "updated_at")


def without_times(value: Any) -> Any:
    """Drop what two clocks cannot agree on; texts and bytes of JSON become equal."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        fields = value._asdict()
        return [
            (name, without_times(one))
            for name, one in fields.items()
            if name not in TIMES
        ]

    if isinstance(value, list | tuple):
        return [*map(without_times, value)]

    return value.encode() if isinstance(value, str) else value


def some_call(chance: random.Random, thread_id: str) -> StoredCall:
    """Return a call as a dump has it."""
    status: CallStatus = chance.choice(("issued", "completed", "failed"))
    erased = chance.random() < 0.3
    done = status != "issued"
    return StoredCall(
        thread_id,
        chance.choice("xyz"),
        "tool",
        b"{}" if erased else b'{"a":1}',
        chance.choice(KEYS),
        status,
        chance.randrange(1, 4),
        1000,
        b"7" if done and not erased else None,
        2000 if done else None,
        erased,
    )


def some_write(chance: random.Random) -> Write:
    thread_id = chance.choice(THREADS)
    items = [(b'"%d"' % chance.randrange(3), b"%d" % chance.randrange(99))]

    match chance.choice("aaaammccccrrrreetttooRR"):
        case "a":
            bodies = [b'{"n":%d}' % i for i in range(chance.randrange(3))]
            expected = chance.choice((None, None, 0, 1, 2))
            return Append(thread_id, bodies, expected, chance.choice(((), items)))
        case "m":
            return Merge(thread_id, items)
        case "c":
            call_id, key = chance.choice("xyz"), chance.choice(KEYS)
            return Claim(thread_id, call_id, "tool", b"{}", key)
        case "r":
            status: CallStatus = chance.choice(("completed", "failed"))
            return Resolve(thread_id, chance.choice("xyz"), status, b"5")
        case "e":
            expected = chance.choice((None, None, 0, 1))
            return Erase(thread_id, chance.random() < 0.5, expected)
        case "t":
            expected = chance.choice((None, None, 1, 2, 3))
            return Trim(thread_id, chance.randrange(5), expected)
        case "o":
            expected = chance.choice((None, None, 1, 2))
            return EraseCalls(thread_id, chance.choice((550, 2**60)), expected)
        case _:
            calls = [some_call(chance, thread_id)]

            if chance.random() < 0.5 and all(call.erased for call in calls):
                return Restore(thread_id, [], [], calls, None, None)

            first = chance.choice((0, 0, 1, 3))
            bodies = [b"{}"] * chance.choice((0, 1, 1, 2))
            return Restore(thread_id, bodies, items, calls, 500, 600, 0, first)


async def state(store: Store) -> list[Any]:
    """Return all that can be read from a store."""
    assert isinstance(store, StoresDumps)
    assert isinstance(store, StoresReceipts)
    assert isinstance(store, StoresThreadLists)

    def decode(bodies: Any, first: int) -> list[Any]:
        return [(first + i, body) for i, body in enumerate(bodies)]

    listed = [
        await store.threads(prefix, after, limit, erased)
        for prefix in ("", "a")
        for after in (None, "a")
        for limit in (1, 9)
        for erased in (False, True)
    ]
    found = [[(one.thread_id, one.version) for one in page] for page in listed]
    dumps = [await store.dump(thread_id) for thread_id in THREADS]
    snapshots = [
        await store.snapshot(thread_id, start, stop, decode)
        for thread_id in THREADS
        for start, stop in ((0, None), (-2, None), (1, -1), (1, 3), (5, None), (0, 0))
    ]

    return [
        found,
        [
            None if dump is None else sorted(without_times([*dump.items]))
            for dump in dumps
        ],
        [None if dump is None else dump._replace(items=()) for dump in dumps],
        [None if one is None else one._replace(items=()) for one in snapshots],
        [await store.holder(key) for key in KEYS],
        [await store.calls(thread_id) for thread_id in THREADS],
    ]


def grouped(batch: list[Write], locks_threads: bool) -> list[list[Write]]:
    """Return what a handle would give to one commit each."""
    if not locks_threads:
        return [batch]

    return [[*group] for _, group in groupby(batch, lambda write: write.thread_id)]


async def check_outcomes(store: Store, seed: int) -> None:
    """Commit random batches to a new store and to one in memory, and compare both."""
    chance = random.Random(seed)
    model = MemoryStore()
    await store.open()

    try:
        for _ in range(40):
            batch = [some_write(chance) for _ in range(chance.randrange(1, 6))]
            expected = await model.commit(batch)
            found: list[Any] = []

            for group in grouped(batch, store.locks_threads):
                found += await store.commit(group)

            assert without_times(found) == without_times(list(expected)), batch
            assert without_times(await state(store)) == without_times(
                await state(model)
            ), batch
    finally:
        await store.close()


async def check_moves(there: FullHandle[Any], third: FullHandle[Any]) -> None:
    """Move threads from memory to one store and to another; nothing changes."""
    async with MemoryCheckpointer[Any]() as here:
        await here.record_issued("t", ToolCall("old", "pay", {"a": 1}, "k0"))
        await here.delete_thread("t")
        await here.append("t", [{"n": 1.5}, {"é": 10**30}], extra={"b": 1, "": None})
        await here.record_issued("t", ToolCall("c1", "pay", {"a": 1}, "k"))
        await here.record_result("t", "c1", "declined", success=False)
        await here.record_issued("t", ToolCall("c2", "pay", {"a": 1}, "k"))
        await here.record_issued("only calls", ToolCall("c", "pay", {}, "k9"))
        await here.delete_thread("only calls")

        for thread_id in ("t", "only calls"):
            dump = await here.dump_thread(thread_id)
            assert dump is not None
            await there.restore_thread(dump)
            copied = await there.dump_thread(thread_id)
            assert copied == dump
            await third.restore_thread(copied)
            assert await third.dump_thread(thread_id) == dump

            with pytest.raises(VersionConflict):
                await there.restore_thread(dump)

        assert await there.list_threads(erased=True) == await here.list_threads(
            erased=True
        )
        assert await there.load("t") == await here.load("t")
