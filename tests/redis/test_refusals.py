"""A server that refuses writes: full, without its disk, a replica, or a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis

from cpkit import BackendUnavailable, ToolCall
from cpkit_redis import RedisCheckpointer
from tests.redis.proxy import Proxy
from tests.redis.test_damage import dump
from tests.servers.redis import RedisServer

Store = RedisCheckpointer[Any]
Servers = Callable[..., RedisServer]

WRITES: dict[str, Callable[[Store], Coroutine[Any, Any, Any]]] = {
    "append": lambda cp: cp.append("t", [{}]),
    "append to a new thread": lambda cp: cp.append("new", [{}] * 5000),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 1}),
    "record_issued": lambda cp: cp.record_issued("t", ToolCall("n", "x", {}, "n")),
    "record_result": lambda cp: cp.record_result("t", "c", 1),
    "delete_thread": lambda cp: cp.delete_thread("t"),
}


async def filled(cp: Store) -> None:
    await cp.append("t", [{"n": 0}])
    await cp.record_issued("t", ToolCall("c", "x", {}, "k"))


async def refused(cp: Store, raw: Any, message: str, *, but: str = "") -> None:
    """Check that every write is refused and changes nothing, and that reads work."""
    before = await dump(raw, "cpkit")

    for name, write in WRITES.items():
        if name == but:
            continue

        with pytest.raises(BackendUnavailable, match=message) as caught:
            await write(cp)

        assert not caught.value.maybe_applied
        assert caught.value.__cause__ is not None

    outcomes = await asyncio.gather(
        *(write(cp) for name, write in WRITES.items() if name != but),
        return_exceptions=True,
    )
    assert {type(outcome) for outcome in outcomes} == {BackendUnavailable}
    assert await dump(raw, "cpkit") == before
    data = await cp.load("t")
    assert data is not None
    assert data.version == 1
    assert await cp.find_call("k") is not None


async def test_a_full_server_refuses_whole_writes(servers: Servers) -> None:
    """With noeviction only deletions work until there is memory again."""
    server = servers(settings={"maxmemory-policy": "noeviction"})

    async with Store(server.url) as cp, Redis.from_url(server.url) as raw:
        await filled(cp)
        await cp.append("large", [{"text": "x" * 1000}])
        await raw.config_set("maxmemory", "1")
        await refused(cp, raw, "OOM.*maxmemory", but="delete_thread")
        await cp.delete_thread("large")
        assert await cp.load("large") is None

        async with Store(server.url) as another:
            assert await another.load("t") is not None

        await raw.config_set("maxmemory", "0")
        assert await cp.append("t", [{}], expected_version=1) == 2


async def test_a_server_without_its_disk_refuses_whole_writes(servers: Servers) -> None:
    """After a failed snapshot Redis refuses writes (MISCONF)."""
    server = servers(settings={"save": "900 1", "dbfilename": "snapshot.rdb"})

    async with Store(server.url) as cp, Redis.from_url(server.url) as raw:
        await filled(cp)
        folder = server.data / "snapshot.rdb"
        folder.mkdir()
        (folder / "in the way").write_text("")
        await raw.bgsave()

        while (await raw.info("persistence"))["rdb_last_bgsave_status"] == "ok":
            await pause()

        await refused(cp, raw, "MISCONF.*disk")
        await raw.config_set("stop-writes-on-bgsave-error", "no")
        assert await cp.append("t", [{}], expected_version=1) == 2


async def test_a_replica_refuses_writes(servers: Servers) -> None:
    """It can be read, and written as soon as it is promoted."""
    first, second = servers(), servers()

    async with (
        Store(first.url) as cp,
        Redis.from_url(second.url) as raw,
    ):
        await filled(cp)
        await raw.replicaof("127.0.0.1", str(first.port))

        while await raw.llen("cpkit:{0}:m:t") != 1:
            await pause()

        async with Store(second.url) as replica:
            await refused(replica, raw, "READONLY.*replica")
            await raw.replicaof("NO", "ONE")
            assert await replica.append("t", [{}], expected_version=1) == 2


async def test_too_few_replicas_refuse_writes(servers: Servers) -> None:
    """A server that has fewer replicas than configured refuses writes (NOREPLICAS)."""
    server = servers()

    async with Store(server.url) as cp, Redis.from_url(server.url) as raw:
        await filled(cp)
        await raw.config_set("min-replicas-to-write", "1")
        await refused(cp, raw, "NOREPLICAS")


async def test_a_failover_behind_the_address_is_followed(servers: Servers) -> None:
    """After READONLY the driver connects again: the address may be another server's."""
    first, second = servers(), servers()

    async with (
        Proxy(first.url) as proxy,
        Redis.from_url(first.url) as raw,
        Store(proxy.url) as cp,
    ):
        await asyncio.gather(*(cp.append(f"t{i}", [{}]) for i in range(20)))
        await asyncio.gather(*(cp.read(f"t{i}") for i in range(20)))
        await raw.replicaof("127.0.0.1", str(second.port))
        proxy.turn_to(second.url)

        with pytest.raises(BackendUnavailable, match="READONLY"):
            await cp.append("t", [{}])

        assert await cp.append("t", [{}]) == 1
        assert await asyncio.gather(*(cp.append(f"t{i}", [{}]) for i in range(20)))


@pytest.mark.parametrize("informed", [True, False], ids=["with INFO", "without INFO"])
async def test_a_cluster_is_refused_and_nothing_is_written(
    servers: Servers, informed: bool
) -> None:
    """Also where the user may not use INFO."""
    denied = "" if informed else " -info"
    server = servers(
        settings={"cluster-enabled": "yes"},
        users=[f"user agent on >password ~* +@all{denied}"],
    )
    url = f"redis://agent:password@127.0.0.1:{server.port}/0"

    async with Redis.from_url(server.url) as client:
        raw: Any = client
        await raw.execute_command("CLUSTER", "ADDSLOTS", *range(16384))

        while "cluster_state:ok" not in str(
            await raw.execute_command("CLUSTER", "INFO")
        ):
            await pause()

        with pytest.raises(BackendUnavailable, match="cluster") as caught:
            async with Store(url):
                pytest.fail("it opened")

        assert not caught.value.maybe_applied
        assert await raw.keys() == []


async def pause() -> None:
    await asyncio.sleep(0.005)
