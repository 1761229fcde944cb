"""With a Sentinel's client the handle follows a failover."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import RedisError

from cpkit import BackendUnavailable
from cpkit_redis import RedisCheckpointer
from tests.servers.process import free_port
from tests.servers.redis import RedisServer, redis_binary

Store = RedisCheckpointer[Any]


@pytest.fixture
def sentinel(
    servers: Callable[..., RedisServer], tmp_path: Path
) -> Iterator[tuple[RedisServer, RedisServer, int]]:
    """A server, its replica, and the port of a Sentinel that watches them."""
    first = servers()
    # From the start: a Sentinel asks who the replicas are when it comes, and seldom
    # again.
    second = servers(settings={"replicaof": f"127.0.0.1 {first.port}"})
    port = free_port()
    conf = tmp_path / "sentinel.conf"
    conf.write_text(
        f"port {port}\n"
        f"dir {tmp_path}\n"
        f"sentinel monitor agents 127.0.0.1 {first.port} 1\n"
        "sentinel down-after-milliseconds agents 300\n"
        "sentinel failover-timeout agents 2000\n"
    )

    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [redis_binary(), str(conf), "--sentinel"], stdout=log, stderr=log
        )

    yield first, second, port
    process.kill()
    process.wait()


async def until(check: Callable[[], Awaitable[object]]) -> None:
    """Return when the check returns true; an error counts as false."""
    while True:
        with suppress(RedisError):
            if await check():
                return

        await asyncio.sleep(0.01)


async def test_a_failover_is_followed(
    sentinel: tuple[RedisServer, RedisServer, int],
) -> None:
    """The same handle reads and writes on the promoted server."""
    first, second, port = sentinel
    watch = Sentinel([("127.0.0.1", port)])  # type: ignore[no-untyped-call]  # redis-py
    client = watch.master_for("agents")
    watcher = watch.sentinels[0]

    async with Store(client, connect_timeout=15) as cp:
        assert repr(cp) == (
            "<RedisCheckpointer redis+sentinel://agents/0?prefix=cpkit>"
        )
        assert await cp.append("t", [{"n": 1}]) == 1

        async with Redis.from_url(second.url) as replica:
            await until(lambda: replica.exists("{cpkit}:t:t"))

        # It can promote only a replica that it knows.
        await until(lambda: watcher.sentinel_slaves("agents"))
        await asyncio.to_thread(first.kill)

        async def append() -> bool:
            try:
                return await cp.append("t", [{"n": 2}], expected_version=1) == 2
            except BackendUnavailable:
                return False

        await until(append)
        assert await cp.read("t") == [{"n": 1}, {"n": 2}]

    await client.aclose()
    await watcher.aclose()
