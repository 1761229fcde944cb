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
        ({"appendonly": "no", "save": "900 1"}, "none", "since the last snapshot"),
        (
            {"appendonly": "no", "save": ""},
            "none",
            "loses everything: CONFIG SET appendonly yes",
        ),
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
