"""Readers that callers of one process share: errors, and what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import pytest

from cpkit import CallRecord, MemoryCheckpointer, ToolCall
from cpkit.effects import EffectLedger
from cpkit.effects.waits import Answer, Look, SharedWaits
from tests.driver.gated import run_ready_tasks
from tests.effects.shop import Shop, claim
from tests.simulation.loop import simulated_loop


class Odd(Exception):
    """An error that cannot be copied: its constructor takes other arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__("odd")
        self.code = code


Wait = Callable[[SharedWaits, Look], Awaitable[Answer]]


@pytest.fixture
async def wait(cp: MemoryCheckpointer[Any]) -> Wait:
    """A function that waits for an issued effect."""
    holder = await claim(cp, "t", "key", {})
    return lambda waits, look: waits.wait(cp, holder, look)


@pytest.fixture
async def cp() -> AsyncIterator[MemoryCheckpointer[Any]]:
    """An open store in memory."""
    async with MemoryCheckpointer[Any]() as opened:
        yield opened


async def test_every_caller_gets_the_error_of_a_look(wait: Wait) -> None:
    """Also an error that cannot be copied, and with its cause."""
    waits, all_wait = SharedWaits(), asyncio.Event()

    async def look() -> CallRecord | None:
        await all_wait.wait()
        raise Odd(code=7) from ZeroDivisionError()

    callers = [asyncio.ensure_future(wait(waits, look)) for _ in range(3)]
    await run_ready_tasks()
    (reader,) = waits._readers.values()
    assert len(reader._callers) == 3
    all_wait.set()

    for error in await asyncio.gather(*callers, return_exceptions=True):
        assert isinstance(error, Odd)
        assert error.code == 7
        assert isinstance(error.__cause__, ZeroDivisionError)

    assert waits._readers == {}


async def test_a_reader_exists_while_callers_wait(
    wait: Wait, cp: MemoryCheckpointer[Any]
) -> None:
    """Two share one. A caller that is cancelled leaves it to the other."""
    waits = SharedWaits()

    async def look() -> CallRecord | None:
        return await cp.find_call("key")

    first = asyncio.ensure_future(wait(waits, look))
    second = asyncio.ensure_future(wait(waits, look))
    await run_ready_tasks()
    (reader,) = waits._readers.values()
    first.cancel()
    await asyncio.wait([first])
    assert list(waits._readers.values()) == [reader]
    assert len(reader._callers) == 1
    held = await cp.find_call("key")
    assert held is not None
    await cp.record_result("t", held.call.call_id, "done")
    answer = await second
    assert isinstance(answer, CallRecord)
    assert answer.result == "done"
    assert waits._readers == {}


async def test_a_caller_that_timed_out_leaves_nothing(
    wait: Wait, cp: MemoryCheckpointer[Any]
) -> None:
    """Its future is dropped at once, and with the last one its reader."""
    waits = SharedWaits()

    async def look() -> CallRecord | None:
        return await cp.find_call("key")

    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await wait(waits, look)

        assert waits._readers == {}


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_reader_that_is_cancelled_lets_its_callers_look_again(
    wait: Wait, has_begun: bool
) -> None:
    """A program may cancel all tasks that it does not know."""
    waits = SharedWaits()

    async def look() -> CallRecord | None:
        await asyncio.Event().wait()
        return None

    callers = [asyncio.ensure_future(wait(waits, look)) for _ in range(2)]
    await (run_ready_tasks() if has_begun else asyncio.sleep(0))
    (reader,) = waits._readers.values()
    assert reader._task is not None
    reader._task.cancel()

    async with asyncio.timeout(10):
        assert await asyncio.gather(*callers) == [None, None]

    assert waits._readers == {}


async def test_attempts_of_two_threads_may_have_one_id(
    cp: MemoryCheckpointer[Any],
) -> None:
    """An id of a model is unique in its thread alone: each caller gets its own."""
    ledger, shop = EffectLedger(cp), Shop()
    threads = ["paris", "rome"]
    keys = [ledger.key(thread, "charge", {}) for thread in threads]

    for thread, key in zip(threads, keys, strict=True):
        call = ToolCall("call_0", "charge", {"args": {}}, key)
        await cp.record_issued(thread, call)

    runs = [
        asyncio.ensure_future(ledger.run(thread, "charge", {}, shop.charge))
        for thread in threads
    ]
    await run_ready_tasks()

    for thread in threads:
        await cp.record_result(thread, "call_0", f"charged in {thread}")

    assert await asyncio.gather(*runs) == ["charged in paris", "charged in rome"]
    assert shop.effects == []


# Seconds, of a simulated clock.
LOOK, CHANGE = 0.001, 0.002


async def wait_on_a_busy_thread(waiters: int) -> tuple[list[float], float]:
    """Decide keys of a thread that changes all the time.

    Returns how long each decision took to be seen, and the looks a second.
    """
    clock = asyncio.get_running_loop().time
    looks = 0

    async with MemoryCheckpointer[Any]() as cp:
        waits = SharedWaits.of(cp)

        async def change() -> None:
            while True:
                await asyncio.sleep(CHANGE)
                await cp.append("busy", [{}])

        async def wait(key: str, holder: CallRecord) -> float:
            async def look() -> CallRecord | None:
                nonlocal looks
                looks += 1
                await asyncio.sleep(LOOK)
                return await cp.find_call(key)

            async with asyncio.timeout(60):
                await waits.wait(cp, holder, look)

            return clock()

        holders = {
            f"k{n}": await claim(cp, "busy", f"k{n}", {}) for n in range(waiters)
        }
        changing = asyncio.create_task(change())
        waiting = [asyncio.create_task(wait(*one)) for one in holders.items()]
        await asyncio.sleep(1)
        rate, took = looks, []

        for task, holder in zip(waiting, holders.values(), strict=True):
            await asyncio.sleep(0.0377)
            await cp.record_result("busy", holder.call.call_id, "done")
            decided = clock()
            took.append(await task - decided)

        changing.cancel()
        return took, rate


def test_a_decision_on_a_busy_thread_is_seen_after_one_rest() -> None:
    """However often other changes come."""
    took, rate = simulated_loop(Random(0)).run(wait_on_a_busy_thread(1))
    assert max(took) <= 9 * LOOK + CHANGE + 2 * LOOK
    assert rate * LOOK <= 0.11


def test_waiters_on_a_busy_thread_share_their_rest() -> None:
    """Each looks four times a second; the store has time for others."""
    took, rate = simulated_loop(Random(0)).run(wait_on_a_busy_thread(30))
    assert rate <= 30 * 5
    assert max(took) <= 0.25 + 2 * LOOK + CHANGE
