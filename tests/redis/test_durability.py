"""What an acknowledged write survives, by the server's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from cpkit import StatesDurability, Survives
from cpkit_redis import RedisCheckpointer
from tests.servers.redis import RedisServer

Store = RedisCheckpointer[Any]


@pytest.fixture
async def server(servers: Callable[..., RedisServer]) -> RedisServer:
    return servers()


@pytest.mark.parametrize(
    ("settings", "survives", "words"),
    [
        ({"appendfsync": "always"}, "machine", "appendfsync=always"),
        (
            {"appendfsync": "always", "no-appendfsync-on-rewrite": "yes"},
            "process",
            "CONFIG SET no-appendfsync-on-rewrite no",
        ),
        (
            {"appendfsync": "always", "aof-load-truncated": "yes"},
            "process",
            "CONFIG SET aof-load-truncated no",
        ),
        ({"appendfsync": "everysec"}, "process", "about the last second"),
        (
            {"appendfsync": "everysec", "aof-load-truncated": "yes"},
            "process",
            "CONFIG SET aof-load-truncated no",
        ),
        ({"appendfsync": "no"}, "process", "the last half minute"),
        ({"appendonly": "no"}, "none", "CONFIG SET appendonly yes"),
        (
            {"appendfsync": "always", "maxmemory-policy": "allkeys-lru"},
            "machine",
            "maxmemory-policy=allkeys-lru",
        ),
        (
            {
                "appendfsync": "always",
                "maxmemory-policy": "allkeys-lru",
                "maxmemory": "100mb",
            },
            "none",
            "evicts any key when its memory is full (allkeys-lru)",
        ),
        (
            {"maxmemory-policy": "volatile-lru", "maxmemory": "100mb"},
            "process",
            "about the last second",
        ),
    ],
)
async def test_durability_follows_the_settings(
    server: RedisServer, settings: dict[str, str], survives: str, words: str
) -> None:
    """It has a level, the settings, and advice that names the setting to change."""
    async with Redis.from_url(server.url) as raw:
        for name, value in settings.items():
            await raw.config_set(name, value)

    async with Store(server.url) as cp:
        assert cp.durability.survives == survives
        assert words in cp.durability.words


@pytest.mark.parametrize("waits_for_snapshot", [False, True])
async def test_a_file_that_was_just_switched_on_is_not_there_yet(
    servers: Callable[..., RedisServer], waits_for_snapshot: bool
) -> None:
    """Until its first rewrite ends, a restart loses everything."""
    server = servers(appendonly=False, appendfsync="always")

    async with Redis.from_url(server.url) as raw:
        await raw.set("other", 1)
        await raw.config_set("rdb-key-save-delay", 60_000_000)  # microseconds

        if waits_for_snapshot:
            await raw.bgsave()

        await raw.config_set("appendonly", "yes")

        async with Store(server.url) as cp:
            assert cp.durability.survives == "none"
            assert "a restart loses everything until the rewrite" in cp.durability.words

        await raw.config_set("appendonly", "no")
        await raw.config_set("rdb-key-save-delay", 0)

        if waits_for_snapshot:
            return  # it goes on with the delay that it began with

        await raw.config_set("appendonly", "yes")

        while (await raw.info("persistence"))["aof_rewrite_in_progress"]:
            continue

        async with Store(server.url) as cp:
            assert cp.durability.survives == "machine"


async def test_evicted_keys_are_mentioned(server: RedisServer) -> None:
    """Also when the policy is a safe one again."""
    async with Redis.from_url(server.url) as raw:
        await raw.config_set("maxmemory-policy", "allkeys-random")
        await raw.config_set("maxmemory", "3mb")

        while not (await raw.info("stats"))["evicted_keys"]:
            await raw.rpush("large", "x" * 100_000)
            await raw.set(f"key {await raw.dbsize()}", 1)

        await raw.config_set("maxmemory-policy", "noeviction")
        await raw.config_set("maxmemory", 0)

    async with Store(server.url) as cp:
        assert "keys of this store may be among them" in cp.durability.words
        assert cp.durability.survives == "process"


async def test_little_memory_is_mentioned(server: RedisServer) -> None:
    """Before the server refuses writes."""
    async with Redis.from_url(server.url) as raw:
        # Not sent: the buffers of a client count, and come and go.
        await raw.setrange("large", 20_000_000, "x")
        used = (await raw.info("memory"))["used_memory"]

        for limit, is_told in ((1.5, False), (1.05, True)):
            await raw.config_set("maxmemory", int(limit * used))

            async with Store(server.url) as cp:
                assert ("to more" in cp.durability.words) == is_told


async def test_a_replica_that_does_not_follow_is_mentioned(
    servers: Callable[..., RedisServer],
) -> None:
    """It is not a replacement for the server."""
    first = servers(settings={"repl-diskless-sync-delay": "600"})
    second = servers(settings={"replicaof": f"127.0.0.1 {first.port}"})

    async with Redis.from_url(first.url) as raw:
        while "slave0" not in await raw.info("replication"):
            continue

    async with Store(first.url) as cp:
        words = f"127.0.0.1:{second.port} does not follow (state wait_bgsave"
        assert words in cp.durability.words


async def test_replicas_are_mentioned(servers: Callable[..., RedisServer]) -> None:
    """A failover can lose writes that the replica does not have yet."""
    first, second = servers(), servers()

    async with Redis.from_url(second.url) as replica, Redis.from_url(first.url) as raw:
        await replica.replicaof("127.0.0.1", str(first.port))

        while not (await raw.info("replication"))["connected_slaves"]:
            assert await raw.ping()

    async with Store(first.url) as cp:
        assert "failover" in cp.durability.words


@pytest.mark.parametrize(
    ("rules", "survives", "words"),
    [
        (
            "-config",
            "process",
            "how often the append-only file is synced could not be read",
        ),
        ("-info", "process", "about the last second"),
        (
            "-config -info",
            "none",
            "append-only file could not be read: allow CONFIG GET",
        ),
    ],
)
async def test_unreadable_settings_are_mentioned(
    servers: Callable[..., RedisServer], rules: str, survives: str, words: str
) -> None:
    """Managed services, and users with few rights, may not use CONFIG or INFO."""
    server = servers(users=[f"user agent on >password ~* +@all {rules}"])

    async with Store(f"redis://agent:password@127.0.0.1:{server.port}") as cp:
        assert cp.durability.survives == survives
        assert words in cp.durability.words


def test_a_handle_that_is_not_open_promises_nothing() -> None:
    """It does not know the server's settings yet."""
    cp = Store("redis://localhost")
    assert isinstance(cp, StatesDurability)
    assert cp.durability.survives is Survives.NONE
