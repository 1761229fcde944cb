"""A server that is killed under load, away, loading, busy, or fails over.

The table of faults is in `test_faults`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, ToolCall
from cpkit_redis import RedisCheckpointer
from tests.redis.proxy import Proxy
from tests.servers.process import free_port
from tests.servers.redis import RedisServer

Store = RedisCheckpointer[Any]
Servers = Callable[..., RedisServer]


async def test_acknowledged_writes_survive_a_kill(servers: Servers) -> None:
    """With appendfsync always each of them is stored, and stored whole.

    The threads are trimmed meanwhile: nothing newer is lost, nothing older comes back.
    """
    server = servers(appendfsync="always")
    acknowledged: dict[str, int] = {}
    trimmed: dict[str, int] = {}

    async def write(cp: Store, thread: str) -> None:
        while not over.is_set():
            try:
                version = await cp.append(thread, [{"half": 0}, {"half": 1}])
                acknowledged[thread] = version
                await cp.trim(thread, before := max(0, version - 5))
                trimmed[thread] = before
            except BackendUnavailable as exc:
                if exc.maybe_applied:
                    return

                continue

            enough.set() if version > 20 else None

    enough, over = asyncio.Event(), asyncio.Event()

    async with Store(server.url, connect_timeout=5) as cp:
        for _ in range(3):
            enough.clear()
            over.clear()
            acknowledged.clear()
            trimmed.clear()
            await asyncio.gather(*(cp.delete_thread(f"t{i}") for i in range(8)))
            writers = [asyncio.create_task(write(cp, f"t{i}")) for i in range(8)]
            await enough.wait()
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            # Some writers had no write in flight, so they do not stop by an error.
            over.set()
            await asyncio.gather(*writers)

            for thread, version in acknowledged.items():
                data = await cp.load(thread)
                assert data is not None
                assert version <= data.version <= version + 2
                assert trimmed.get(thread, 0) <= data.first <= max(0, version - 5)
                halves = [message["half"] for message in data.messages]
                assert halves == [n % 2 for n in range(data.first, data.version)]
                assert await cp.append(thread, []) == data.version


async def test_claims_survive_a_kill(servers: Servers) -> None:
    """A claimed key is still held, and a result is the same."""
    server = servers(appendfsync="always")

    async with Store(server.url) as cp:
        assert await cp.record_issued("t", ToolCall("c1", "pay", {}, "k1")) is None
        assert await cp.record_issued("t", ToolCall("c2", "pay", {}, "k2")) is None
        await cp.record_result("t", "c2", {"paid": True})
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        held = await cp.record_issued("u", ToolCall("c3", "pay", {}, "k1"))
        assert held is not None
        assert (held.thread_id, held.status) == ("t", "issued")
        done = await cp.find_completed("k2")
        assert done is not None
        assert done.result == {"paid": True}


async def test_operations_wait_for_a_server_that_is_away(servers: Servers) -> None:
    """They are sent when the server is back."""
    server = servers(appendfsync="always")

    async with Store(server.url, connect_timeout=20) as cp:
        await cp.append("t", [{}])
        await asyncio.to_thread(server.kill)
        waiting = [asyncio.create_task(cp.append("t", [{}])) for _ in range(20)]
        reading = asyncio.create_task(cp.load("t"))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(server.start)
        versions = await asyncio.gather(*waiting)
        assert versions == list(range(2, 22))
        assert await reading is not None


async def test_opening_without_a_server_fails(prefix: str) -> None:
    """The message has the address."""
    port = free_port()

    with pytest.raises(BackendUnavailable, match=f"127.0.0.1:{port}") as caught:
        async with Store(f"redis://127.0.0.1:{port}", connect_timeout=0.1):
            pytest.fail("it opened")

    assert caught.value.__cause__ is not None
    assert not caught.value.maybe_applied


async def test_opening_a_stopped_server_fails_in_time(servers: Servers) -> None:
    """Such a server accepts connections, and does not answer."""
    server = servers()
    server.pause()

    timeout = 0.3 * slowdown()
    said = f"no answer within {timeout:g} s"

    with pytest.raises(BackendUnavailable, match=said) as caught:
        async with Store(server.url, timeout=timeout):
            pytest.fail("it opened")

    assert not caught.value.maybe_applied
    server.resume()


async def test_flushed_scripts_are_sent_again(cp: Store, raw: Any) -> None:
    """At any time, and each write is applied once."""
    stop = asyncio.Event()

    async def flush() -> None:
        while not stop.is_set():
            await raw.script_flush()
            await asyncio.sleep(0)

    flushing = asyncio.create_task(flush())

    async def work(number: int) -> None:
        thread, key = f"t{number}", f"k{number}"

        for version in range(1, 11):
            assert await cp.append(thread, [{}], expected_version=version - 1)
            await cp.save_extra(thread, {f"{version}": version})

        call = ToolCall("c", "x", {}, key)
        assert await cp.record_issued(thread, call) is None
        await cp.record_result(thread, "c", number)
        record = await cp.find_completed(key)
        assert record is not None
        assert record.result == number
        data = await cp.load(thread)
        assert data is not None
        assert (data.version, len(data.extra)) == (10, 10)

    await asyncio.gather(*(work(number) for number in range(16)))
    stop.set()
    await flushing


async def test_a_batch_without_its_script_is_sent_again(
    proxy: Proxy, prefix: str, raw: Any
) -> None:
    """The second time it has the script's text; each write is applied once."""
    async with Store(proxy.url, prefix=prefix) as cp:
        await cp.append("t", [{}])
        await raw.script_flush()
        proxy.forget()
        await asyncio.gather(cp.append("t", [{}]), cp.save_extra("t", {"a": 1}))
        assert proxy.commands == ["EVALSHA", "EVAL"]
        assert len(await cp.read("t")) == 2


async def test_a_loading_server_is_waited_for(servers: Servers) -> None:
    """It accepts connections and answers LOADING until its data is loaded."""
    server = servers(
        appendonly=False,
        settings={
            "save": "900 1",
            "key-load-delay": "3000",  # microseconds a key
            "rdbcompression": "no",
        },
    )

    async with Store(server.url) as cp, Redis.from_url(server.url) as raw:
        # It looks at its clients after every two megabytes.
        large = {"text": "x" * 200_000}
        await asyncio.gather(*(cp.append(f"t{i}", [large]) for i in range(50)))
        await asyncio.to_thread(server.stop)
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        assert await cp.append("t0", [{}], expected_version=1) == 2
        await starting
        errors = await raw.info("errorstats")
        assert errors["errorstat_LOADING"]["count"] > 0


async def test_a_busy_server_is_waited_for(servers: Servers) -> None:
    """It answers BUSY while the script of another client takes long."""
    server = servers(settings={"lua-time-limit": "10"})

    async with Store(server.url) as cp, Redis.from_url(server.url) as raw:
        await cp.append("t", [{}])
        busy: asyncio.Future[Any] = asyncio.ensure_future(
            raw.eval("while true do end", 0)
        )

        async def end() -> None:
            async with Redis.from_url(server.url) as other:
                while True:
                    try:
                        await other.ping()
                    except Exception as exc:
                        if "BUSY" in str(exc):
                            break

                    await asyncio.sleep(0.005)

                written = asyncio.create_task(cp.append("t", [{}], expected_version=1))
                read = asyncio.create_task(cp.load("t"))
                await asyncio.sleep(0.1)
                assert not written.done()
                await other.script_kill()
                assert await written == 2
                assert await read is not None

        await end()

        with pytest.raises(Exception, match="killed"):
            await busy


async def test_a_swallowed_answer_is_not_taken_for_the_next(
    proxy: Proxy, prefix: str
) -> None:
    """The driver does not use that connection again."""
    limits = {"timeout": 0.1 * slowdown(), "pool_size": 1}

    async with Store(proxy.url, prefix=prefix, **limits) as cp:
        await cp.append("t", [{"n": 0}])
        proxy.answers = "swallow"

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{"n": 1}])

        proxy.answers = "pass"
        assert await cp.append("other", [{"n": 0}]) == 1
        assert await cp.append("t", [{"n": 2}]) == 3


async def test_a_failover_behind_the_address_is_followed(servers: Servers) -> None:
    """After READONLY the driver connects again: the address may be another server's."""
    first, second = servers(), servers()

    async with (
        Proxy(first.url) as proxy,
        Redis.from_url(first.url) as raw,
        Redis.from_url(second.url) as replica,
        Store(proxy.url) as cp,
    ):
        await asyncio.gather(*(cp.append(f"t{i}", [{}]) for i in range(20)))
        await asyncio.gather(*(cp.read(f"t{i}") for i in range(20)))
        await replica.replicaof("127.0.0.1", str(first.port))

        while await replica.zcard("{cpkit}:threads") != 20:
            continue

        await replica.replicaof("NO", "ONE")
        await raw.replicaof("127.0.0.1", str(second.port))
        proxy.turn_to(second.url)

        with pytest.raises(BackendUnavailable, match="READONLY"):
            await cp.append("t", [{}])

        assert await cp.append("t", [{}]) == 1
        written = (cp.append(f"t{i}", [{}]) for i in range(20))
        assert await asyncio.gather(*written) == [2] * 20


@pytest.mark.parametrize(
    ("settings", "rules", "words"),
    [
        ({}, "", r"a replica of 127\.0\.0\.1:{port} .*URL of the primary"),
        # It takes writes, and loses them when it next copies its primary.
        ({"replica-read-only": "no"}, "", r"a replica of 127\.0\.0\.1:{port} "),
        ({}, "-info", "READONLY.*replica"),
    ],
    ids=["read-only", "writable", "without INFO"],
)
async def test_a_replica_is_refused(
    servers: Servers, settings: dict[str, str], rules: str, words: str
) -> None:
    """Its reads lag without end; the message says where its primary is."""
    first = servers()
    users = [f"user agent on >password ~* +@all {rules}"]
    link = {"replicaof": f"127.0.0.1 {first.port}"}
    second = servers(users=users, settings={**link, **settings})

    async with Store(first.url) as cp, Redis.from_url(second.url) as raw:
        await cp.append("t", [{}])

        while await raw.llen("{cpkit}:m:t") != 1:
            continue

        before = await raw.dbsize()
        url = f"redis://agent:password@127.0.0.1:{second.port}"

        with pytest.raises(
            BackendUnavailable, match=words.replace("{port}", str(first.port))
        ) as caught:
            async with Store(url):
                pytest.fail("it opened")

        assert caught.value.rejected
        assert await raw.dbsize() == before
        await raw.replicaof("NO", "ONE")

        async with Store(url) as promoted:
            assert await promoted.append("t", [{}], expected_version=1) == 2


async def test_a_cluster_is_refused_and_nothing_is_written(servers: Servers) -> None:
    """The message has the scheme to use."""
    server = servers(settings={"cluster-enabled": "yes"})

    with pytest.raises(BackendUnavailable, match=r"redis\+cluster://") as caught:
        async with Store(server.url):
            pytest.fail("it opened")

    assert not caught.value.maybe_applied

    async with Redis.from_url(server.url) as raw:
        assert await raw.dbsize() == 0
