"""A server that is killed, restarted, stopped, away, busy, or has lost its scripts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
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
Operation = Callable[[Store], Coroutine[Any, Any, Any]]


async def test_acknowledged_writes_survive_a_kill(servers: Servers) -> None:
    """With appendfsync always each of them is stored, and stored whole."""
    server = servers(appendfsync="always")
    acknowledged: dict[str, int] = {}

    async def write(cp: Store, thread: str) -> None:
        while not over.is_set():
            try:
                version = await cp.append(thread, [{"half": 0}, {"half": 1}])
            except BackendUnavailable as exc:
                if exc.maybe_applied:
                    return

                continue

            acknowledged[thread] = version
            enough.set() if version > 20 else None

    enough, over = asyncio.Event(), asyncio.Event()

    async with Store(server.url, connect_timeout=5) as cp:
        for _ in range(3):
            enough.clear()
            over.clear()
            acknowledged.clear()
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
                halves = [message["half"] for message in data.messages]
                assert halves == [0, 1] * (data.version // 2)
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


@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_a_restart_is_not_noticed_by_an_idle_handle(
    servers: Servers, how: str
) -> None:
    """Its connections are closed and the script is gone, and it works all the same."""
    server = servers(appendfsync="always")

    async with Store(server.url) as cp:
        for version in range(1, 4):
            assert await cp.append("t", [{}], expected_version=version - 1) == version
            assert len(await cp.read("t")) == version

            if how == "restart":
                await asyncio.to_thread(server.restart)
            else:
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)

        assert await cp.append("t", [{}]) == 4


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


async def test_a_server_that_stays_away_is_unavailable(servers: Servers) -> None:
    """After ``connect_timeout``; nothing was written, and the handle works again."""
    server = servers(appendfsync="always")

    async with Store(server.url, connect_timeout=0.2 * slowdown()) as cp:
        await cp.append("t", [{}])
        await asyncio.to_thread(server.kill)
        outcomes = await asyncio.gather(
            *(cp.append("t", [{}]) for _ in range(20)),
            *(cp.load("t") for _ in range(20)),
            return_exceptions=True,
        )

        for outcome in outcomes:
            assert isinstance(outcome, BackendUnavailable)
            assert not outcome.maybe_applied
            assert f":{server.port}" in str(outcome)

        await asyncio.to_thread(server.start)
        assert await cp.append("t", [{}]) == 2


async def test_opening_without_a_server_fails(prefix: str) -> None:
    """The message has the address."""
    port = free_port()

    with pytest.raises(BackendUnavailable, match=f"127.0.0.1:{port}") as caught:
        async with Store(f"redis://127.0.0.1:{port}", connect_timeout=0.1):
            pytest.fail("it opened")

    assert caught.value.__cause__ is not None
    assert not caught.value.maybe_applied


WRITES: dict[str, Operation] = {
    "append": lambda cp: cp.append("t", [{}]),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 2}),
    "record_issued": lambda cp: cp.record_issued("t", ToolCall("d", "x", {}, "l")),
    "record_result": lambda cp: cp.record_result("t", "c", 1),
    "delete_thread": lambda cp: cp.delete_thread("u"),
}
READS: dict[str, Operation] = {
    "load": lambda cp: cp.load("t"),
    "read": lambda cp: cp.read("t"),
    "find_call": lambda cp: cp.find_call("k"),
    "find_completed": lambda cp: cp.find_completed("k"),
    "list_calls": lambda cp: cp.list_calls("t"),
    "list_threads": lambda cp: cp.list_threads(),
    "dump_thread": lambda cp: cp.dump_thread("t"),
}


async def test_a_stopped_server_fails_every_operation_in_time(
    servers: Servers,
) -> None:
    """A write that was sent may be applied; one that still connects was not sent."""
    server = servers()

    async with Store(server.url, timeout=0.5 * slowdown()) as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", ToolCall("c", "x", {}, "k"))
        await asyncio.gather(*(read(cp) for read in READS.values()))
        server.pause()

        async def maybe_applied(uses: dict[str, Operation]) -> set[bool]:
            errors = await asyncio.gather(
                *(use(cp) for use in uses.values()), return_exceptions=True
            )
            assert {type(error) for error in errors} == {BackendUnavailable}
            return {getattr(error, "maybe_applied", False) for error in errors}

        assert await maybe_applied(WRITES) == {True}
        assert await maybe_applied(READS) == {False}
        # By now every connection that stood is given up.
        assert await maybe_applied(WRITES) == {False}
        server.resume()
        data = await cp.load("t")
        assert data is not None
        assert data.version in (1, 2)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="of Linux")
async def test_the_rest_of_a_write_that_was_given_up_is_not_sent(
    servers: Servers,
) -> None:
    """The kernel keeps what a stopped server does not take, and then drops it."""
    server = servers()
    message = {"text": "x" * 15_000_000}  # more than the kernel's buffers hold

    async with Store(server.url, timeout=1, connect_timeout=1) as cp:
        await cp.append("t", [{}])
        await asyncio.sleep(0.2)  # its notification is in flight
        server.pause()

        with pytest.raises(BackendUnavailable) as caught:
            await cp.append("t", [message, message])

        assert caught.value.maybe_applied

    await asyncio.sleep(2)
    server.resume()
    await asyncio.sleep(1)

    async with Store(server.url) as cp:
        assert await cp.read("t") == [{}]


@pytest.mark.parametrize("address", ["url", "unix_url"])
@pytest.mark.parametrize("size", [40_000, 1_000_000])
async def test_a_write_that_was_given_up_is_not_applied_later(
    servers: Servers, address: str, size: int
) -> None:
    """A server that goes on reads a part of it, and the rest after newer requests."""
    server = servers()
    before, version, after = await _given_up(server, getattr(server, address), size)
    assert version == before + 1 == after


async def test_a_user_who_may_end_no_connection_can_work(servers: Servers) -> None:
    """A write that was given up may be applied later; nothing else differs."""
    server = servers(users=["user agent on >password ~* &* +@all -client -info"])
    url = server.url.replace("//", "//agent:password@")
    before, version, after = await _given_up(server, url, 40_000)
    assert before < version <= after


async def _given_up(server: RedisServer, url: str, size: int) -> tuple[int, int, int]:
    """Stop the server in an append of so many bytes, which is given up.

    Return the version that the handle reads then, what its next append returns, and
    the version after a moment.
    """
    async with Store(url, timeout=0.5 * slowdown()) as cp:
        # Several connections: a later operation takes another one.
        looks = (cp.load("t") for _ in range(3))
        await asyncio.gather(cp.append("t", [{"n": 0}]), *looks)
        server.pause()

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{"late": "x" * size}])

        later = asyncio.ensure_future(cp.load("t"))
        await asyncio.sleep(0.1)
        server.resume()
        before = await later
        version = await cp.append("t", [{"n": 1}])

        for _ in range(20):
            after = await cp.load("t")

    assert before is not None
    assert after is not None
    return before.version, version, after.version


async def test_a_restarted_server_keeps_its_connections(servers: Servers) -> None:
    """Its numbers of connections begin at 1 again: they are others' connections."""
    server = servers(appendfsync="always")

    async with (
        Store(server.url, timeout=slowdown()) as cp,
        Redis.from_url(server.url) as raw,
    ):
        await cp.append("t", [{}])
        server.pause()

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{}])

        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        # As many connections as had numbers before.
        others = [Redis.from_url(server.url) for _ in range(20)]

        for other in others:
            await other.ping()

        before = {one["id"] for one in await raw.client_list()}
        await cp.append("t", [{}])
        assert before <= {one["id"] for one in await raw.client_list()}

        for other in others:
            await other.aclose()


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
