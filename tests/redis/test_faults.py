"""The table of faults: fault × operation -> error, ``maybe_applied``, state after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import pytest
from redis.asyncio import Redis

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, ThreadDump, ToolCall
from cpkit_redis import RedisCheckpointer
from tests.redis.proxy import Proxy
from tests.servers.redis import RedisServer
from tests.sweeps import table

Store = RedisCheckpointer[Any]
State = tuple[list[Any], dict[str, Any], dict[str, str]] | None

THEN = datetime(2026, 1, 1, tzinfo=UTC)


async def state(cp: Store, thread: str) -> State:
    """Return messages, extra, and the status of each call."""
    dump = await cp.dump_thread(thread)

    if dump is None:
        return None

    calls = {
        one.call.call_id: f"{one.status}{', erased' if one.erased else ''}"
        for one in dump.calls
    }
    return [*dump.messages], {**dump.extra}, calls


@dataclass
class Operation:
    """What is called, and what a thread ``t`` is before and after it."""

    call: Callable[[Store, str], Coroutine[Any, Any, Any]]
    after: State = ([{"n": 0}], {"a": 0}, {"c": "issued"})
    before: State = ([{"n": 0}], {"a": 0}, {"c": "issued"})


def claimed(call_id: str, thread: str) -> ToolCall:
    return ToolCall(call_id, "pay", {}, f"{call_id} of {thread}")


WRITES = {
    "append": Operation(
        lambda cp, t: cp.append(t, [{"n": 1}], extra={"a": 1}),
        ([{"n": 0}, {"n": 1}], {"a": 1}, {"c": "issued"}),
    ),
    "save_extra": Operation(
        lambda cp, t: cp.save_extra(t, {"a": 1, "b": 2}),
        ([{"n": 0}], {"a": 1, "b": 2}, {"c": "issued"}),
    ),
    "record_issued": Operation(
        lambda cp, t: cp.record_issued(t, claimed("d", t)),
        ([{"n": 0}], {"a": 0}, {"c": "issued", "d": "issued"}),
    ),
    "record_result": Operation(
        lambda cp, t: cp.record_result(t, "c", 1),
        ([{"n": 0}], {"a": 0}, {"c": "completed"}),
    ),
    "trim": Operation(
        lambda cp, t: cp.trim(t, 1, expected_version=1),
        ([], {"a": 0}, {"c": "issued"}),
    ),
    "delete_thread": Operation(
        lambda cp, t: cp.delete_thread(t, expected_version=1),
        ([], {}, {"c": "issued, erased"}),
    ),
    "restore_thread": Operation(
        lambda cp, t: cp.restore_thread(
            ThreadDump(t, [{"n": 2}], {"b": 2}, [], THEN, THEN)
        ),
        ([{"n": 2}], {"b": 2}, {}),
        before=None,
    ),
}
READS = {
    "load": Operation(lambda cp, t: cp.load(t)),
    "read": Operation(lambda cp, t: cp.read(t, -1)),
    "find_call": Operation(lambda cp, t: cp.find_call(f"c of {t}")),
    "list_calls": Operation(lambda cp, t: cp.list_calls(t)),
    "list_threads": Operation(lambda cp, t: cp.list_threads(prefix=t)),
    "dump_thread": Operation(lambda cp, t: cp.dump_thread(t)),
}


class World:
    """A server, a plain client of it, and a handle that reaches it by a proxy."""

    def __init__(self, server: RedisServer, proxy: Proxy, raw: Any, cp: Store) -> None:
        self.server, self.proxy, self.raw, self.cp = server, proxy, raw, cp

    @asynccontextmanager
    async def answer_is_cut(self) -> AsyncIterator[None]:
        self.proxy.answers, self.proxy.once = "cut", True
        yield

    @asynccontextmanager
    async def answers_are_lost(self) -> AsyncIterator[None]:
        self.proxy.answers = "swallow"
        yield
        self.proxy.answers = "pass"

    @asynccontextmanager
    async def idle_connections_are_cut(self) -> AsyncIterator[None]:
        self.proxy.cut()
        await self.proxy.hung_up()
        yield

    @asynccontextmanager
    async def scripts_are_flushed(self) -> AsyncIterator[None]:
        await self.raw.script_flush()
        yield

    @asynccontextmanager
    async def server_is_stopped(self) -> AsyncIterator[None]:
        self.server.pause()

        try:
            yield
        finally:
            self.server.resume()

    @asynccontextmanager
    async def connections_are_given_up(self) -> AsyncIterator[None]:
        """The server is stopped for so long that all connections were closed."""
        self.server.pause()

        with pytest.raises(BackendUnavailable):
            await self.cp.load("t")

        try:
            yield
        finally:
            self.server.resume()

    @asynccontextmanager
    async def server_is_killed(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self.server.kill)
        await self.proxy.hung_up()

        try:
            yield
        finally:
            await asyncio.to_thread(self.server.start)

    @asynccontextmanager
    async def server_restarts(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self.server.restart)
        await self.proxy.hung_up()
        yield

    @asynccontextmanager
    async def memory_is_full(self) -> AsyncIterator[None]:
        await self.raw.config_set("maxmemory", "1")

        try:
            yield
        finally:
            await self.raw.config_set("maxmemory", "0")

    @asynccontextmanager
    async def disk_fails(self) -> AsyncIterator[None]:
        """After a failed snapshot the server refuses writes."""
        in_the_way = self.server.data / "snapshot.rdb" / "x"

        if not in_the_way.exists():
            in_the_way.mkdir(parents=True)
            await self.raw.bgsave()

        while (await self.raw.info("persistence"))["rdb_last_bgsave_status"] == "ok":
            continue

        try:
            await self.raw.config_set("save", "900 1")
            yield
        finally:
            await self.raw.config_set("save", "")

    @asynccontextmanager
    async def server_is_a_replica(self) -> AsyncIterator[None]:
        await self.raw.replicaof("127.0.0.1", "1")

        try:
            yield
        finally:
            await self.raw.replicaof("NO", "ONE")

    @asynccontextmanager
    async def replicas_are_missing(self) -> AsyncIterator[None]:
        await self.raw.config_set("min-replicas-to-write", "1")

        try:
            yield
        finally:
            await self.raw.config_set("min-replicas-to-write", "0")


Begins = Callable[[World], AbstractAsyncContextManager[None]]


@dataclass
class Fault:
    """What happens, and what an operation does then.

    ``write`` and ``read`` are the error's ``maybe_applied``, or ``None`` where the
    operation succeeds. ``state`` is that of the thread when the fault is over.
    """

    begins: Begins
    write: bool | None
    read: bool | None
    state: Literal["before", "after", "either"]
    rejected: bool = False
    but: tuple[str, ...] = ()


FAULTS = {
    "the answer is cut": Fault(World.answer_is_cut, True, None, "after"),
    "answers are lost": Fault(World.answers_are_lost, True, False, "after"),
    "idle connections are cut": Fault(
        World.idle_connections_are_cut, None, None, "after"
    ),
    "scripts are flushed": Fault(World.scripts_are_flushed, None, None, "after"),
    "the server restarts": Fault(World.server_restarts, None, None, "after"),
    "the server is stopped": Fault(World.server_is_stopped, True, False, "either"),
    "connections are given up": Fault(
        World.connections_are_given_up, False, False, "before"
    ),
    "the server is away": Fault(World.server_is_killed, False, False, "before"),
    # These make room again.
    "OOM": Fault(
        World.memory_is_full, False, None, "before", True, but=("delete_thread", "trim")
    ),
    "MISCONF": Fault(World.disk_fails, False, None, "before", True),
    "READONLY": Fault(World.server_is_a_replica, False, None, "before", True),
    "NOREPLICAS": Fault(World.replicas_are_missing, False, None, "before", True),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    settings = {"dbfilename": "snapshot.rdb"}

    with RedisServer(appendfsync="always", settings=settings) as started:
        yield started


@pytest.fixture
async def world(server: RedisServer, prefix: str) -> AsyncIterator[World]:
    """A handle with one connection, whose limits are short."""
    limits = {"timeout": 0.3 * slowdown(), "connect_timeout": 0.1 * slowdown()}

    async with (
        Proxy(server.url) as proxy,
        Redis.from_url(server.url) as raw,
        Store(proxy.url, prefix=prefix, pool_size=1, **limits) as cp,
    ):
        yield World(server, proxy, raw, cp)


@pytest.mark.parametrize(("what", "name"), table(FAULTS, [*WRITES, *READS]))
async def test_fault(world: World, prefix: str, what: str, name: str) -> None:
    """The error says what is proven; the state is whole; the handle goes on."""
    fault, cp = FAULTS[what], world.cp
    operation = (WRITES | READS)[name]
    expected = fault.write if name in WRITES else fault.read
    after = operation.after if fault.state == "after" else operation.before

    if name in fault.but:
        expected, after = None, operation.after

    if operation.before is not None:
        await cp.append("t", [{"n": 0}], extra={"a": 0})
        await cp.record_issued("t", claimed("c", "t"))

    async with fault.begins(world):
        if expected is None:
            await operation.call(cp, "t")
        else:
            with pytest.raises(BackendUnavailable) as caught:
                await operation.call(cp, "t")

            assert caught.value.maybe_applied == expected
            assert caught.value.rejected == fault.rejected
            assert caught.value.__cause__ is not None

            if fault.rejected:
                assert what in str(caught.value)

    async with Store(world.server.url, prefix=prefix) as other:
        found = await state(other, "t")

    if fault.state == "either":
        assert found in (operation.before, operation.after)
    else:
        assert found == after

    assert await cp.append("next", [{}]) == 1


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_that_is_cancelled_is_before_the_next(
    world: World, name: str
) -> None:
    """Its outcome is what the next operation of the handle sees; it is whole."""
    operation, cp = WRITES[name], world.cp

    if operation.before is not None:
        await cp.append("t", [{"n": 0}], extra={"a": 0})
        await cp.record_issued("t", claimed("c", "t"))

    world.proxy.forget()
    world.server.pause()
    writing = asyncio.create_task(operation.call(cp, "t"))

    while world.proxy.commands[-1:] != ["EVALSHA"]:  # noqa: ASYNC110  # of the proxy
        await asyncio.sleep(0)

    writing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await writing

    world.server.resume()
    assert await state(cp, "t") == operation.after


@pytest.mark.parametrize("how", ["cut", "swallow"])
async def test_a_write_is_sent_once(
    world: World, how: Literal["cut", "swallow"]
) -> None:
    """The driver and the client library do not repeat it. The caller may."""
    cp, call = world.cp, claimed("c", "t")
    await cp.append("t", [{"n": 0}])
    writes: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: cp.append("t", [{"n": 1}], expected_version=1),
        lambda: cp.record_issued("t", call),
    ]

    for write in writes:
        await cp.load("t")  # connects again
        world.proxy.forget()
        world.proxy.answers = how

        with pytest.raises(BackendUnavailable, match="may have been applied"):
            await write()

        world.proxy.answers = "pass"
        assert world.proxy.commands == ["EVALSHA"]

    outcomes = await asyncio.gather(*(w() for w in writes), return_exceptions=True)
    assert getattr(outcomes[0], "actual", None) == 2
    assert getattr(outcomes[1], "call", None) == call
