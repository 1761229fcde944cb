"""Cancellation at any point: an operation takes effect as a whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cpkit import Closed, ToolCall
from cpkit_file import FileCheckpointer
from tests.file.conftest import open_files

Store = FileCheckpointer[Any]

STEPS = [0, 1, 2, 3, 4, 5, 6, 8, 12, 20, 50, 200, 1000]
"""How many event-loop turns a task has before it is cancelled."""

USES: dict[str, Callable[[Store], Coroutine[Any, Any, Any]]] = {
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


async def cancelled_after(work: Coroutine[Any, Any, Any], count: int) -> bool:
    """Cancel the work after some turns; return whether that stopped it."""
    task = asyncio.create_task(work)
    await turns(count)
    task.cancel()

    with contextlib.suppress(asyncio.CancelledError):
        await task

    return task.cancelled()


class Gate:
    """Blocks every sync until `opened` is set; sets ``entered`` when one waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        sync = os.fdatasync

        def held(fd: int) -> None:
            self.entered.set()
            self.opened.wait()
            sync(fd)

        monkeypatch.setattr(os, "fdatasync", held)

    async def reached(self) -> None:
        await asyncio.to_thread(self.entered.wait)


@pytest.fixture
async def cp(home: Path) -> Any:
    async with Store(home) as cp:
        yield cp


@pytest.mark.parametrize("name", USES)
async def test_a_cancelled_operation_is_applied_as_a_whole_or_not_at_all(
    home: Path, name: str
) -> None:
    """No half of an operation is stored, and the next writer is not blocked."""
    async with Store(home) as cp:
        await cp.record_issued("t", ToolCall("given", "x", {}, "given"))

        for count in STEPS:
            before = await cp.append("gone", [{}])
            await cancelled_after(USES[name](cp), count)
            data = await cp.load("t")
            assert data is not None
            assert [m["half"] for m in data.messages] == [0, 1] * (data.version // 2)
            assert data.extra in ({}, {"a": 1, "b": 1})
            assert len(await cp.read("gone")) in (0, before)

        assert await cp.append("other", [{}]) == 1


async def test_a_write_cancelled_in_the_queue_is_not_done(
    cp: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that is cancelled while it waits for a sync is not stored."""
    await cp.append("t", [{"n": 0}])
    gate = Gate(monkeypatch)
    first = asyncio.create_task(cp.append("t", [{"n": 1}]))
    await gate.reached()
    second, third = (asyncio.create_task(cp.append("t", [{"n": n}])) for n in (2, 3))
    await turns(5)
    second.cancel()
    await turns(5)
    gate.opened.set()

    assert await first == 2
    assert await third == 3
    assert second.cancelled()
    assert await cp.read("t", 1) == [{"n": 1}, {"n": 3}]


async def test_a_queue_whose_callers_are_all_cancelled_blocks_no_other_write(
    cp: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is written, and other appends to its threads work."""
    await cp.append("t", [{}])
    gate = Gate(monkeypatch)
    first = asyncio.create_task(cp.append("t", [{}]))
    await gate.reached()
    others = [asyncio.create_task(cp.append(t, [{}])) for t in ("t", "t", "u", "v")]

    for task in others:
        task.cancel()

    await asyncio.wait(others)
    gate.opened.set()
    assert await first == 2
    again = await asyncio.gather(*(cp.append(t, [{}]) for t in ("t", "u")))
    assert again == [3, 1]
    assert await cp.load("v") is None


async def test_a_write_cancelled_during_its_sync_is_done(
    cp: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writes of its batch are done too."""
    await cp.append("t", [{"n": 0}])
    gate = Gate(monkeypatch)
    first, second = (asyncio.create_task(cp.append("t", [{"n": n}])) for n in (1, 2))
    await gate.reached()
    first.cancel()
    await turns(5)
    gate.opened.set()

    assert await second == 3
    assert first.cancelled()
    assert await cp.read("t", 1) == [{"n": 1}, {"n": 2}]


async def test_a_write_cancelled_during_its_sync_comes_before_later_ones(
    cp: Store, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writes of a thread are stored in the order of their calls."""
    await cp.append("t", [{"n": 0}])
    gate = Gate(monkeypatch)
    alone = asyncio.create_task(cp.append("t", [{"n": 1}]))
    await gate.reached()
    alone.cancel()
    await asyncio.wait([alone])
    assert alone.cancelled()
    later = asyncio.create_task(cp.append("t", [{"n": 2}]))
    closing = asyncio.create_task(cp.aclose())
    await turns(5)
    assert not later.done()
    assert not closing.done()
    gate.opened.set()
    assert await later == 3
    await closing

    async with Store(home) as again:
        assert await again.read("t") == [{"n": 0}, {"n": 1}, {"n": 2}]


async def test_closing_waits_for_what_is_in_flight_and_queued(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations that began are answered; later calls raise ``Closed``."""
    cp = await Store(home).__aenter__()
    await cp.append("t", [{}])
    gate = Gate(monkeypatch)
    under_way = asyncio.create_task(cp.append("t", [{}]))
    await gate.reached()
    queued = [asyncio.create_task(cp.append("t", [{}])) for _ in range(300)]
    claim = asyncio.create_task(cp.record_issued("u", ToolCall("c", "x", {}, "k")))
    read = asyncio.create_task(cp.find_call("nothing"))
    await turns(5)
    closing = [asyncio.create_task(cp.aclose()) for _ in range(3)]
    await turns(5)
    closing[0].cancel()

    with pytest.raises(Closed):
        await cp.append("t", [{}])

    gate.opened.set()
    assert await under_way == 2
    assert await asyncio.gather(*queued) == list(range(3, 303))
    assert await claim is None
    assert await read is None
    await asyncio.gather(*closing[1:])

    async with Store(home) as again:
        assert len(await again.read("t")) == 302


async def test_closing_does_not_wait_for_other_jobs_of_the_program(home: Path) -> None:
    """The event loop's executor may have no free thread."""
    executor = ThreadPoolExecutor(1, "asyncio_")
    asyncio.get_running_loop().set_default_executor(executor)
    ended = threading.Event()
    job = asyncio.create_task(asyncio.to_thread(ended.wait))

    try:
        async with Store(home) as cp:
            await cp.append("t", [{}])
    finally:
        ended.set()
        await job


async def test_a_caller_that_waits_for_the_closing_can_be_cancelled(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closing goes on, and a later call waits for it."""
    cp = await Store(home).__aenter__()
    await cp.append("t", [{}])
    gate = Gate(monkeypatch)
    append = asyncio.create_task(cp.append("t", [{}]))
    await gate.reached()
    append.cancel()
    closing = asyncio.create_task(cp.aclose())
    await turns(20)
    closing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await closing

    gate.opened.set()
    await cp.aclose()
    assert not any("cpkit-file" in t.name for t in threading.enumerate())


@pytest.mark.parametrize("count", STEPS)
async def test_a_cancelled_opening_leaves_nothing_open(home: Path, count: int) -> None:
    """No thread is left (a guard over all tests checks it); the folder opens again."""
    cp = Store(home)

    if await cancelled_after(cp.__aenter__(), count):
        with pytest.raises(Closed):
            await cp.load("t")

    await cp.aclose()

    async with Store(home) as again:
        assert await again.append("t", [{}]) == 1


@pytest.mark.parametrize("count", STEPS)
def test_an_event_loop_that_ends_leaves_nothing(home: Path, count: int) -> None:
    """``asyncio.run`` cancels an opening, and writes that are in flight."""

    async def use() -> None:
        async with Store(home) as cp:
            while True:
                await asyncio.gather(*(cp.append("t", [{}]) for _ in range(3)))

    async def leave() -> None:
        leave.task = asyncio.create_task(use())  # type: ignore[attr-defined]  # kept
        await turns(count)

    asyncio.run(leave())

    async def look() -> None:
        async with Store(home) as cp:
            version = len(await cp.read("t"))
            assert await cp.append("t", [{}]) == version + 1

    asyncio.run(look())


@pytest.mark.parametrize("count", range(6))
async def test_a_write_in_the_cleanup_of_a_cancelled_task_is_done(
    cp: Store, count: int
) -> None:
    """Also where every task of the loop is cancelled, those of the handle too."""

    async def write_for_ever(name: str) -> None:
        try:
            while True:
                await cp.append(name, [{}])
        finally:
            await cp.append(name, [{"last": name}])

    tasks = [asyncio.create_task(write_for_ever(f"t{i}")) for i in range(20)]
    await turns(count)
    ours = asyncio.all_tasks() - {asyncio.current_task()}
    began = count > 0

    for task in ours:
        task.cancel()

    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)

    for i in range(20):
        assert ({"last": f"t{i}"} in await cp.read(f"t{i}")) is began


async def test_an_error_that_is_kept_keeps_no_file_open(home: Path, log: Path) -> None:
    """A traceback keeps the frames alive, but no open or locked file in them."""
    kept = []

    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}])
        await cp.append("t", [{"n": 2}])
        log.write_bytes(log.read_bytes().replace(b'{"n":1}', b'{"n":}'))

        for _ in range(3):
            with pytest.raises(Exception, match="corrupt") as raised:
                await cp.load("t")

            kept.append(raised.value)

        assert not open_files(home)
        assert len(kept) == 3


async def test_a_forgotten_handle_leaves_no_thread(tmp_path: Path) -> None:
    """Five handles were never closed."""
    before = {*threading.enumerate()}

    async def forget(number: int) -> None:
        cp = await Store(tmp_path / f"{number}").__aenter__()
        await cp.append("t", [{}])
        await cp.load("t")

    for number in range(5):
        await forget(number)

    gc.collect()
    left = {one for one in threading.enumerate() if one not in before}

    for thread in left:
        await asyncio.to_thread(thread.join, 10)

    assert not [one for one in left if "cpkit-file" in one.name and one.is_alive()]
