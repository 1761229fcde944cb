"""An append-only file that ends inside a transaction, as a power loss may leave it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from cpkit import ToolCall
from cpkit_redis import RedisCheckpointer
from tests.servers.redis import RedisServer
from tests.sweeps import sweep

Store = RedisCheckpointer[Any]
Servers = Callable[..., RedisServer]

COMMANDS = ["MULTI", "RPUSH", "HSET extra", "HSET times", "EXEC"]
"""What the server logs for an append with extra."""

FIRST = ([{"n": 0}], {"n": 0})


async def cut_inside(server: RedisServer, command: str) -> None:
    """Append twice, kill the server, and cut its log inside the second append."""
    async with Store(server.url) as cp:
        await cp.append("t", [{"n": 0}], extra={"n": 0})
        kept = server.log_of_writes.stat().st_size
        await cp.append("t", [{"n": 1}], extra={"n": 1})

    server.kill()
    log = server.log_of_writes.read_bytes()
    starts = [kept + found.start() for found in re.finditer(rb"(?m)^\*", log[kept:])]
    assert len(starts) == len(COMMANDS)
    ends = [*starts[1:], len(log)]
    at = COMMANDS.index(command)
    server.log_of_writes.write_bytes(log[: (starts[at] + ends[at]) // 2])


async def stored(server: RedisServer, thread: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the messages and the extra of a thread."""
    async with Store(server.url) as cp:
        data = await cp.load(thread)
        assert data is not None
        return data.messages, data.extra


async def write_and_restart(server: RedisServer) -> None:
    """Append to another thread, and let the server read its log again."""
    async with Store(server.url) as cp:
        await cp.append("next", [{"n": 2}], extra={"n": 2})

    server.kill()
    server.start()


@pytest.mark.parametrize("command", sweep(COMMANDS, ["HSET extra"]))
async def test_a_repair_removes_the_whole_transaction(
    servers: Servers, command: str
) -> None:
    """The server starts after ``redis-check-aof --fix``, and nothing is in part."""
    server = servers(appendfsync="always", settings={"aof-load-truncated": "no"})
    await cut_inside(server, command)
    server.start()
    assert "Unexpected end of file" in server.log
    assert await stored(server, "t") == FIRST

    await write_and_restart(server)
    assert await stored(server, "t") == FIRST
    assert await stored(server, "next") == ([{"n": 2}], {"n": 2})


async def test_by_default_half_of_a_write_appears(servers: Servers) -> None:
    """Redis keeps the half in its log, and the next transaction completes it.

    This is why ``appendfsync always`` alone does not promise that a write survives a
    power loss. Where this test fails, Redis was corrected, and may promise more.
    """
    server = servers(appendfsync="always", settings={"aof-load-truncated": "yes"})
    await cut_inside(server, "HSET extra")
    server.start()
    assert await stored(server, "t") == FIRST

    await write_and_restart(server)
    assert await stored(server, "t") == ([{"n": 0}, {"n": 1}], {"n": 0})


async def test_by_default_a_key_gets_two_pending_calls(servers: Servers) -> None:
    """The half is a claim without its key, which another call claims meanwhile."""
    server = servers(appendfsync="always", settings={"aof-load-truncated": "yes"})
    threads = ["a", "b"]
    calls = {name: ToolCall(name, "pay", {}, "key") for name in threads}

    async with Store(server.url) as cp:
        assert await cp.record_issued("a", calls["a"]) is None

    server.kill()
    log = server.log_of_writes.read_bytes()
    server.log_of_writes.write_bytes(log[: log.rindex(b"ZADD")])
    server.start()

    async with Store(server.url) as cp:
        assert await cp.load("a") is None
        assert await cp.record_issued("b", calls["b"]) is None

    server.kill()
    server.start()

    async with Store(server.url) as cp:
        found = [one for name in threads for one in await cp.list_calls(name)]

    assert [one.call for one in found] == [*calls.values()]
    assert {one.status for one in found} == {"issued"}


async def test_by_default_half_of_a_deletion_removes_messages(servers: Servers) -> None:
    """The messages were acknowledged, the deletion was not."""
    server = servers(appendfsync="always", settings={"aof-load-truncated": "yes"})

    async with Store(server.url) as cp:
        await cp.append("t", [{"n": 0}], extra={"n": 0})
        kept = server.log_of_writes.stat().st_size
        await cp.delete_thread("t", forget_keys=True)

    server.kill()
    log = server.log_of_writes.read_bytes()
    # After the first UNLINK, which is that of the messages.
    second = log.index(b"UNLINK", log.index(b"UNLINK", kept) + 1)
    server.log_of_writes.write_bytes(log[:second])
    server.start()
    assert await stored(server, "t") == FIRST

    await write_and_restart(server)
    assert await stored(server, "t") == ([], {"n": 0})


async def test_a_kill_during_an_open_leaves_a_store_that_opens(
    servers: Servers,
) -> None:
    """An open makes each kind of write once; half of them may stay in the log."""
    server = servers(appendfsync="always", settings={"aof-load-truncated": "yes"})

    async with Store(server.url) as cp:
        await cp.append("t", [{"n": 0}], extra={"n": 0})

        async with Store(server.url):
            server.kill()

        log = server.log_of_writes.read_bytes()
        half = log.index(b"UNLINK", log.rindex(b"HSET"))
        server.log_of_writes.write_bytes(log[:half])
        server.start()
        await cp.load("t")  # connects again
        await cp.append("next", [{"n": 2}], extra={"n": 2})

    server.kill()
    server.start()

    async with Redis.from_url(server.url) as raw:
        assert await raw.exists("{cpkit}:rehearsal")

    assert await stored(server, "t") == FIRST


async def test_by_default_acknowledged_commands_are_lost(servers: Servers) -> None:
    """A command behind the half is taken for a part of its transaction, and lost."""
    server = servers(appendfsync="always", settings={"aof-load-truncated": "yes"})
    await cut_inside(server, "HSET extra")
    server.start()

    async with Redis.from_url(server.url) as raw:
        assert await raw.set("of another client", 1)

    server.kill()
    server.start()

    async with Redis.from_url(server.url) as raw:
        assert await raw.get("of another client") is None
