"""Cancellation at any point, and programs that end without closing their handle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cpkit import BackendUnavailable, Closed, ToolCall
from cpkit_sqlite import SQLiteCheckpointer
from tests.sqlite.inside import occupied, on, reader, store_of, writer

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


def threads() -> set[threading.Thread]:
    """Return the threads of connections."""
    return {one for one in threading.enumerate() if "(_work)" in one.name}


def join(ending: set[threading.Thread]) -> None:
    for thread in ending:
        thread.join(10)
        assert not thread.is_alive()


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
    """No half of an operation is stored, and no transaction stays open."""
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

            for connection in (reader(cp), writer(cp)):
                assert not await on(connection, lambda db: db.in_transaction)

        assert await cp.append("other", [{}]) == 1


@pytest.mark.parametrize("path_", ["file", ":memory:"])
async def test_a_write_cancelled_in_the_queue_is_not_done(
    path: str, path_: str
) -> None:
    """A caller that is cancelled before its write is in a batch takes it back."""
    gate = threading.Event()

    async with Store(path if path_ == "file" else path_) as cp:
        held = occupied(writer(cp), gate)
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
        held = occupied(writer(cp), gate)
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
    held = [occupied(connection, gate) for connection in (writer(cp), reader(cp))]
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
    join(threads())
    gc.collect()  # so that a warning is raised in this test


@pytest.mark.parametrize("count", STEPS[1:])
def test_an_event_loop_that_ends_completes_the_closing(path: str, count: int) -> None:
    """The threads end even if nothing waits for them."""

    async def leave() -> None:
        cp = await Store(path).__aenter__()
        leave.task = asyncio.create_task(cp.aclose())  # type: ignore[attr-defined]  # kept
        await turns(count)

    asyncio.run(leave())
    join(threads())


async def test_an_opening_that_fails_leaves_no_thread(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is out of reach for an hour does not fill the process."""
    before = threads()

    def fail(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    with monkeypatch.context() as broken:
        broken.setattr(sqlite3, "connect", fail)

        for _ in range(3):
            with pytest.raises(BackendUnavailable, match="unable to open"):
                await Store(path).__aenter__()

    assert threads() == before


async def test_a_cancelled_closing_ends_all_threads(path: str) -> None:
    """The task that closes is cancelled while it waits for the first of them."""
    gate = threading.Event()
    cp = await Store(path).__aenter__()
    before = threads()
    held = occupied(reader(cp), gate)
    closing = asyncio.create_task(store_of(cp).close())
    await turns(5)
    closing.cancel()
    await asyncio.wait([closing])
    gate.set()
    await held
    join(before)
    await cp.aclose()


# Programs that end without closing their handle


LEFT_OPEN = """
import asyncio, sys
from cpkit_sqlite import SQLiteCheckpointer

async def main():
    cp = await SQLiteCheckpointer(sys.argv[1]).__aenter__()
    await cp.append("t", [{}])
    watching = cp.watch("t")
    await watching.__aenter__()
    return cp, watching, asyncio.create_task(cp.append("t", [{}] * 9))

loop = asyncio.new_event_loop()
kept = loop.run_until_complete(main())
"""


def test_a_program_that_does_not_close_its_handle_ends(path: str) -> None:
    """A supervisor restarts a program only after it has ended."""
    command = [sys.executable, "-W", "ignore", "-c", LEFT_OPEN, path]

    for count in (1, 2):
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

        async def look() -> int:
            async with Store(path) as cp:
                return len(await cp.read("t"))

        assert asyncio.run(look()) in (count, count + 9, count + 18)


@pytest.mark.filterwarnings("ignore:.*sqlite3.Connection object")
async def test_a_forgotten_handle_leaves_no_thread(tmp_path: Path) -> None:
    """Twenty handles were never closed; their files are closed all the same."""
    before = threads()

    async def forget(number: int) -> None:
        cp = await Store(tmp_path / f"{number}.db").__aenter__()
        await cp.append("t", [{}])

    for number in range(20):
        await forget(number)

    gc.collect()
    await asyncio.to_thread(join, threads() - before)
    gc.collect()  # sqlite3 keeps a connection in a cycle of its own
