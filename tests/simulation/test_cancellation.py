"""A run or a lease that is cancelled at any await leaves a usable state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from cpkit import Checkpointer
from cpkit.effects import Effect, EffectLedger, EffectTimeout
from cpkit.effects.waits import SharedWaits
from cpkit.lease import LeaseLost, thread_lease
from tests.broken.reference import Reference
from tests.effects.shop import Plain
from tests.simulation.loop import SimulatedLoop, simulated_loop
from tests.sweeps import table

Wrap = Callable[["Steps"], Checkpointer[Any]]


def whole(store: Steps) -> Checkpointer[Any]:
    """Return the store with all abilities."""
    return store


STORES = [
    pytest.param(whole, id="all abilities"),
    pytest.param(Plain, id="receipts alone"),
]


class Steps(Reference):
    """A store that sleeps before and after each operation."""

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
    """A handler of several steps; the effect happens in the middle one."""

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
    """Cancel a task after some steps, and again at the following steps."""
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
    """Wait for a task, and return whether it ended without a cancellation."""
    await asyncio.wait([task])
    return not task.cancelled()


def swept(case: Callable[[int], Coroutine[Any, Any, bool]]) -> int:
    """Run a case with later and later cancellations, until one is too late."""
    for steps in range(10_000):
        if simulated_loop(Random(steps)).run(case(steps)):
            return steps

    raise AssertionError("every run was cancelled")


@pytest.mark.parametrize(("wrap", "times"), table([whole, Plain], [1, 2, 3]))
def test_a_cancelled_run_leaves_its_key_in_the_right_state(
    wrap: Wrap, times: int
) -> None:
    """The key is free before the handler, unclear during it, and completed after it.

    A run that is cancelled again while it records this may leave the key unclear. It
    never frees the key once the handler started.
    """

    async def case(steps: int) -> bool:
        async with Steps() as store:
            cp, shop, again = wrap(store), Shop(), Shop()
            ledger = EffectLedger(cp, stale_after=0.75)
            task = asyncio.create_task(ledger.run("t", "charge", {"n": 1}, shop.charge))
            cancelled_after(steps, task, times)
            finished = await ended(task)
            assert SharedWaits.of(cp).running == {}
            ledger = EffectLedger(cp, timeout=5)
            completed = True

            try:
                got = await ledger.run("t", "charge", {"n": 1}, again.charge)
                assert got == "charged"
            except EffectTimeout:
                completed = False

            if shop.began:
                assert again.began == 0

            if times == 1:
                assert completed is (shop.began == shop.ended)

            return finished

    assert swept(case) > 150


@pytest.mark.parametrize("wrap", STORES)
def test_a_cancelled_waiter_does_not_disturb_the_holder(wrap: Wrap) -> None:
    """A run that waits for another run's result can be cancelled at any time."""

    async def case(steps: int) -> bool:
        async with Steps() as store:
            cp, shop = wrap(store), Shop()
            ledger = EffectLedger(cp)
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


def test_a_finished_effect_leaves_no_heartbeats() -> None:
    """This holds also if the run is cancelled after its handler ended."""

    async def case(steps: int) -> bool:
        async with Steps() as store:
            shop = Shop()
            ledger = EffectLedger(store, stale_after=0.75)
            task = asyncio.create_task(ledger.run("t", "charge", {"n": 1}, shop.charge))
            cancelled_after(steps, task)
            finished = await ended(task)

            if finished:
                left = await store.list_threads(prefix="cpkit:beats:")
                assert left == []

            return finished

    swept(case)


@pytest.mark.parametrize("wrap", STORES)
def test_a_cancelled_runner_does_not_keep_its_lease(wrap: Wrap) -> None:
    """The runner is cancelled while it holds the lease, or while it acquires it."""

    async def case(steps: int) -> bool:
        async with Steps() as store:
            cp = wrap(store)

            async def work() -> None:
                async with thread_lease(cp, "t", stale_after=60):
                    await asyncio.sleep(0.1)

            task = asyncio.create_task(work())
            cancelled_after(steps, task)
            finished = await ended(task)

            async with thread_lease(cp, "t", timeout=5):
                return finished

    assert swept(case) > 20


def test_a_late_check_of_a_lease_cancels_no_task() -> None:
    """``check`` by another task raises, and does not cancel the old holder's task."""

    async def case(steps: int) -> None:
        async with Steps() as store:
            lease = thread_lease(store, "t", stale_after=60)
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
