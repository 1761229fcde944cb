"""A store that is emptied or replaced under an open handle, or that lost a key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis

from cpkit import BackendUnavailable, CorruptThread, ThreadDump, ToolCall
from cpkit_redis import RedisCheckpointer
from tests.redis.test_faults import THEN
from tests.redis.test_keys import keys_of
from tests.servers.redis import RedisServer

Store = RedisCheckpointer[Any]
Servers = Callable[..., RedisServer]

OPERATIONS: dict[str, Callable[[Store], Coroutine[Any, Any, Any]]] = {
    "append": lambda cp: cp.append("t", [{}]),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 1}),
    "claim": lambda cp: cp.record_issued("u", ToolCall("d", "pay", {}, "k")),
    "result": lambda cp: cp.record_result("t", "c", 1),
    "delete": lambda cp: cp.delete_thread("t"),
    "restore": lambda cp: cp.restore_thread(ThreadDump("v", [{}], {}, [], THEN, THEN)),
    "find_completed": lambda cp: cp.find_completed("k"),
    "load": lambda cp: cp.load("t"),
    "read": lambda cp: cp.read("t"),
    "list_calls": lambda cp: cp.list_calls("t"),
    "list_threads": lambda cp: cp.list_threads(),
    "dump": lambda cp: cp.dump_thread("t"),
}


async def paid(cp: Store) -> None:
    """Record a call that was paid."""
    await cp.append("t", [{}])
    assert await cp.record_issued("t", ToolCall("c", "pay", {}, "k")) is None
    await cp.record_result("t", "c", {"paid": True})


async def is_refused(cp: Store) -> None:
    """Return when every operation said that the store has vanished."""
    for operation in OPERATIONS.values():
        with pytest.raises(BackendUnavailable, match="VANISHED.*emptied") as caught:
            await operation(cp)

        assert caught.value.rejected
        assert not caught.value.maybe_applied


async def test_an_emptied_store_is_not_used_further(servers: Servers) -> None:
    """FLUSHDB, as a web framework's ``cache.clear()`` sends it: no key is free again.

    It stays an error when another process has made a new store in its place.
    """
    server = servers()

    async with Store(server.url) as cp, Redis.from_url(server.url) as raw:
        await paid(cp)
        await raw.flushdb()
        await is_refused(cp)
        assert await raw.dbsize() == 0

        async with Store(server.url) as other:
            assert await other.find_completed("k") is None
            await is_refused(cp)
            assert await raw.keys() == [b"{cpkit}:schema"]


async def test_a_lost_schema_key_stops_the_handle(
    cp: Store, raw: Any, prefix: str
) -> None:
    """A janitor or an eviction took it, and maybe other keys with it."""
    await paid(cp)
    await raw.delete(f"{{{prefix}}}:schema")
    left = await keys_of(raw, prefix)
    await is_refused(cp)
    assert await keys_of(raw, prefix) == left


async def test_a_restart_without_a_file_is_noticed(servers: Servers) -> None:
    """The server comes back empty; the handle has connected again by itself."""
    server = servers(appendonly=False)

    async with Store(server.url) as cp:
        await paid(cp)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await is_refused(cp)

        async with Redis.from_url(server.url) as raw:
            assert await raw.dbsize() == 0


async def test_a_swapped_database_is_noticed(servers: Servers) -> None:
    """SWAPDB puts another store in the place; swapped back, the handle goes on."""
    server = servers()

    async with (
        Store(server.url) as cp,
        Store(f"{server.url[:-1]}1") as other,
        Redis.from_url(server.url) as raw,
    ):
        await paid(cp)
        await paid(other)
        await raw.swapdb(0, 1)
        await is_refused(cp)
        await is_refused(other)
        await raw.swapdb(0, 1)
        assert await cp.append("t", [{}]) == 2


async def test_a_store_of_an_earlier_version_has_no_id(
    url: str, raw: Any, prefix: str
) -> None:
    """It stays as it is, and an empty place is noticed all the same."""
    await raw.set(f"{{{prefix}}}:schema", 1)

    async with Store(url, prefix=prefix) as cp:
        await paid(cp)
        assert await raw.get(f"{{{prefix}}}:schema") == b"1"
        await raw.delete(*await keys_of(raw, prefix))
        await is_refused(cp)


async def test_a_store_without_its_schema_is_not_taken_for_a_new_one(
    cp: Store, url: str, raw: Any, prefix: str
) -> None:
    """Other keys may be lost too, and a person decides; the message has the cure."""
    await paid(cp)
    schema = f"{{{prefix}}}:schema"
    await raw.delete(schema)

    with pytest.raises(BackendUnavailable, match="LOST.*restore a backup") as caught:
        async with Store(url, prefix=prefix):
            pytest.fail("it opened")

    assert caught.value.rejected
    assert not await raw.exists(schema)
    await raw.set(schema, 1)

    async with Store(url, prefix=prefix) as again:
        assert await again.find_completed("k") is not None


@pytest.mark.parametrize("left", ["m", "x", "p"])
@pytest.mark.parametrize("operation", ["load", "read", "dump"])
async def test_a_thread_that_lost_its_times_is_corrupt(
    cp: Store, raw: Any, prefix: str, left: str, operation: str
) -> None:
    """An eviction took one of its keys: it is not a thread that never was."""
    await cp.append("t", [{}], extra={"a": 1})
    await cp.record_issued("t", ToolCall("c", "pay", {}, "k"))
    lost = {"t", "m", "x", "p"} - {left}
    await raw.delete(*(f"{{{prefix}}}:{kind}:t" for kind in lost))

    with pytest.raises(CorruptThread, match="times"):
        await OPERATIONS[operation](cp)
