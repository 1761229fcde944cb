"""A handle's life: opened once, used on one loop, closed after what is in flight."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from conformance.operations import LATER
from cpkit import Closed, ToolCall, WrongEventLoop
from cpkit.driver import FullHandle, lifecycle
from cpkit.driver.lifecycle import Lifecycle
from tests.driver.gated import GatedStore, handle, run_ready_tasks

METHODS: dict[str, Callable[[FullHandle[Any]], Any]] = {
    "load": lambda cp: cp.load("t"),
    "append": lambda cp: cp.append("t", []),
    "save_extra": lambda cp: cp.save_extra("t", {}),
    "record_issued": lambda cp: cp.record_issued("t", ToolCall("c", "tool", {}, "k")),
    "record_result": lambda cp: cp.record_result("t", "c", None),
    "find_completed": lambda cp: cp.find_completed("k"),
    "list_threads": lambda cp: cp.list_threads(),
    "read": lambda cp: cp.read("t"),
    "load_range": lambda cp: cp.load_range("t"),
    "list_calls": lambda cp: cp.list_calls("t"),
    "find_call": lambda cp: cp.find_call("k"),
    "delete_thread": lambda cp: cp.delete_thread("t"),
    "trim": lambda cp: cp.trim("t", 0),
    "erase_calls": lambda cp: cp.erase_calls("t", LATER),
    "dump_thread": lambda cp: cp.dump_thread("t"),
}


class Resource:
    """What a handle releases when it closes, as soon as the test allows it."""

    def __init__(self) -> None:
        self.released = 0
        self.allowed = asyncio.Event()

    async def release(self) -> None:
        await self.allowed.wait()
        self.released += 1


def opened() -> Lifecycle:
    """Return a lifecycle that is open on the running loop."""
    life = Lifecycle("s://x")
    life.begin()
    return life


# The handle


@pytest.mark.parametrize("method", METHODS)
async def test_a_handle_that_is_not_open_refuses_every_method(method: str) -> None:
    """Before it is entered, and after it is closed."""
    cp = handle(GatedStore())
    await cp.aclose()  # nothing to close yet, and no error

    with pytest.raises(Closed):
        await METHODS[method](cp)

    async with cp:
        await cp.append("t", [{}])

    with pytest.raises(Closed):
        await METHODS[method](cp)

    await cp.aclose()


@pytest.mark.parametrize("method", METHODS)
async def test_a_handle_of_another_loop_refuses_every_method(method: str) -> None:
    """The method raises instead of waiting for ever, and the handle stays usable."""
    async with handle(GatedStore()) as cp:

        async def use() -> None:
            with pytest.raises(WrongEventLoop):
                await METHODS[method](cp)

            with pytest.raises(WrongEventLoop):
                await cp.aclose()

        await asyncio.to_thread(lambda: asyncio.run(use()))
        assert await cp.append("t", [{}]) == 1


async def test_a_handle_is_opened_once() -> None:
    """A second opening raises, and the first one stays open."""
    async with handle(GatedStore()) as cp:
        with pytest.raises(Closed, match="enter it once"):
            await cp.__aenter__()

        assert await cp.append("t", [{}]) == 1

    with pytest.raises(Closed):
        await cp.__aenter__()


# Closing


async def test_closing_waits_for_work_in_flight() -> None:
    """Work that has started ends before the release; new work is refused."""
    life, resource, gate = opened(), Resource(), asyncio.Event()
    resource.allowed.set()
    working = asyncio.create_task(life.run_shielded(gate.wait()))
    await run_ready_tasks()

    closing = asyncio.create_task(life.close(resource.release))
    await run_ready_tasks()
    assert resource.released == 0

    with pytest.raises(Closed, match="s://x"):
        life.check()

    gate.set()
    await closing
    assert await working is True
    assert resource.released == 1


async def test_closing_from_many_tasks_releases_once() -> None:
    """Every closer returns after the one release."""
    life, resource = opened(), Resource()
    closers = [asyncio.create_task(life.close(resource.release)) for _ in range(5)]
    await run_ready_tasks()
    assert not any(closer.done() for closer in closers)

    resource.allowed.set()
    await asyncio.gather(*closers)
    await life.close(resource.release)
    assert resource.released == 1


async def test_a_cancelled_close_goes_on() -> None:
    """The closer stops waiting, and the store is released all the same."""
    life, resource = opened(), Resource()
    closer = asyncio.create_task(life.close(resource.release))
    await run_ready_tasks()
    closer.cancel()

    with pytest.raises(asyncio.CancelledError):
        await closer

    resource.allowed.set()
    await life.close(resource.release)
    assert resource.released == 1


def test_an_event_loop_that_ends_releases_the_store() -> None:
    """``asyncio.run`` cancels the closing while it waits for what is in flight."""
    released = []

    async def release() -> None:
        released.append(1)

    async def leave() -> asyncio.Task[None]:
        life = opened()
        asyncio.create_task(life.run_shielded(asyncio.sleep(60)))
        await run_ready_tasks()
        closing = asyncio.create_task(life.close(release))
        await run_ready_tasks()
        return closing

    assert asyncio.run(leave()).cancelled()
    assert released == [1]


async def test_a_release_that_fails_reaches_every_closer() -> None:
    """Its error is not lost, and the release is not tried again."""
    life, tries = opened(), []

    async def release() -> None:
        tries.append("release")
        raise OSError("disk on fire")

    for _ in range(2):
        with pytest.raises(OSError, match="on fire"):
            await life.close(release)

    assert tries == ["release"]


# Work in flight


async def test_shielded_work_goes_on_without_its_caller() -> None:
    """The caller is cancelled, the work ends, and closing waits for it."""
    life, resource, gate = opened(), Resource(), asyncio.Event()
    resource.allowed.set()
    released: list[int] = []

    async def work() -> None:
        await gate.wait()
        released.append(resource.released)

    caller = asyncio.create_task(life.run_shielded(work()))
    await run_ready_tasks()
    caller.cancel()

    with pytest.raises(asyncio.CancelledError):
        await caller

    closing = asyncio.create_task(life.close(resource.release))
    await run_ready_tasks()
    gate.set()
    await closing
    assert (released, resource.released) == ([0], 1)


async def test_a_late_error_of_shielded_work_is_not_reported_as_unhandled() -> None:
    """The caller was cancelled and cannot get it; asyncio's handler stays quiet."""
    life, gate = opened(), asyncio.Event()
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context)
    )

    async def work() -> None:
        await gate.wait()
        raise ValueError("too late")

    caller = asyncio.create_task(life.run_shielded(work()))
    await run_ready_tasks()
    caller.cancel()
    await asyncio.wait([caller])
    gate.set()
    await life.close(run_ready_tasks)
    await run_ready_tasks()
    assert not reported


async def test_closing_waits_for_background_tasks_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that does not end is left behind."""
    monkeypatch.setattr(lifecycle, "_BACKGROUND_TIMEOUT", 0.01)
    life, resource, ended = opened(), Resource(), asyncio.Event()
    resource.allowed.set()
    life.spawn_in_background(ended.wait())
    await life.close(resource.release)
    assert resource.released == 1
    ended.set()


def test_a_handle_without_an_asyncio_loop_says_so() -> None:
    """As under trio, which drives a coroutine by itself."""
    cp = handle(GatedStore())

    with pytest.raises(WrongEventLoop, match="not on trio"):
        cp.__aenter__().send(None)


@pytest.mark.parametrize("method", METHODS)
def test_an_open_handle_without_an_asyncio_loop_says_so(method: str) -> None:
    """Each method raises before it waits for anything."""
    cp = handle(GatedStore())
    asyncio.run(cp.__aenter__())

    with pytest.raises(WrongEventLoop, match="not on trio"):
        METHODS[method](cp).send(None)


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_does_not_use_the_handle_of_its_parent() -> None:
    """On the copy of its loop; SQLite's thread would be missing, and never answer."""

    async def is_refused(work: Awaitable[object]) -> bool:
        try:
            await work
        except WrongEventLoop:
            return True

        return False

    with asyncio.Runner() as runner:
        cp = handle(GatedStore())
        runner.run(cp.__aenter__())
        child = os.fork()

        if child == 0:
            try:
                refused = [
                    runner.run(is_refused(x)) for x in (cp.load("t"), cp.aclose())
                ]
                os._exit(0 if all(refused) else 1)
            finally:
                os._exit(2)

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert runner.run(cp.append("t", [{}])) == 1
        runner.run(cp.aclose())
