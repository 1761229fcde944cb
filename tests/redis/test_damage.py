"""Rows that cannot be decoded raise ``CorruptThread``, and are not written over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from cpkit import BackendUnavailable, CorruptThread, ToolCall
from cpkit.driver import Append, StoreFailure
from cpkit_redis import RedisCheckpointer
from tests.redis.test_keys import keys_of

Store = RedisCheckpointer[Any]

OPERATIONS: dict[str, Callable[[Store], Coroutine[Any, Any, Any]]] = {
    "load": lambda cp: cp.load("t"),
    "read": lambda cp: cp.read("t"),
    "append": lambda cp: cp.append("t", [{}]),
    "extra": lambda cp: cp.save_extra("t", {"a": 1}),
    "claim": lambda cp: cp.record_issued("t", ToolCall("new", "x", {}, "new")),
    "claim key": lambda cp: cp.record_issued("t", ToolCall("new", "x", {}, "k")),
    "result": lambda cp: cp.record_result("t", "c", 1),
    "calls": lambda cp: cp.list_calls("t"),
    "find": lambda cp: cp.find_call("k"),
    "list": lambda cp: cp.list_threads(),
    "delete": lambda cp: cp.delete_thread("t"),
    "dump": lambda cp: cp.dump_thread("t"),
}

Damage = Callable[[Any, str], Awaitable[Any]]


def pending(record: bytes) -> Damage:
    return lambda raw, base: raw.hset(f"{base}p:t", "c", record)


def times(field: str, time: str) -> Damage:
    return lambda raw, base: raw.hset(f"{base}t:t", field, time)


DAMAGE: dict[str, tuple[Damage, str]] = {
    "message": (
        lambda raw, base: raw.lset(f"{base}m:t", 0, "{"),
        "load, read, dump",
    ),
    "extra": (lambda raw, base: raw.hset(f"{base}x:t", '"a"', "?"), "load, dump"),
    "updated": (times("updated", "noon"), "append, extra, claim, result, list, dump"),
    "created": (times("created", "noon"), "list, dump"),
    "record": (pending(b"x"), "load, calls, find, claim key, result, delete, dump"),
    "record, not UTF-8": (
        pending(b"1\0001\0k\0\xff\0001\0issued\0\0{}\0"),
        "load, calls, find",
    ),
    "args": (pending(b"1\0001\0k\0x\0001\0issued\0\0[\0"), "load, calls, find"),
    "register of an unknown call": (
        lambda raw, base: raw.zadd(f"{base}k:k", {"x\0y": 9}),
        "find, claim key",
    ),
    "messages under another type": (
        lambda raw, base: raw.set(f"{base}m:t", "alien"),
        "load, read, append, list, dump",
    ),
}


async def dump(raw: Any, prefix: str) -> dict[bytes, bytes]:
    return {key: await raw.dump(key) for key in await keys_of(raw, prefix)}


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (damage, name)
        for damage, (_, names) in DAMAGE.items()
        for name in names.split(", ")
    ],
)
async def test_a_row_that_cannot_be_decoded_is_corruption(
    cp: Store, raw: Any, prefix: str, damage: str, name: str
) -> None:
    """It raises ``CorruptThread``, and stays as it is for a person to look at."""
    await cp.append("t", [{"n": 0}], extra={"a": 0})
    await cp.record_issued("t", ToolCall("c", "x", {}, "k"))
    await DAMAGE[damage][0](raw, f"{{{prefix}}}:")
    before = await dump(raw, prefix)

    with pytest.raises(CorruptThread):
        await OPERATIONS[name](cp)

    assert await dump(raw, prefix) == before


async def test_the_script_stops_at_the_first_error(
    cp: Store, raw: Any, prefix: str
) -> None:
    """What it raises is the outcome of the whole batch, so it says what is proven."""
    await cp.append("bad", [{}])
    await raw.hset(f"{{{prefix}}}:t:bad", "updated", "noon")
    store: Any = cp.store
    good, bad = (Append(name, [b"{}"], None) for name in ("good", "bad"))

    with pytest.raises(CorruptThread) as caught:
        await store.commit([bad, good])

    assert caught.value.thread_id == "bad"
    assert await cp.load("good") is None

    with pytest.raises(StoreFailure) as unknown:
        await store.commit([good, bad, good])

    assert unknown.value.fate == "unknown"
    assert await cp.read("good") == [{}]


async def test_a_damaged_store_is_not_opened(url: str, raw: Any, prefix: str) -> None:
    """A version of another type is refused, and nothing is written."""
    await raw.rpush(f"{{{prefix}}}:schema", "x")

    with pytest.raises(BackendUnavailable, match="WRONGTYPE") as caught:
        async with Store(url, prefix=prefix):
            pytest.fail("it opened")

    assert caught.value.rejected
    assert len(await keys_of(raw, prefix)) == 1
