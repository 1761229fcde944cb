"""A restored thread is copied in parts, and appears in one step or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from redis.asyncio import Redis

from cpkit import (
    BackendUnavailable,
    CallRecord,
    KeyTaken,
    PayloadTooLarge,
    ThreadDump,
    ToolCall,
    VersionConflict,
)
from cpkit.driver import Append, Restore
from cpkit_redis import RedisCheckpointer, RedisStore
from cpkit_redis.operations import copy_thread
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


async def test_a_large_thread_is_restored(cp: Store, raw: Any, prefix: str) -> None:
    """It is copied in many parts, and none of its keys expires afterwards."""
    dump = a_dump(messages=12_000, text="x" * 1000, calls=12_000)
    await cp.restore_thread(dump)
    assert await cp.dump_thread("t") == dump
    own = [key for key in await keys_of(raw, prefix) if key.endswith(b":t")]
    assert own == [f"{prefix}:{{0}}:{kind}:t".encode() for kind in "cmtx"]
    assert [await raw.ttl(key) for key in own] == [-1] * 4


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


async def test_a_refused_restore_leaves_no_copy(
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


async def test_a_full_server_keeps_no_copy(servers: Servers) -> None:
    """The driver removes the parts that were written."""
    server = servers(settings={"maxmemory-policy": "noeviction"})

    async with Store(server.url) as cp, Redis.from_url(server.url) as raw:
        before = await keys_of(raw, "cpkit")
        await raw.config_set("maxmemory", "1")

        with pytest.raises(BackendUnavailable, match="OOM") as caught:
            await cp.restore_thread(a_dump())

        assert not caught.value.maybe_applied
        assert await keys_of(raw, "cpkit") == before


async def test_an_interrupted_copy_is_repeated(
    proxy: Proxy, prefix: str, raw: Any
) -> None:
    """Nothing of the thread was written, so the restore is repeated."""
    async with Store(proxy.url, prefix=prefix) as cp:
        proxy.answers, proxy.once = "cut", True
        await cp.restore_thread(a_dump())
        assert await cp.dump_thread("t") == a_dump()

    for key in await keys_of(raw, prefix):
        assert await raw.ttl(key) == -1 or b":copy-" in key


async def test_an_abandoned_copy_expires(proxy: Proxy, prefix: str, raw: Any) -> None:
    """Its keys live a minute longer than the operation may take."""
    async with Store(proxy.url, prefix=prefix, timeout=0.3, connect_timeout=0.1) as cp:
        proxy.answers = "swallow"

        with pytest.raises(BackendUnavailable) as caught:
            await cp.restore_thread(a_dump())

        assert not caught.value.maybe_applied

    copies = [key for key in await keys_of(raw, prefix) if b":copy-" in key]
    assert copies
    assert all([0 < await raw.ttl(key) <= 61 for key in copies])


async def test_a_restore_whose_answer_is_lost_may_be_applied(
    proxy: Proxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last step changes the thread."""
    async with Store(proxy.url, prefix=prefix) as cp:

        async def copy_and_cut(*given: Any) -> bytes:
            sizes = await copy_thread(*given)
            proxy.answers, proxy.once = "cut", True
            return sizes

        monkeypatch.setattr("cpkit_redis.store.copy_thread", copy_and_cut)

        with pytest.raises(BackendUnavailable) as caught:
            await cp.restore_thread(a_dump())

        assert caught.value.maybe_applied
        assert await cp.dump_thread("t") == a_dump()


async def test_an_incomplete_copy_is_refused(
    cp: Store, raw: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that evicts keys may have removed a part of it."""

    async def copy_and_evict(ask: Any, write: Any, copy: bytes, *given: Any) -> bytes:
        sizes = await copy_thread(ask, write, copy, *given)
        await raw.delete(copy + b"m")
        return sizes

    monkeypatch.setattr("cpkit_redis.store.copy_thread", copy_and_evict)

    with pytest.raises(BackendUnavailable, match="not complete"):
        await cp.restore_thread(a_dump())

    assert await cp.dump_thread("t") is None


@pytest.mark.long
async def test_more_than_a_million_messages_at_once(url: str, prefix: str) -> None:
    """Redis before 7 takes a million arguments in one command."""
    store = RedisStore(url, RedisOptions(prefix=prefix))
    bodies = [b"0"] * 1_100_000

    try:
        await store.open()
        assert await store.commit([Append("t", bodies, 0)]) == [1_100_000]
        assert await store.commit([Restore("u", bodies, [], [], 1, 2)]) == [None]
        assert await store.messages("u", -1, None, lambda rows, _: list(rows)) == [b"0"]
        assert [one.version for one in await store.threads("", None, 9, False)] == [
            1_100_000,
            1_100_000,
        ]
    finally:
        await store.close()


async def test_the_server_lowers_the_limits(servers: Servers) -> None:
    """A value and an append have half of an argument; a restore is not limited.

    The argument has room for the other fields of a call.
    """
    server = servers(settings={"proto-max-bulk-len": "1mb"})
    half = 510 * 1024

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

        dump = a_dump(messages=30, text="x" * 100_000)
        await cp.restore_thread(dump)
        assert await cp.dump_thread("t") == dump


async def test_a_call_of_two_large_values_is_restored(servers: Servers) -> None:
    """Its args and its result have the largest size, and its ids the longest."""
    server = servers(settings={"proto-max-bulk-len": "1mb"})

    async with Store(server.url) as cp:
        largest = cp.limits.max_value
        args = {"a": "x" * (largest - len('{"a":""}'))}
        await cp.record_issued("t", ToolCall("c" * 512, "p" * 512, args, "k" * 512))
        await cp.record_result("t", "c" * 512, "y" * (largest - 2))
        dump = await cp.dump_thread("t")
        assert dump is not None
        await cp.delete_thread("t", forget_keys=True)
        await cp.restore_thread(dump)
        assert await cp.dump_thread("t") == dump
