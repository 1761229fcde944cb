"""A run that is cancelled after its handler ended still records the outcome."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import (
    CallRecord,
    JsonValue,
    MemoryCheckpointer,
    PayloadTooLarge,
    ToolCall,
)
from tests.effects.shop import Plain, Shop, Store, quick

ARGS: dict[str, JsonValue] = {"amount": 1000}


class Slow(Plain):
    """Some writes take many turns of the event loop, and can be cancelled in each.

    ``slow_claim`` says which claims are slow: the first is 1. A slow claim is applied
    before its pause; without ``applied`` it is never applied.
    """

    def __init__(
        self, cp: Any, *, slow_claim: int = 0, applied: bool = True, limit: int = 1000
    ) -> None:
        super().__init__(cp)
        self.began = asyncio.Event()
        self._cp = cp
        self._slow_claim = slow_claim
        self._applied = applied
        self._limit = limit
        self._claims = 0
        self.record_issued = self._issue
        self.record_result = self._resolve

    async def _issue(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._claims += 1

        if self._claims != self._slow_claim:
            record: CallRecord | None = await self._cp.record_issued(thread_id, call)
            return record

        if self._applied:
            await self._cp.record_issued(thread_id, call)

        await self._pause()
        raise AssertionError("the claim was not cancelled")

    async def _resolve(
        self, thread_id: str, call_id: str, result: JsonValue, *, success: bool = True
    ) -> CallRecord:
        if not self._slow_claim:
            await self._pause()

        if len(str(result)) > self._limit:
            raise PayloadTooLarge(("result",), len(str(result)), self._limit)

        record: CallRecord = await self._cp.record_result(
            thread_id, call_id, result, success=success
        )
        return record

    async def _pause(self) -> None:
        self.began.set()

        for _ in range(100):
            await asyncio.sleep(0)


async def cancel_often(task: asyncio.Task[Any]) -> None:
    """Cancel a task at every await, as the scopes of anyio do."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)

    assert task.cancelled()


async def test_a_finished_handler_is_recorded_however_often_it_is_cancelled(
    cp: Store, thread: str
) -> None:
    """Otherwise a takeover without ``verify`` would run it again."""
    slow, shop = Slow(cp), Shop()
    task = asyncio.create_task(quick(slow).run(thread, "charge", ARGS, shop.charge))
    await slow.began.wait()
    await cancel_often(task)
    later = quick(cp, stale_after=0.05 * slowdown())
    assert await later.run(thread, "charge", ARGS, shop.charge) == {"charge": 1}
    assert len(shop.effects) == 1


@pytest.mark.parametrize("turns", range(4))
def test_a_run_cancelled_when_the_program_ends_records_its_outcome(turns: int) -> None:
    """``asyncio.run`` cancels all tasks, also the one that records the outcome."""
    name, shop = f"ends-{turns}", Shop()

    async def program() -> None:
        slow = Slow(await MemoryCheckpointer[Any](name).__aenter__())
        task = asyncio.create_task(quick(slow).run("t", "charge", ARGS, shop.charge))
        await slow.began.wait()
        task.cancel()

        for _ in range(turns):
            await asyncio.sleep(0)

    async def later() -> None:
        async with MemoryCheckpointer[Any](name) as cp:
            ledger = quick(cp, stale_after=0.05 * slowdown())
            assert await ledger.run("t", "charge", ARGS, shop.charge) == {"charge": 1}

    asyncio.run(program())
    asyncio.run(later())
    assert len(shop.effects) == 1


async def test_a_result_too_large_for_the_store_is_recorded_as_a_failure(
    cp: Store, thread: str
) -> None:
    """The effect happened, also if its run was cancelled while it recorded that."""
    slow, shop = Slow(cp, limit=500), Shop("x" * 500)
    ledger = quick(slow)
    task = asyncio.create_task(ledger.run(thread, "charge", ARGS, shop.charge))
    await slow.began.wait()
    await cancel_often(task)
    record = await cp.find_completed(ledger.key(thread, "charge", ARGS))
    assert record is not None
    assert "PayloadTooLarge" in str(record.result)


async def test_a_claim_is_given_up_however_often_it_is_cancelled(
    cp: Store, thread: str
) -> None:
    """Its handler did not run, so the next run does not wait for it."""

    class SlowBoth(Slow):
        async def _resolve(
            self, thread_id: str, call_id: str, result: Any, *, success: bool = True
        ) -> CallRecord:
            await self._pause()
            return await super()._resolve(thread_id, call_id, result, success=success)

    slow, shop = SlowBoth(cp, slow_claim=1), Shop()
    task = asyncio.create_task(quick(slow).run(thread, "charge", ARGS, shop.charge))
    await slow.began.wait()
    await cancel_often(task)
    assert shop.effects == []
    await quick(cp).run(thread, "charge", ARGS, shop.charge)
    assert [effect.attempt for effect in shop.effects] == [2]


async def cancel_after_release(
    cp: Store, thread: str, ledger: Any, began: asyncio.Event
) -> None:
    """Cancel a run that learned, after its handler ended, that it was released.

    It is cancelled when ``began`` is set. Its outcome must be that of a new attempt.
    """
    shop = Shop("kept", gate=asyncio.Event())
    assert shop.gate is not None
    task = asyncio.create_task(ledger.run(thread, "charge", ARGS, shop.charge))
    await shop.began.wait()
    await cp.record_result(thread, shop.effects[0].call_id, {}, success=False)
    shop.gate.set()
    await began.wait()
    await cancel_often(task)
    assert await quick(cp).run(thread, "charge", ARGS, shop.charge) == "kept"
    assert len(shop.effects) == 1
    assert [(r.status, r.attempt) for r in await cp.list_calls(thread)] == [
        ("failed", 1),
        ("completed", 2),
    ]


@pytest.mark.parametrize("applied", [True, False])
async def test_a_run_cancelled_in_its_second_claim_records_its_outcome(
    cp: Store, thread: str, applied: bool
) -> None:
    """Whether that claim was applied or not."""
    slow = Slow(cp, slow_claim=2, applied=applied)
    ledger = quick(slow)
    await cancel_after_release(cp, thread, ledger, slow.began)
