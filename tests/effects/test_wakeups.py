"""Readers that callers of one process share: errors, and what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from cpkit import CallRecord, MemoryCheckpointer
from cpkit.wakeups import Look, Reader, SharedWaits
from tests.driver.gated import run_ready_tasks
from tests.effects.shop import QUICK, claim


class Odd(Exception):
    """An error that cannot be copied: its constructor takes other arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__("odd")
        self.code = code


Join = Callable[[SharedWaits, Look], AbstractAsyncContextManager[Reader]]


@pytest.fixture
async def join(cp: MemoryCheckpointer[Any]) -> Join:
    """A function that returns the block of a caller that waits for an issued effect."""
    holder = await claim(cp, "t", "key", {})
    return lambda waits, look: waits.join("key", holder, cp, look, QUICK, 1.0)


@pytest.fixture
async def cp() -> AsyncIterator[MemoryCheckpointer[Any]]:
    """An open store in memory."""
    async with MemoryCheckpointer[Any]() as opened:
        yield opened


async def test_every_caller_gets_the_error_of_a_look(join: Join) -> None:
    """Also an error that cannot be copied, and with its cause."""
    waits, all_wait = SharedWaits(), asyncio.Event()

    async def look() -> CallRecord | None:
        await all_wait.wait()
        raise Odd(code=7) from ZeroDivisionError()

    async def caller() -> None:
        async with join(waits, look) as reader:
            await reader.wait(5)

    callers = [asyncio.create_task(caller()) for _ in range(3)]

    async with join(waits, look) as reader:
        await run_ready_tasks()
        assert len(reader._waiting) == 3
        all_wait.set()
        errors = await asyncio.gather(*callers, return_exceptions=True)

        with pytest.raises(Odd):
            await reader.wait(5)

    for error in errors:
        assert isinstance(error, Odd)
        assert error.code == 7
        assert isinstance(error.__cause__, ZeroDivisionError)

    assert waits._readers == {}


async def test_a_reader_exists_while_callers_are_in_their_blocks(
    join: Join, cp: MemoryCheckpointer[Any]
) -> None:
    """Not before, so that a caller that fails before its block leaves nothing."""
    waits = SharedWaits()

    async def look() -> CallRecord | None:
        return await cp.find_call("key")

    waiting = join(waits, look)
    assert waits._readers == {}

    async with waiting as first, join(waits, look) as second:
        assert first is second
        assert list(waits._readers) == ["key"]

    assert waits._readers == {}


async def test_a_caller_that_timed_out_leaves_nothing(
    join: Join, cp: MemoryCheckpointer[Any]
) -> None:
    """Its future is dropped at once."""

    async def look() -> CallRecord | None:
        return await cp.find_call("key")

    async with join(SharedWaits(), look) as reader:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await reader.wait(0)

        assert not reader._waiting
