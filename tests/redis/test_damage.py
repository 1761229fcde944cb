"""Damaged values raise ``CorruptThread``; they are not repaired or written over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from cpkit import CorruptThread, ToolCall
from cpkit_redis import RedisCheckpointer
from tests.redis.test_keys import keys_of

Store = RedisCheckpointer[Any]
Operation = Callable[[Store], Coroutine[Any, Any, Any]]

OPERATIONS: dict[str, Operation] = {
    "load": lambda cp: cp.load("t"),
    "read": lambda cp: cp.read("t"),
    "append": lambda cp: cp.append("t", [{}]),
    "extra": lambda cp: cp.save_extra("t", {"a": 1}),
    "claim": lambda cp: cp.record_issued("t", ToolCall("new", "x", {}, "new")),
    "claim key": lambda cp: cp.record_issued("t", ToolCall("new", "x", {}, "k")),
    "claim again": lambda cp: cp.record_issued("t", ToolCall("c", "x", {}, "k")),
    "result": lambda cp: cp.record_result("t", "c", 1),
    "calls": lambda cp: cp.list_calls("t"),
    "find": lambda cp: cp.find_call("k"),
    "list": lambda cp: cp.list_threads(),
    "delete": lambda cp: cp.delete_thread("t"),
    "forget": lambda cp: cp.delete_thread("t", forget_keys=True),
    "dump": lambda cp: cp.dump_thread("t"),
}

TOUCHES = {
    "{0}:m:t": "load, read, append, list, delete, forget",
    "{0}:x:t": "load, extra, delete, forget",
    "{0}:t:t": "load, append, extra, claim, result, list, delete, forget",
    "{0}:p:t": "load, claim, claim again, result, calls, find, delete, forget",
    "{0}:c:t": "claim, result, calls, delete, forget",
    "{0}:k:k": "claim key, find, forget",
    "{0}:threads": "list, delete, forget",
    "{0}:erased": "delete, forget",
}
"""Keys, and the operations that fail where such a key has another type."""

BREAKS = [(key, name) for key, names in TOUCHES.items() for name in names.split(", ")]


async def filled(cp: Store) -> None:
    await cp.append("t", [{"n": 0}])
    await cp.save_extra("t", {"a": 0})
    await cp.record_issued("t", ToolCall("done", "x", {}, "done"))
    await cp.record_result("t", "done", 1)
    await cp.record_issued("t", ToolCall("c", "x", {}, "k"))


async def dump(raw: Any, prefix: str) -> dict[bytes, bytes]:
    return {key: await raw.dump(key) for key in await keys_of(raw, prefix)}


@pytest.mark.parametrize(("key", "name"), BREAKS)
async def test_a_key_of_another_type_is_corruption(
    cp: Store, raw: Any, prefix: str, key: str, name: str
) -> None:
    """An operation that needs the key raises ``CorruptThread`` and changes nothing."""
    await filled(cp)
    await raw.delete(f"{prefix}:{key}")
    await raw.set(f"{prefix}:{key}", "alien")
    before = await dump(raw, prefix)

    with pytest.raises(CorruptThread, match="WRONGTYPE") as caught:
        await OPERATIONS[name](cp)

    assert prefix in caught.value.where
    assert await dump(raw, prefix) == before


async def test_other_writes_of_the_batch_succeed(
    cp: Store, raw: Any, prefix: str
) -> None:
    """An append to a damaged thread fails alone."""
    await raw.set(f"{prefix}:{{0}}:m:bad", "alien")
    threads = ["a", "bad", "b", "bad", "c"]
    outcomes = await asyncio.gather(
        *(cp.append(thread, [{}]) for thread in threads), return_exceptions=True
    )
    assert [outcomes[i] for i in (0, 2, 4)] == [1, 1, 1]
    assert all(isinstance(outcomes[i], CorruptThread) for i in (1, 3))


def record(
    *, numbers: str = "2\0001\0001", tool: bytes = b"x", rest: str = "issued\0\0{}\0"
) -> bytes:
    """Return the record of the pending call with one part of it damaged."""
    return b"\0".join([numbers.encode(), b"k", tool, b"", rest.encode()])


def pending(text: bytes) -> Callable[[Any, str], Awaitable[Any]]:
    return lambda raw, p: raw.hset(f"{p}:{{0}}:p:t", "c", text)


def finished(rest: str) -> Callable[[Any, str], Awaitable[Any]]:
    text = f"1\0001\0001\0done\0x\0\0{rest}"
    return lambda raw, p: raw.hset(f"{p}:{{0}}:c:t", "done", text)


def times(updated: str) -> Callable[[Any, str], Awaitable[Any]]:
    return lambda raw, p: raw.hset(f"{p}:{{0}}:t:t", "updated", updated)


def nothing_but(kind: str) -> Callable[[Any, str], Awaitable[Any]]:
    lost = [one for one in "mxtpc" if one != kind]
    return lambda raw, p: raw.delete(*(f"{p}:{{0}}:{one}:t" for one in lost))


DAMAGE: dict[str, tuple[Callable[[Any, str], Awaitable[Any]], str]] = {
    "message": (lambda raw, p: raw.lset(f"{p}:{{0}}:m:t", 0, "{"), "load, read"),
    "message no object": (
        lambda raw, p: raw.lset(f"{p}:{{0}}:m:t", 0, "1"),
        "load, read",
    ),
    "extra": (lambda raw, p: raw.hset(f"{p}:{{0}}:x:t", '"a"', "?"), "load"),
    "extra key": (lambda raw, p: raw.hset(f"{p}:{{0}}:x:t", "a", "1"), "load"),
    "updated": (times("noon"), "append, extra, claim, result, list, dump"),
    "updated, a float": (times("1.5e15"), "append, extra, claim, result, list, dump"),
    "updated, too long": (times("1" * 30), "append, extra, claim, result, list, dump"),
    "created": (
        lambda raw, p: raw.hset(f"{p}:{{0}}:t:t", "created", "noon"),
        "list, dump",
    ),
    "no times": (
        lambda raw, p: raw.delete(f"{p}:{{0}}:t:t"),
        "load, append, extra, claim, result, list, dump",
    ),
    "nothing but messages": (nothing_but("m"), "load, append, extra, claim, dump"),
    "nothing but extra": (nothing_but("x"), "load, append, extra, claim, dump"),
    "nothing but pending calls": (
        nothing_but("p"),
        "load, append, extra, claim, result, dump",
    ),
    "nothing but finished calls": (nothing_but("c"), "append, extra, claim, dump"),
    "record": (
        pending(b"x"),
        "load, calls, find, result, claim again, delete, forget, dump",
    ),
    "record, not a number": (
        pending(record(numbers="2\0x\0001")),
        "load, calls, find, result, delete, forget",
    ),
    "record, not UTF-8": (pending(record(tool=b"\xff")), "load, calls, find"),
    "call id, not UTF-8": (
        lambda raw, p: raw.hset(f"{p}:{{0}}:p:t", b"\xff", record()),
        "load, calls, dump",
    ),
    "thread id, not UTF-8": (
        lambda raw, p: raw.zadd(f"{p}:{{0}}:threads", {b"\xff": 0}),
        "list",
    ),
    "status": (
        pending(record(rest="odd\0001\0{}\0")),
        "load, calls, find, result",
    ),
    "args": (pending(record(rest="issued\0\0[\0")), "load, calls, find"),
    "args no object": (pending(record(rest="issued\0\0[]\0")), "load, calls"),
    "result too many": (pending(record(rest="issued\0\0{}\0001")), "load, calls, find"),
    "result missing": (finished("completed\0001\0{}\0"), "calls, dump"),
    "time missing": (finished("completed\0\0{}\0001"), "calls, dump"),
    "result": (finished("completed\0001\0{}\0]"), "calls, dump"),
    "register": (
        lambda raw, p: raw.zadd(f"{p}:{{0}}:k:k", {"x": 9}),
        "find, claim key",
    ),
    "register, not UTF-8": (
        lambda raw, p: raw.zadd(f"{p}:{{0}}:k:k", {b"\xff\0c\0": 9}),
        "find, claim key",
    ),
    "register of an unknown call": (
        lambda raw, p: raw.zadd(f"{p}:{{0}}:k:k", {"x\0y\0": 9}),
        "find, claim key",
    ),
}


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (damage, name)
        for damage, (_, names) in DAMAGE.items()
        for name in names.split(", ")
    ],
)
async def test_a_damaged_value_is_corruption(
    cp: Store, raw: Any, prefix: str, damage: str, name: str
) -> None:
    """It raises ``CorruptThread``, and stays as it is for a person to look at."""
    await filled(cp)
    await DAMAGE[damage][0](raw, prefix)
    before = await dump(raw, prefix)

    with pytest.raises(CorruptThread):
        await OPERATIONS[name](cp)

    assert await dump(raw, prefix) == before


async def test_a_damaged_time_of_an_erased_call_is_corruption(
    cp: Store, raw: Any, prefix: str
) -> None:
    """A result of an erased call sets such a time."""
    await filled(cp)
    await cp.delete_thread("t")
    await raw.hset(f"{prefix}:{{0}}:t:t", "last", "1.5e15")
    before = await dump(raw, prefix)

    with pytest.raises(CorruptThread, match="no time in"):
        await cp.record_result("t", "c", 1)

    assert await dump(raw, prefix) == before
