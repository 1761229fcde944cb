"""Cancellation at any point: an operation takes effect as a whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from cpkit import BackendUnavailable, Closed, ToolCall
from cpkit_sqlite import SQLiteCheckpointer
from cpkit_sqlite.connection import Connection
from tests.sqlite.inside import occupied, reader, writer

Store = SQLiteCheckpointer[Any]

STEPS = [0, 1, 2, 3, 4, 5, 6, 8, 12, 20, 50, 200, 1000]
"""How many event-loop turns a task has before it is cancelled."""

WRITES: dict[str, Callable[[Store], Coroutine[Any, Any, Any]]] = {
    "append": lambda cp: cp.append("t", [{"half": 0}, {"half": 1}]),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 1, "b": 1}),
    "record_issued": lambda cp: cp.record_issued("t", ToolCall("c", "x", {}, "k")),
    "record_result": lambda cp: cp.record_result("t", "given", 1),
    "delete_thread": lambda cp: cp.delete_thread("gone"),
    "load": lambda cp: cp.load("t"),
}


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def join_connections() -> None:
    """Wait for the threads of closed and of lost connections."""
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            thread.join(10)


async def cancelled_after(work: Coroutine[Any, Any, Any], count: int) -> bool:
    """Cancel the work after some turns; return whether that stopped it."""
    task = asyncio.create_task(work)
    await turns(count)
    task.cancel()

    with contextlib.suppress(asyncio.CancelledError):
        await task

    return task.cancelled()


@pytest.mark.parametrize("name", WRITES)
async def test_an_operation_cancelled_anywhere_is_done_or_not(
    path: str, name: str
) -> None:
    """No half of an operation is stored, and the next writer is not blocked."""
    async with Store(path) as cp:
        await cp.record_issued("t", ToolCall("given", "x", {}, "given"))

        for count in STEPS:
            before = await cp.append("gone", [{}])
            await cancelled_after(WRITES[name](cp), count)
            data = await cp.load("t")
            assert data is not None
            assert [m["half"] for m in data.messages] == [0, 1] * (data.version // 2)
            assert data.extra in ({}, {"a": 1, "b": 1})
            assert len(await cp.read("gone")) in (0, before)

        assert await cp.append("other", [{}]) == 1


@pytest.mark.parametrize("path_", ["file", ":memory:"])
async def test_a_write_cancelled_in_the_queue_is_not_done(
    path: str, path_: str
) -> None:
    """A caller that is cancelled before its write is in a batch takes it back."""
    gate = threading.Event()

    async with Store(path if path_ == "file" else path_) as cp:
        held = asyncio.create_task(occupied(await writer(cp), gate))
        first = asyncio.create_task(cp.append("t", [{"n": 1}]))
        await turns(5)
        second = asyncio.create_task(cp.append("t", [{"n": 2}]))
        third = asyncio.create_task(cp.append("t", [{"n": 3}]))
        await turns(5)
        second.cancel()
        await turns(5)
        gate.set()

        assert await first == 1
        assert await third == 2
        assert second.cancelled()
        assert await cp.read("t") == [{"n": 1}, {"n": 3}]
        await held


async def test_a_write_cancelled_in_its_commit_is_done(path: str) -> None:
    """The commit goes on, and the other writes of its batch are done too."""
    gate = threading.Event()

    async with Store(path) as cp:
        held = asyncio.create_task(occupied(await writer(cp), gate))
        first, second = (
            asyncio.create_task(cp.append("t", [{"n": n}])) for n in (1, 2)
        )
        await turns(5)
        first.cancel()
        await turns(5)
        gate.set()

        assert await second == 2
        assert first.cancelled()
        assert await cp.read("t") == [{"n": 1}, {"n": 2}]
        await held


async def test_closing_waits_for_what_is_in_flight(path: str) -> None:
    """A write and a read that began are answered; later calls raise ``Closed``."""
    gate = threading.Event()
    cp = await Store(path).__aenter__()
    held = [
        asyncio.create_task(occupied(connection, gate))
        for connection in (await writer(cp), reader(cp))
    ]
    await turns(5)
    write = asyncio.create_task(cp.append("t", [{}]))
    read = asyncio.create_task(cp.list_threads())
    await turns(5)
    closing = [asyncio.create_task(cp.aclose()) for _ in range(3)]
    await turns(5)
    closing[0].cancel()

    with pytest.raises(Closed):
        await cp.append("t", [{}])

    gate.set()
    assert await write == 1
    assert len(await read) in (0, 1)  # the read may be before or after the write
    await asyncio.gather(*held, *closing[1:])

    async with Store(path) as cp:
        assert len(await cp.read("t")) == 1


@pytest.mark.parametrize("count", STEPS)
async def test_an_opening_cancelled_anywhere_leaves_nothing(
    path: str, count: int
) -> None:
    """No thread is left (a guard over all tests checks it); the file opens again."""
    cp = Store(path)

    if await cancelled_after(cp.__aenter__(), count):
        with pytest.raises(Closed):
            await cp.load("t")

    await cp.aclose()

    async with Store(path) as again:
        assert await again.append("t", [{}]) == 1


# An aiosqlite thread that is still connecting when the loop closes raises in the
# thread, and Python 3.13 warns of its open connection.
@pytest.mark.filterwarnings("ignore:.*_connection_worker_thread")
@pytest.mark.filterwarnings("ignore:.*[.]Connection object")
@pytest.mark.parametrize("count", STEPS)
def test_an_event_loop_that_ends_leaves_nothing(path: str, count: int) -> None:
    """``asyncio.run`` cancels an opening, and writes that are in flight."""

    async def use() -> None:
        async with Store(path) as cp:
            while True:
                await asyncio.gather(*(cp.append("t", [{}]) for _ in range(3)))

    async def leave() -> None:
        leave.task = asyncio.create_task(use())  # type: ignore[attr-defined]  # kept
        await turns(count)

    asyncio.run(leave())

    async def look() -> None:
        async with Store(path) as cp:
            version = len(await cp.read("t"))
            assert await cp.append("t", [{}]) == version + 1

    asyncio.run(look())

    join_connections()
    gc.collect()  # so that a warning is raised in this test


@pytest.mark.parametrize("count", STEPS[1:])
def test_an_event_loop_that_ends_completes_the_closing(path: str, count: int) -> None:
    """Python waits for the thread of a connection that is not closed, for ever."""

    async def leave() -> None:
        cp = await Store(path).__aenter__()
        await cp.append("t", [{}])  # opens the second connection
        leave.task = asyncio.create_task(cp.aclose())  # type: ignore[attr-defined]  # kept
        await turns(count)

    asyncio.run(leave())
    join_connections()


async def test_a_connection_whose_caller_was_cancelled_is_not_open(path: str) -> None:
    """aiosqlite loses it, so nothing else would close it."""
    reached, goes_on = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> Connection:
        reached.set()
        goes_on.wait(10)
        return Connection(path)

    async def connect() -> None:
        await aiosqlite.connect(path, factory=slow)

    task = asyncio.create_task(connect())
    await asyncio.to_thread(reached.wait, 10)
    task.cancel()
    await asyncio.wait([task])
    goes_on.set()
    await asyncio.to_thread(join_connections)
    gc.collect()  # a connection that is not closed is a warning, which fails the test


# Python prints what a thread raises: `cpkit` would print two tracebacks with its error.
def test_an_opening_that_fails_leaves_no_thread_behind(tmp_path: Path) -> None:
    """A thread that answers after the event loop has ended raises RuntimeError."""
    (tmp_path / "file").touch()

    async def fail() -> None:
        with pytest.raises(BackendUnavailable, match="Not a directory"):
            await Store(tmp_path / "file" / "agent.db").__aenter__()

    for _ in range(100):  # without the fix, about every tenth raised in its thread
        asyncio.run(fail())

    join_connections()
    gc.collect()


def connection_threads() -> set[threading.Thread]:
    name = "_connection_worker_thread"
    return {thread for thread in threading.enumerate() if name in thread.name}


@pytest.fixture
def unopenable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which no connection can open its file."""

    def fail(*_: Any) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    return lambda: monkeypatch.setattr(Connection, "open", fail)


async def test_a_write_that_cannot_connect_leaves_no_thread(
    path: str, unopenable: Callable[[], None]
) -> None:
    """A store that is out of reach for an hour does not fill the process."""
    async with Store(path) as cp:
        before = connection_threads()
        unopenable()

        for _ in range(3):
            with pytest.raises(BackendUnavailable, match="unable to open"):
                await cp.append("t", [{}])

        for thread in connection_threads() - before:
            thread.join(10)
            assert not thread.is_alive()


async def test_a_failed_connection_is_closed_although_its_task_is_cancelled(
    path: str, unopenable: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread still closes the connection when the task is cancelled."""
    closing, gate = threading.Event(), threading.Event()
    close = Connection.close

    def slow(connection: Connection) -> None:
        closing.set()
        gate.wait(10)
        close(connection)

    async with Store(path) as cp:
        before = connection_threads()
        unopenable()
        monkeypatch.setattr(Connection, "close", slow)
        task = asyncio.create_task(writer(cp))
        await asyncio.to_thread(closing.wait, 10)
        task.cancel()
        await turns(5)
        gate.set()
        await asyncio.wait([task])

        for thread in connection_threads() - before:
            thread.join(10)
            assert not thread.is_alive()
