"""Cancelled at any await, a run or a lease leaves what its caller can go on from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from cpkit import Checkpointer
from cpkit.effects import Backoff, Effect, EffectLedger, EffectTimeout
from cpkit.effects.records import heartbeat_thread
from cpkit.lease import LeaseLost, thread_lease
from tests.broken.reference import Reference
from tests.effects.shop import OnlySix
from tests.simulation.loop import SimulatedLoop, simulated_loop

BACKOFF = Backoff(0.05, 1.0, lambda: 0.5)

Wrap = Callable[["Steps"], Checkpointer[Any]]

STORES = [
    pytest.param(lambda store: store, id="with receipts"),
    pytest.param(OnlySix, id="six methods"),
]


class Steps(Reference):
    """A store whose every operation takes a while before it applies, and after."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)

        if name not in OPERATIONS:
            return found

        async def slow(*args: Any, **options: Any) -> Any:
            await asyncio.sleep(0.01)
            answer = await found(*args, **options)
            await asyncio.sleep(0.01)
            return answer

        return slow


OPERATIONS = {
    "load",
    "save_extra",
    "record_issued",
    "record_result",
    "find_completed",
    "find_call",
    "delete_thread",
}


class Shop:
    """A handler of several steps, the middle one being the effect itself."""

    def __init__(self) -> None:
        self.began = 0
        self.landed = 0
        self.ended = 0

    async def charge(self, _: Effect) -> str:
        self.began += 1
        await asyncio.sleep(0.4)
        self.landed += 1
        await asyncio.sleep(0.4)
        self.ended += 1
        return "charged"


def cancelled_after(steps: int, task: asyncio.Task[Any], times: int = 1) -> None:
    """Cancel a task after so many steps of it, and again at the steps that follow."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    left = steps

    def step() -> None:
        nonlocal left
        left -= 1

        if left < -times or task.done():
            return

        if left < 0:
            task.cancel()

        loop.call_later(0.005, step)

    step()


async def ended(task: asyncio.Task[Any]) -> bool:
    """Wait for a task, and say whether it ended of itself."""
    await asyncio.wait([task])
    return not task.cancelled()


def swept(case: Callable[[int], Coroutine[Any, Any, bool]]) -> int:
    """Run a case with later and later cancellations, until one comes too late."""
    for steps in range(10_000):
        if simulated_loop(Random(steps)).run(case(steps)):
            return steps

    raise AssertionError("no run came to its end")


@pytest.mark.parametrize("wrap", STORES)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_run_leaves_its_key_free_unclear_or_settled(wrap: Wrap, times: int) -> None:
    """Free before its handler began, unclear while it runs, settled after it ended.

    Cancelled again while it sees to that, it may leave the key unclear, and never one
    free whose handler began.
    """

    async def case(steps: int) -> bool:
        async with Steps() as store:
            cp, shop, again = wrap(store), Shop(), Shop()
            ledger = EffectLedger(cp, backoff=BACKOFF, heartbeat=0.25)
            task = asyncio.create_task(ledger.run("t", "charge", {"n": 1}, shop.charge))
            cancelled_after(steps, task, times)
            finished = await ended(task)
            assert ledger._running == set()
            ledger = EffectLedger(cp, backoff=BACKOFF, timeout=5)
            settled = True

            try:
                told = await ledger.run("t", "charge", {"n": 1}, again.charge)
                assert told == "charged"
            except EffectTimeout:
                settled = False

            if shop.began:
                assert again.began == 0

            if times == 1:
                assert settled is (shop.began == shop.ended)

            return finished

    assert swept(case) > 150


@pytest.mark.parametrize("wrap", STORES)
def test_a_waiter_leaves_its_holder_alone(wrap: Wrap) -> None:
    """A run that waits for another's result may be cancelled at any time."""

    async def case(steps: int) -> bool:
        async with Steps() as store:
            cp, shop = wrap(store), Shop()
            ledger = EffectLedger(cp, backoff=BACKOFF)
            holder = asyncio.create_task(
                ledger.run("t", "charge", {"n": 1}, shop.charge)
            )

            while not shop.began:  # noqa: ASYNC110  # virtual time costs nothing
                await asyncio.sleep(0.01)

            waiter = asyncio.create_task(
                ledger.run("t", "charge", {"n": 1}, shop.charge)
            )
            cancelled_after(steps, waiter)
            finished = await ended(waiter)
            assert await holder == "charged"
            assert shop.began == 1
            return finished

    assert swept(case) > 50


def test_the_signs_of_life_of_a_finished_effect_are_gone() -> None:
    """Cancelled after its handler ended or not, a settled effect leaves no beats."""

    async def case(steps: int) -> bool:
        async with Steps() as store:
            shop = Shop()
            ledger = EffectLedger(store, backoff=BACKOFF, heartbeat=0.25)
            key = ledger.key("t", "charge", {"n": 1})
            task = asyncio.create_task(ledger.run("t", "charge", {"n": 1}, shop.charge))
            cancelled_after(steps, task)
            finished = await ended(task)

            if finished:
                assert await store.load(heartbeat_thread(key)) is None

            return finished

    swept(case)


@pytest.mark.parametrize("wrap", STORES)
def test_a_lease_is_free_after_it(wrap: Wrap) -> None:
    """Whoever was cancelled with a lease, or on the way to one, does not keep it."""

    async def case(steps: int) -> bool:
        async with Steps() as store:
            cp = wrap(store)

            async def work() -> None:
                async with thread_lease(cp, "t", stale_after=60, backoff=BACKOFF):
                    await asyncio.sleep(0.1)

            task = asyncio.create_task(work())
            cancelled_after(steps, task)
            finished = await ended(task)

            async with thread_lease(cp, "t", timeout=5, backoff=BACKOFF):
                return finished

    assert swept(case) > 20


def test_a_lease_that_is_looked_at_late_cancels_nobody() -> None:
    """``check`` by another task says that it ended, and leaves its old holder alone."""

    async def case(steps: int) -> None:
        async with Steps() as store:
            lease = thread_lease(store, "t", stale_after=60, backoff=BACKOFF)
            entered = asyncio.Event()

            async def work() -> None:
                async with lease:
                    entered.set()
                    await asyncio.sleep(0.1)

                await asyncio.sleep(1)

            task = asyncio.create_task(work())
            await entered.wait()
            await asyncio.sleep(steps * 0.005)

            with contextlib.suppress(LeaseLost):
                await lease.check()

            assert await ended(task)

            with pytest.raises(LeaseLost, match="released"):
                await lease.load()

    for steps in range(40):
        simulated_loop(Random(steps)).run(case(steps))
