"""A new store on the shared server, a plain client, a proxy, and private servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from cpkit_redis import RedisCheckpointer
from tests.redis.proxy import Proxy
from tests.servers.redis import RedisServer, shared_redis


@pytest.fixture
def prefix() -> str:
    """A prefix that no test has used."""
    return f"test-{uuid4().hex}"


@pytest.fixture
def url() -> str:
    """The URL of the shared server."""
    return shared_redis()


@pytest.fixture
async def raw(url: str) -> AsyncIterator[Any]:
    """A plain client of the shared server, to read and damage stored values."""
    async with Redis.from_url(url) as client:
        yield client


@pytest.fixture
async def cp(url: str, prefix: str) -> AsyncIterator[RedisCheckpointer[Any]]:
    """An open handle of a new store on the shared server."""
    async with RedisCheckpointer[Any](url, prefix=prefix) as store:
        yield store


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the shared server."""
    async with Proxy(url) as standing:
        yield standing


@pytest.fixture
def servers() -> Iterator[Callable[..., RedisServer]]:
    """Start private servers, which stop after the test."""
    started: list[RedisServer] = []

    def start(**options: Any) -> RedisServer:
        server = RedisServer(**options)
        started.append(server)
        server.start()
        return server

    yield start

    for server in started:
        server.close()
