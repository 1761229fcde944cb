"""Which keys are used: exact for hostile ids, and all in one slot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.crc import key_slot

from cpkit import ToolCall
from cpkit_redis import RedisCheckpointer

Store = RedisCheckpointer[Any]

HOSTILE = [
    "a",
    "A",
    "a:m",
    "{",
    "}",
    "{}",
    "{a}",
    "}{",
    "a}b",
    "a}:m",
    "%",
    "%7B",
    "%25",
    "{a",
    "%7Ba",
    "*",
    "a*",
    "?",
    "[a-z]",
    "a\nb",
    "a\r\nSET x 1\r\n",
    "\x01",
    "é",
    "e\u0301",
    "\U0010ffff",
    "' OR 1",
    '"); redis.call("FLUSHALL") --',
    "threads",
    "schema",
    "x" * 512,
    "{" * 512,
]


async def keys_of(raw: Any, prefix: str) -> list[bytes]:
    """Return the keys that start with the prefix, by a scan, as only a test may."""
    return sorted([key async for key in raw.scan_iter(f"{{{prefix}}}:*", count=1000)])


async def fill(cp: Store, thread: str) -> None:
    """Write something under each kind of key."""
    await cp.append(thread, [{"thread": thread}])
    await cp.save_extra(thread, {thread: thread})
    assert await cp.record_issued(thread, ToolCall(thread, thread, {}, thread)) is None
    await cp.record_result(thread, thread, thread)
    other = ToolCall(f"{thread[:500]}-2", "x", {}, f"{thread[:500]}-2")
    assert await cp.record_issued(thread, other) is None


async def test_hostile_ids_are_kept_apart(cp: Store) -> None:
    """As ids of threads, calls, keys and tools; deleting one leaves the others."""
    await asyncio.gather(*(fill(cp, thread) for thread in HOSTILE))
    listed = [info.thread_id for info in await cp.list_threads(limit=1000)]
    assert listed == sorted(HOSTILE)

    for gone in HOSTILE[::2]:
        await cp.delete_thread(gone, forget_keys=True)
        assert await cp.load(gone) is None
        assert await cp.find_call(gone) is None

    for thread in HOSTILE[1::2]:
        data = await cp.load(thread)
        assert data is not None
        assert data.messages == [{"thread": thread}]
        assert data.extra == {thread: thread}
        assert [record.call.tool_name for record in data.pending] == ["x"]
        record = await cp.find_completed(thread)
        assert record is not None
        assert (record.thread_id, record.result) == (thread, thread)
        assert len(await cp.list_calls(thread)) == 2
        assert [i.thread_id for i in await cp.list_threads(prefix=thread)] == [
            other for other in sorted(HOSTILE[1::2]) if other.startswith(thread)
        ]


async def test_all_keys_of_a_store_are_in_one_slot(
    cp: Store, raw: Any, prefix: str
) -> None:
    """That of the prefix, also with braces in an id: a cluster needs it."""
    await asyncio.gather(*(fill(cp, thread) for thread in HOSTILE))
    keys = await keys_of(raw, prefix)
    assert len(keys) > 5 * len(HOSTILE)
    assert {key_slot(key) for key in keys} == {key_slot(prefix.encode())}


async def test_stores_with_similar_prefixes_are_separate(url: str, raw: Any) -> None:
    """Also where one prefix is the beginning of another."""
    prefixes = ["near", "nea", "near:", "near:threads", "near:m", "NEAR", "near*", "é"]
    threads = ["a", "t", "threads", "schema", ":a"]

    for prefix in prefixes:
        async with Store(url, prefix=prefix) as cp:
            for thread in threads:
                await fill(cp, thread)

    for prefix in prefixes:
        async with Store(url, prefix=prefix) as cp:
            listed = [info.thread_id for info in await cp.list_threads()]
            assert listed == sorted(threads)

            for thread in threads:
                await cp.delete_thread(thread, forget_keys=True)

            assert await cp.list_threads() == []
            await raw.delete(f"{{{prefix}}}:schema")

        assert await raw.exists(f"{{{prefix}}}:threads") == 0


async def test_only_keys_of_the_prefix_are_touched(
    cp: Store, raw: Any, prefix: str
) -> None:
    """Other keys of the database stay as they are, and no key expires."""
    others = {
        f"{prefix}": "1",
        f"{{{prefix}}}": "2",
        "m:t": "3",
        f"{prefix}:m:t": "4",
        f"x{{{prefix}}}:a": "5",
    }
    await raw.mset(others)
    await fill(cp, "t")
    await cp.delete_thread("t")
    await fill(cp, "u")
    assert await raw.mget(list(others)) == [v.encode() for v in others.values()]

    for key in await keys_of(raw, prefix):
        assert await raw.ttl(key) == -1

    await raw.delete(*others)


async def test_forgetting_all_threads_leaves_only_the_version(
    cp: Store, raw: Any, prefix: str
) -> None:
    """No other key is left."""
    await fill(cp, "t")
    await fill(cp, "u")
    await cp.delete_thread("t", forget_keys=True)
    await cp.delete_thread("u")
    await cp.delete_thread("u", forget_keys=True)
    assert await keys_of(raw, prefix) == [f"{{{prefix}}}:schema".encode()]


async def test_no_command_searches_keys_or_flushes(cp: Store, raw: Any) -> None:
    """The driver does not use KEYS, SCAN, FLUSHDB or FLUSHALL."""
    before = await raw.info("commandstats")
    await fill(cp, "t")
    await cp.load("t")
    await cp.list_threads()
    await cp.list_calls("t")
    await cp.delete_thread("t", forget_keys=True)
    after = await raw.info("commandstats")

    for name in ("keys", "scan", "flushdb", "flushall", "expire", "pexpire"):
        assert after.get(f"cmdstat_{name}", {}).get("calls") == before.get(
            f"cmdstat_{name}", {}
        ).get("calls")


@pytest.mark.parametrize("count", [3999, 4000, 4001, 20_000])
async def test_a_long_append_is_whole(cp: Store, count: int) -> None:
    """It may have more messages than the server's Lua can unpack at once."""
    assert await cp.append("t", [{"n": n} for n in range(count)]) == count
    assert [message["n"] for message in await cp.read("t")] == list(range(count))
    assert await cp.append("t", [{"n": n} for n in range(count)]) == 2 * count


async def test_a_large_extra_is_whole(cp: Store) -> None:
    """It may have more keys than the server's Lua can unpack at once."""
    extra = {f"k{n}": n for n in range(10_001)}
    await cp.save_extra("t", extra)
    data = await cp.load("t")
    assert data is not None
    assert data.extra == extra


async def test_a_list_of_many_threads_is_read_in_pages(cp: Store) -> None:
    """Pages of any size have the same threads in the same order."""
    names = [f"t{n:05}" for n in range(2500)]
    await asyncio.gather(*(cp.append(name, [{}]) for name in names))
    for limit in (1, 999, 1000, 1001, 2000, 2499, 2500, 10_000):
        listed = await cp.list_threads(limit=limit)
        assert [info.thread_id for info in listed] == names[:limit]

    listed = await cp.list_threads(prefix="t01", after="t01500", limit=5000)
    assert [info.thread_id for info in listed] == names[1501:2000]
