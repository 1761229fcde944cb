"""Callers that wait: they share one reader, which reads and never claims."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from cpkit import CallRecord, JsonValue
from cpkit.effects import EffectLedger
from cpkit.lease import thread_lease
from tests.effects.shop import Counting, Shop, Store, quick, until

ARGS: dict[str, JsonValue] = {"order": "7"}
CALLERS = 1_000


class Watched(Counting):
    """A store that logs its calls, and watches like the store behind it."""

    def __init__(self, cp: Any) -> None:
        super().__init__(cp)
        self.watch = cp.watch


async def test_a_thousand_callers_share_one_reader(cp: Store, thread: str) -> None:
    """While they wait, the store is looked at a few times a second, by reads alone."""
    counting = Watched(cp)
    ledger = EffectLedger(counting)
    begun = await quick(cp).begin(thread, "charge", ARGS)
    shop = Shop()
    runs = [
        asyncio.create_task(ledger.run(thread, "charge", ARGS, shop.charge))
        for _ in range(CALLERS)
    ]

    async def all_wait() -> bool:
        return Counter(counting.calls)["find_call"] > CALLERS

    await until(all_wait, 30)
    counting.calls.clear()
    clock = asyncio.get_running_loop().time
    began = clock()

    async def some_time_has_passed() -> bool:
        return clock() - began > 1

    await until(some_time_has_passed)
    seconds = clock() - began
    waited = Counter(counting.calls)
    assert set(waited) <= {"find_call"}
    assert waited.total() <= 10 * seconds

    counting.calls.clear()
    await quick(cp).commit(begun.record, "done")
    assert await asyncio.gather(*runs) == ["done"] * CALLERS
    assert shop.effects == []
    # One look found the result for all of them.
    assert Counter(counting.calls).total() <= 10


async def test_a_run_gives_its_result_to_callers_in_its_process(
    cp: Store, thread: str
) -> None:
    """They do not look at the store for it."""
    counting = Watched(cp)
    ledger = EffectLedger(counting)
    shop = Shop(gate=asyncio.Event())
    runs = [
        asyncio.create_task(ledger.run(thread, "charge", ARGS, shop.charge))
        for _ in range(20)
    ]
    await shop.began.wait()

    async def all_wait() -> bool:
        return Counter(counting.calls)["find_call"] > 20

    await until(all_wait)
    assert shop.gate is not None
    shop.gate.set()
    assert await asyncio.gather(*runs) == [{"charge": 1}] * 20
    assert Counter(counting.calls)["record_result"] == 1
    assert len(shop.effects) == 1


async def test_an_approval_is_waited_for_by_reads(cp: Store, thread: str) -> None:
    """The decision of another handle's process wakes all runs of the key."""
    counting = Watched(cp)
    ledger = EffectLedger(counting, requires_approval=lambda _: True)
    shop = Shop()
    runs = [
        asyncio.create_task(ledger.run(thread, "charge", ARGS, shop.charge))
        for _ in range(50)
    ]
    key = ledger.key(thread, "charge", ARGS)

    async def requested() -> bool:
        return any(one.key == key for one in await quick(cp).pending(thread))

    await until(requested)
    await asyncio.sleep(0)
    assert await quick(cp).approve(key)
    assert await asyncio.gather(*runs) == [{"charge": 1}] * 50
    assert len(shop.effects) == 1


async def test_a_runner_waits_for_a_lease_by_reads(cp: Store, thread: str) -> None:
    """It claims once before it waits, and once after the term has ended."""
    counting = Watched(cp)
    term = thread_lease(cp, thread)
    await term.__aenter__()

    async def second() -> int:
        async with thread_lease(counting, thread) as lease:
            return lease.token

    waiting = asyncio.create_task(second())

    async def looked() -> bool:
        return Counter(counting.calls)["load"] >= 1

    await until(looked)
    assert Counter(counting.calls)["record_issued"] <= 2
    await term.__aexit__(None, None, None)
    assert await waiting == term.token + 1


async def test_a_cancelled_caller_does_not_disturb_the_others(
    cp: Store, thread: str
) -> None:
    """The last one that leaves ends the reader; no task is left."""
    ledger = quick(cp)
    begun = await quick(cp).begin(thread, "charge", ARGS)
    runs = [
        asyncio.create_task(ledger.run(thread, "charge", ARGS, Shop().charge))
        for _ in range(3)
    ]
    await asyncio.sleep(0.05)
    runs[0].cancel()

    with pytest.raises(asyncio.CancelledError):
        await runs[0]

    await quick(cp).commit(begun.record, "done")
    assert await runs[1] == await runs[2] == "done"


async def test_every_caller_gets_its_own_copy_of_an_error(
    cp: Store, thread: str
) -> None:
    """A look that fails ends the wait of all callers."""
    await quick(cp).begin(thread, "charge", ARGS)

    class Broken(Watched):
        broken = False

        def __init__(self, cp: Any) -> None:
            super().__init__(cp)
            found = self.find_call

            async def find_call(idempotency_key: str) -> CallRecord | None:
                if self.broken:
                    raise RuntimeError("a bug in a store")

                return await found(idempotency_key)

            self.find_call = find_call

    broken = Broken(cp)
    ledger = quick(broken)
    runs = [
        asyncio.create_task(ledger.run(thread, "charge", ARGS, Shop().charge))
        for _ in range(2)
    ]

    async def all_wait() -> bool:
        return Counter(broken.calls)["find_call"] > 2

    await until(all_wait)
    broken.broken = True
    await cp.append(thread, [{"wakes": "the reader"}])
    errors = await asyncio.gather(*runs, return_exceptions=True)
    assert [str(error) for error in errors] == ["a bug in a store"] * 2
    assert errors[0] is not errors[1]
