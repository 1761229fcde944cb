"""A thread is restored by one call of the script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from cpkit import (
    CallRecord,
    KeyTaken,
    PayloadTooLarge,
    ThreadDump,
    ToolCall,
    VersionConflict,
)
from cpkit.driver import Append, Restore
from cpkit_redis import RedisCheckpointer, RedisStore
from cpkit_redis.store import RedisOptions
from tests.redis.proxy import Proxy
from tests.redis.test_keys import keys_of
from tests.servers.redis import RedisServer

Store = RedisCheckpointer[Any]
Servers = Callable[..., RedisServer]

THEN = datetime(2026, 1, 1, tzinfo=UTC)


def a_call(number: int, **changes: Any) -> CallRecord:
    call = ToolCall(f"c{number}", "pay", {"n": number}, f"k{number}")
    record = CallRecord("t", call, "completed", 1, THEN, {"n": number}, THEN)
    return replace(record, **changes)


def a_dump(messages: int = 2, text: str = "x", calls: int = 2) -> ThreadDump:
    bodies: list[Any] = [{"n": n, "text": text} for n in range(messages)]
    extra = {f"e{n}": n for n in range(calls)}
    records = [a_call(n) for n in range(calls)]
    return ThreadDump("t", bodies, extra, records, THEN, THEN)


async def test_a_large_thread_is_restored(proxy: Proxy, raw: Any, prefix: str) -> None:
    """In one call, although the server's Lua cannot unpack as many values."""
    dump = a_dump(messages=9000, text="x" * 100, calls=9000)

    async with Store(proxy.url, prefix=prefix) as cp:
        proxy.forget()
        await cp.restore_thread(dump)
        assert proxy.trips == 1
        assert await cp.dump_thread("t") == dump

    own = [key for key in await keys_of(raw, prefix) if key.endswith(b":t")]
    assert own == [f"{{{prefix}}}:{kind}:t".encode() for kind in "cmtx"]


async def test_attempts_may_be_restored_in_any_order(cp: Store) -> None:
    """A key's second attempt may be restored before the first, of another thread."""
    second = a_call(2, attempt=2)
    key = second.call.idempotency_key
    await cp.restore_thread(replace(a_dump(), calls=[second]))
    call = ToolCall("c1", "pay", {}, key)
    first = a_call(1, thread_id="u", call=call, status="failed", attempt=1)

    with pytest.raises(KeyTaken):
        await cp.restore_thread(
            ThreadDump("u", [], {}, [replace(first, status="completed")], THEN, THEN)
        )

    await cp.restore_thread(ThreadDump("u", [], {}, [first], THEN, THEN))
    assert await cp.find_call(key) == second
    assert await cp.list_calls("u") == [first]


async def test_a_refused_restore_changes_nothing(
    cp: Store, raw: Any, prefix: str
) -> None:
    """A thread that exists and a key that is held refuse it."""
    await cp.append("t", [{}])
    await cp.record_issued("other", ToolCall("c", "pay", {}, "k1"))
    before = await keys_of(raw, prefix)

    with pytest.raises(VersionConflict):
        await cp.restore_thread(a_dump())

    with pytest.raises(KeyTaken) as caught:
        await cp.restore_thread(
            ThreadDump("new", [{}], {}, [a_call(1, thread_id="new")], THEN, THEN)
        )

    assert caught.value.idempotency_key == "k1"
    assert caught.value.thread_id == "other"
    assert await keys_of(raw, prefix) == before


@pytest.mark.long
async def test_more_than_a_million_messages_at_once(url: str, prefix: str) -> None:
    """Redis before 7 takes a million arguments in one command."""
    store = RedisStore(url, RedisOptions(prefix=prefix))
    bodies = [b"0"] * 1_100_000

    try:
        await store.open()
        assert await store.commit([Append("t", bodies, 0)]) == [1_100_000]
        assert await store.commit([Restore("u", bodies, [], [], 1, 2)]) == [None]
        newest = await store.snapshot("u", -1, None, lambda rows, _: list(rows))
        assert newest is not None
        assert (newest.messages, newest.version) == ([b"0"], 1_100_000)
        assert [one.version for one in await store.threads("", None, 9, False)] == [
            1_100_000,
            1_100_000,
        ]
    finally:
        await store.close()


@pytest.mark.long
async def test_the_server_lowers_the_limits(servers: Servers) -> None:
    """A value, an append and a restore have half of an argument."""
    server = servers(settings={"proto-max-bulk-len": "1mb"})
    half = 512 * 1024

    async with RedisCheckpointer[Any](server.url, message_type=Any) as cp:
        assert cp.limits[:2] == (half, half)
        assert await cp.append("small", [0] * half) == half
        assert await cp.append("large", ["x" * (half - 2)]) == 1

        with pytest.raises(PayloadTooLarge):
            await cp.append("large", ["x" * (half - 1)])

        with pytest.raises(PayloadTooLarge):
            await cp.append("large", ["x" * (half - 2), 0])

        # These share a batch, but do not fit into one argument.
        versions = await asyncio.gather(
            *(cp.append("shared", ["x" * 300_000]) for _ in range(5))
        )
        assert versions == [1, 2, 3, 4, 5]

        with pytest.raises(PayloadTooLarge):
            await cp.restore_thread(a_dump(messages=30, text="x" * 100_000))

        dump = a_dump(messages=5, text="x" * 100_000)
        await cp.restore_thread(dump)
        assert await cp.dump_thread("t") == dump
