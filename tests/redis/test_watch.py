"""Publish/subscribe, by watches that would poll once a day: only notifications wake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from cpkit import ToolCall
from cpkit.driver import Append, Conflict
from cpkit_redis import RedisCheckpointer, RedisStore
from tests.servers.redis import RedisServer

Store = RedisCheckpointer[Any]

NEVER = 86_400.0


@asynccontextmanager
async def listening(
    cp: Store, raw: Redis, prefix: str, *threads: str
) -> AsyncIterator[AsyncIterator[str]]:
    """Watch, and begin when the handle is subscribed."""
    channel = f"{{{prefix}}}:changes".encode()

    async with cp.watch(*threads) as changes:
        while not dict(await raw.pubsub_numsub(channel))[channel]:
            pass

        yield changes


async def test_a_notification_wakes(url: str, prefix: str, raw: Redis) -> None:
    """Changes of another handle wake without a poll, of any id."""
    ids = ["t", "a'b\"%{}", "ü" * 256]

    async with (
        Store(url, prefix=prefix, poll=NEVER) as cp,
        Store(url, prefix=prefix) as other,
        listening(cp, raw, prefix, *ids) as changes,
    ):
        for thread in ids:
            await other.append(thread, [{"n": 1}])
            assert await anext(changes) == thread

            await other.save_extra(thread, {"a": 1})
            assert await anext(changes) == thread


async def test_a_lost_connection_leaves_no_gap(
    url: str, prefix: str, raw: Redis
) -> None:
    """What changed while the subscription was lost is yielded after it."""
    async with (
        Store(url, prefix=prefix, poll=NEVER) as cp,
        Store(url, prefix=prefix) as other,
        listening(cp, raw, prefix, "t") as changes,
    ):
        for n in range(3):
            await raw.client_kill_filter(_type="pubsub")
            await other.append("t", [{"n": n}])
            assert await anext(changes) == "t"


async def test_a_batch_is_one_notification(url: str, prefix: str, raw: Redis) -> None:
    """It has each thread that changed once, and none that did not."""
    channel = f"{{{prefix}}}:changes"

    async with (
        Store(url, prefix=prefix) as cp,
        Store(url, prefix=prefix, notify=False) as silent,
        raw.pubsub() as heard,
    ):
        await heard.subscribe(channel)
        await heard.get_message(timeout=5)
        assert isinstance(cp.store, RedisStore)
        assert isinstance(silent.store, RedisStore)
        await silent.store.commit([Append("c", [b"{}"], None)])
        names = ["a", "b", "a", "held", "a"]
        writes = [Append(name, [b"{}"], None) for name in names]
        writes[3] = writes[3]._replace(expected_version=9)
        assert await cp.store.commit(writes) == [1, 1, 2, Conflict(0), 3]
        message = await heard.get_message(timeout=5)
        assert message is not None
        assert sorted(message["data"].split(b"\0")) == [b"a", b"b"]


async def test_a_user_without_the_rights_polls(
    servers: Callable[..., RedisServer], prefix: str
) -> None:
    """A user that may neither publish nor subscribe still watches."""
    server = servers()

    client: Any = Redis.from_url(server.url)

    async with client as raw:
        await raw.execute_command(
            *f"ACL SETUSER quiet on >x ~{{{prefix}}}:* resetchannels +@all".split()
        )

    url = server.url.replace("://", "://quiet:x@")

    async with (
        Store(url, prefix=prefix, poll=0.02) as cp,
        Store(url, prefix=prefix) as other,
        cp.watch("t") as changes,
    ):
        for n in range(3):
            await other.append("t", [{"n": n}])
            assert await anext(changes) == "t"


async def test_each_change_has_a_later_time(url: str, prefix: str, raw: Redis) -> None:
    """A marker changes although the server's clock is behind the thread's times."""
    async with Store(url, prefix=prefix) as cp:
        assert isinstance(cp.store, RedisStore)
        await cp.record_issued("t", ToolCall("c", "pay", {}, "k"))
        await raw.hset(f"{{{prefix}}}:t:t", "updated", 2**52)
        seen = [await cp.store.markers(["t"])]

        for n in range(3):
            await cp.save_extra("t", {"a": n})
            seen.append(await cp.store.markers(["t"]))

        await cp.record_result("t", "c", 1)
        seen.append(await cp.store.markers(["t"]))
        await cp.delete_thread("t")
        seen.append(await cp.store.markers(["t"]))
        assert len({str(one) for one in seen}) == len(seen)


async def test_a_restore_changes_the_marker(cp: Store) -> None:
    """A poll sees a deleted and restored thread, although its times are the same."""
    assert isinstance(cp.store, RedisStore)
    await cp.record_issued("t", ToolCall("c", "pay", {}, "k"))
    dump = await cp.dump_thread("t")
    assert dump is not None
    seen = [await cp.store.markers(["t"])]

    for _ in range(2):
        await cp.delete_thread("t", forget_keys=True)
        await cp.restore_thread(dump)
        seen.append(await cp.store.markers(["t"]))
        assert seen[-1] == await cp.store.markers(None)

    assert len({str(one) for one in seen}) == len(seen)
