"""A full pool, cancelled callers, the caller's own client, and closing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Literal

import pytest
import redis
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, Closed, ToolCall
from cpkit_redis import RedisCheckpointer
from tests.redis.proxy import Proxy
from tests.servers.redis import RedisServer

Store = RedisCheckpointer[Any]


@pytest.mark.parametrize("size", [1, 3])
async def test_hundreds_of_tasks_share_a_few_connections(
    proxy: Proxy, prefix: str, size: int
) -> None:
    """Each caller waits for a connection, and gets its own answer."""

    async def work(number: int) -> None:
        thread = f"t{number}"
        assert await cp.append(thread, [{"n": number}]) == 1
        assert await cp.read(thread) == [{"n": number}]
        call = ToolCall("c", "x", {"n": number}, f"k{number}")
        assert await cp.record_issued(thread, call) is None
        found = await cp.find_call(f"k{number}")
        assert found is not None
        assert found.call == call

    async with Store(proxy.url, prefix=prefix, pool_size=size) as cp:
        await asyncio.gather(*(work(number) for number in range(300)))
        assert proxy.open_connections <= size

    await proxy.hung_up()


@pytest.mark.parametrize("how", ["drop", "reset"])
async def test_forgotten_connections_fail_one_operation(
    proxy: Proxy, prefix: str, how: Literal["drop", "reset"]
) -> None:
    """A firewall forgets all idle connections alike: one failure retires them all."""
    limits = {"timeout": 0.5 * slowdown()}

    async with Store(proxy.url, prefix=prefix, notify=False, **limits) as cp:
        await cp.append("t", [{}])
        await asyncio.gather(*(cp.read("t") for _ in range(8)))
        assert proxy.open_connections == 8
        proxy.forget_connections(how)

        with pytest.raises(BackendUnavailable) as caught:
            await cp.append("t", [{}], expected_version=1)

        assert caught.value.maybe_applied
        proxy.forget()
        assert await asyncio.gather(*(cp.read("t") for _ in range(8))) == [[{}]] * 8
        # None of them was sent twice.
        assert proxy.commands.count("LRANGE") == 8


async def test_a_storm_of_cancellations_crosses_no_answers(
    proxy: Proxy, prefix: str
) -> None:
    """Cancelled at any point, a task leaves no stale answer and no half of a write."""
    random = Random(1)

    async def work(number: int) -> None:
        thread = f"t{number}"

        while True:
            await cp.append(thread, [{"n": number}, {"n": number}])
            assert {m["n"] for m in await cp.read(thread)} == {number}
            await cp.save_extra(thread, {"n": number})
            data = await cp.load(thread)
            assert data is not None
            assert data.extra == {"n": number}
            assert data.version % 2 == 0

    async with Store(proxy.url, prefix=prefix, pool_size=3) as cp:
        for _ in range(20):
            tasks = [asyncio.create_task(work(number)) for number in range(20)]

            for task in random.sample(tasks, len(tasks)):
                for _ in range(random.randrange(10)):
                    await asyncio.sleep(0)

                task.cancel()

            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(o, asyncio.CancelledError) for o in outcomes)

        assert await cp.append("after", [{}]) == 1
        assert proxy.open_connections <= 3

    await proxy.hung_up()


async def test_cancelled_operations_leak_no_connection(
    url: str, raw: Any, prefix: str
) -> None:
    """The server has ``pool_size`` connections at most, and none after closing."""
    random = Random(2)
    name = prefix
    separator = "&" if "?" in url else "?"

    async def at_most(count: int) -> None:
        """Return when the server has noticed that the other connections are closed."""
        while sum(one["name"] == name for one in await raw.client_list()) > count:
            assert await raw.ping()

    async with Store(
        f"{url}{separator}client_name={name}", prefix=prefix, pool_size=3
    ) as cp:
        uses: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: cp.load("t"),
            lambda: cp.append("t", [{}]),
            lambda: cp.find_call("k"),
            lambda: cp.list_threads(),
            lambda: cp.list_calls("t"),
        ]

        for _ in range(100):
            tasks = [asyncio.create_task(use()) for use in uses]

            for _ in range(random.randrange(12)):
                await asyncio.sleep(0)

            for task in tasks:
                task.cancel()

            await asyncio.gather(*tasks, return_exceptions=True)

        # As many at once as there are connections, so a lost one would be missed.
        await asyncio.gather(*(cp.append(f"u{i}", [{}]) for i in range(3)))
        assert await asyncio.gather(*(cp.read(f"u{i}") for i in range(3))) == [[{}]] * 3

        await at_most(3)

    await at_most(0)


async def test_closing_waits_for_operations_in_flight(servers: Any) -> None:
    """A write and a read in flight return; a later operation raises ``Closed``."""
    server: RedisServer = servers()
    cp = await Store(server.url).__aenter__()
    await cp.append("t", [{}])
    server.pause()
    write = asyncio.create_task(cp.append("t", [{}]))
    read = asyncio.create_task(cp.list_threads())
    await asyncio.sleep(0.05)
    closing = [asyncio.create_task(cp.aclose()) for _ in range(3)]
    await asyncio.sleep(0)
    closing[0].cancel()

    with pytest.raises(Closed):
        await cp.append("t", [{}])

    server.resume()
    assert await write == 2
    assert len(await read) == 1
    await asyncio.gather(*closing[1:])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 20, 100])
async def test_an_open_cancelled_anywhere_leaks_nothing(
    proxy: Proxy, prefix: str, count: int
) -> None:
    """No connection and no task is left, and another handle can open the store."""
    cp = Store(proxy.url, prefix=prefix)
    opening = asyncio.create_task(cp.__aenter__())

    for _ in range(count):
        await asyncio.sleep(0)

    opening.cancel()

    with contextlib.suppress(asyncio.CancelledError):
        await opening

    await cp.aclose()

    with pytest.raises(Closed):
        await cp.load("t")

    async with Store(proxy.url, prefix=prefix) as again:
        assert await again.append("t", [{}]) == 1


@pytest.mark.parametrize("count", [1, 3, 10, 50])
def test_a_loop_that_ends_early_leaks_nothing(
    url: str, prefix: str, count: int
) -> None:
    """``asyncio.run`` cancels an open or writes in flight, and the store is whole."""

    async def use() -> None:
        async with Store(url, prefix=prefix) as cp:
            while True:
                await asyncio.gather(*(cp.append("t", [{}]) for _ in range(3)))

    async def leave() -> None:
        task = asyncio.create_task(use())

        for _ in range(count):
            await asyncio.sleep(0)

        assert not task.done()

    asyncio.run(leave())

    async def look() -> None:
        async with Store(url, prefix=prefix) as cp:
            version = len(await cp.read("t"))
            assert await cp.append("t", [{}]) == version + 1

    asyncio.run(look())


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_client_in_place_of_a_url(url: str, prefix: str, protocol: int) -> None:
    """The handle uses its settings, whatever its protocol, and does not close it."""
    async with Redis.from_url(url, protocol=protocol) as client:
        async with Store(client, prefix=prefix) as cp:
            await cp.append("t", [{"n": 1}])
            await cp.save_extra("t", {"a": 1})
            await cp.record_issued("t", ToolCall("c", "x", {}, "k"))
            data = await cp.load("t")
            assert data is not None
            assert data.extra == {"a": 1}
            assert [record.call.call_id for record in data.pending] == ["c"]
            assert len(await cp.list_calls("t")) == 1
            assert [info.thread_id for info in await cp.list_threads()] == ["t"]
            assert cp.durability.survives == "process"

        assert await client.ping()


async def test_a_clients_own_retries_are_not_made(proxy: Proxy, prefix: str) -> None:
    """A client retries by default; the handle sends a write once."""
    async with (
        Redis.from_url(proxy.url) as client,
        Store(client, notify=False, prefix=prefix) as cp,
    ):
        assert await cp.append("t", [{}]) == 1
        proxy.forget()
        proxy.answers, proxy.once = "cut", True
        [outcome] = await asyncio.gather(cp.append("t", [{}]), return_exceptions=True)
        assert getattr(outcome, "maybe_applied", None) is True
        assert proxy.commands == ["EVALSHA"]
        assert len(await cp.read("t")) == 2


async def test_a_client_that_decodes_is_refused(url: str) -> None:
    """The driver needs bytes; the message says which option to change."""
    async with Redis.from_url(url, decode_responses=True) as client:
        with pytest.raises(ValueError, match="decode_responses=False"):
            Store(client)


@pytest.mark.parametrize(
    "make",
    [
        lambda url: redis.Redis.from_url(url),
        lambda url: RedisCluster.from_url(url),
        lambda url: None,
    ],
    ids=["sync", "cluster", "none"],
)
async def test_another_client_is_refused(url: str, make: Callable[[str], Any]) -> None:
    """``TypeError`` is raised before anything is sent."""
    with pytest.raises(TypeError, match=r"redis\.asyncio\.Redis"):
        Store(make(url))
