"""A handle's time: opened once, used in one loop, closed after what is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cpkit import Closed, MemoryCheckpointer, ToolCall, WrongEventLoop
from cpkit.driver.lifetime import Lifetime
from cpkit_sqlite import SQLiteCheckpointer

HANDLES: list[Callable[[], Any]] = [
    MemoryCheckpointer,
    lambda: SQLiteCheckpointer(":memory:"),
]
handles = pytest.mark.parametrize("make", HANDLES, ids=["memory", "sqlite"])

CALLS: list[Callable[[Any], Any]] = [
    lambda cp: cp.load("t"),
    lambda cp: cp.append("t", []),
    lambda cp: cp.save_extra("t", {}),
    lambda cp: cp.record_issued("t", ToolCall("c", "tool", {}, "k")),
    lambda cp: cp.record_result("t", "c", None),
    lambda cp: cp.find_completed("k"),
    lambda cp: cp.list_threads(),
    lambda cp: cp.read("t"),
    lambda cp: cp.list_calls("t"),
    lambda cp: cp.find_call("k"),
    lambda cp: cp.delete_thread("t"),
]


class Resource:
    """What a handle releases: counts how often, and waits to be told."""

    def __init__(self) -> None:
        self.released: int = 0
        self.may_go = asyncio.Event()

    async def release(self) -> None:
        await self.may_go.wait()
        self.released += 1


def in_another_loop(body: Callable[[], Any]) -> Any:
    """Run a coroutine function in a loop of another thread."""
    return asyncio.to_thread(lambda: asyncio.run(body()))


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


@handles
async def test_a_handle_from_another_loop_is_refused_at_once(
    make: Callable[[], Any],
) -> None:
    """No method hangs: each says which loop is wrong, and the handle lives on."""
    async with make() as cp:

        async def use() -> None:
            for call in CALLS:
                with pytest.raises(WrongEventLoop):
                    await call(cp)

            with pytest.raises(WrongEventLoop):
                await cp.aclose()

        await in_another_loop(use)
        assert await cp.append("t", [{}]) == 1


@handles
async def test_an_unopened_and_a_closed_handle_refuse_every_method(
    make: Callable[[], Any],
) -> None:
    """Before the context and after it: ``Closed``, and closing again is nothing."""
    cp = make()
    await cp.aclose()

    for call in CALLS:
        with pytest.raises(Closed):
            await call(cp)

    async with cp:
        await cp.append("t", [{}])

    for call in CALLS:
        with pytest.raises(Closed):
            await call(cp)

    await cp.aclose()


@handles
async def test_a_handle_is_opened_once(make: Callable[[], Any]) -> None:
    """A second opening is refused, and leaves the first as it was."""
    async with make() as cp:
        with pytest.raises(Closed, match="enter it once"):
            await cp.__aenter__()

        assert await cp.append("t", [{}]) == 1

    with pytest.raises(Closed):
        await cp.__aenter__()


async def test_closing_waits_for_what_is_in_flight() -> None:
    """Work that was begun ends before the store is released; new work is refused."""
    lifetime, resource, work = Lifetime("s://x"), Resource(), asyncio.Event()
    lifetime.begin()
    resource.may_go.set()
    begun = asyncio.create_task(lifetime.finish(work.wait()))
    await settle()

    closing = asyncio.create_task(lifetime.end(resource.release))
    await settle()
    assert resource.released == 0

    with pytest.raises(Closed, match="s://x"):
        lifetime.check()

    work.set()
    await closing
    assert await begun is True
    assert resource.released == 1


async def test_closing_at_once_from_many_tasks_releases_once() -> None:
    """Every closer comes back after the one release."""
    lifetime, resource = Lifetime("s://x"), Resource()
    lifetime.begin()
    closers = [asyncio.create_task(lifetime.end(resource.release)) for _ in range(5)]
    await settle()
    assert not any(closer.done() for closer in closers)

    resource.may_go.set()
    await asyncio.gather(*closers)
    await lifetime.end(resource.release)
    assert resource.released == 1


async def test_a_cancelled_close_goes_on() -> None:
    """The closer stops waiting; the store is released all the same."""
    lifetime, resource = Lifetime("s://x"), Resource()
    lifetime.begin()
    closer = asyncio.create_task(lifetime.end(resource.release))
    await settle()
    closer.cancel()

    with pytest.raises(asyncio.CancelledError):
        await closer

    resource.may_go.set()
    await lifetime.end(resource.release)
    assert resource.released == 1


async def test_a_release_that_fails_is_told_to_every_closer() -> None:
    """An error in closing is not lost, and the store is not closed again."""
    lifetime = Lifetime("s://x")
    lifetime.begin()

    async def release() -> None:
        raise OSError("disk on fire")

    for _ in range(2):
        with pytest.raises(OSError, match="on fire"):
            await lifetime.end(release)


async def test_finish_goes_on_without_its_caller() -> None:
    """A caller that is cancelled leaves the work running."""
    lifetime, go, ended = Lifetime("s://x"), asyncio.Event(), []
    lifetime.begin()

    async def work() -> None:
        await go.wait()
        ended.append(True)

    caller = asyncio.create_task(lifetime.finish(work()))
    await settle()
    caller.cancel()

    with pytest.raises(asyncio.CancelledError):
        await caller

    go.set()
    await lifetime.end(settle)
    assert ended == [True]


async def test_during_is_cancelled_with_its_caller_and_ended_before_the_handle() -> (
    None
):
    """Its clean-up runs before the store is released, however many there are."""
    lifetime, resource, steps = Lifetime("s://x"), Resource(), []
    lifetime.begin()
    resource.may_go.set()

    async def work(turns: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(turns):
                await asyncio.sleep(0)

            assert resource.released == 0
            steps.append(turns)

    callers = [asyncio.create_task(lifetime.during(work(n))) for n in (3, 1, 5)]
    await settle()
    closing = asyncio.create_task(lifetime.end(resource.release))
    await settle()
    assert not closing.done()

    for caller in callers:
        caller.cancel()

    await closing
    assert steps == [1, 3, 5]
    assert all(caller.cancelled() for caller in callers)
    assert await Lifetime("s://y").during(asyncio.sleep(0, "done")) == "done"


async def test_an_error_without_a_waiting_caller_is_quiet() -> None:
    """Work that fails after its caller left is not reported as forgotten."""
    lifetime, go, reported = Lifetime("s://x"), asyncio.Event(), []
    lifetime.begin()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))

    async def work() -> None:
        await go.wait()
        raise ValueError("too late")

    caller = asyncio.create_task(lifetime.finish(work()))
    await settle()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    go.set()
    await lifetime.end(settle)
    await settle()
    assert not reported
