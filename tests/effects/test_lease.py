"""Leases: one runner per thread, and a paused runner that cannot write."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing, suppress
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import (
    BackendUnavailable,
    Checkpointer,
    ToolCall,
    VersionConflict,
    open_checkpointer,
)
from cpkit.effects import Effect, EffectDenied
from cpkit.lease import Lease, LeaseLost, LeaseTimeout, thread_lease
from cpkit.runs.threads import RunState, RunThread, Wake, wake_run
from tests.broken.reference import Reference
from tests.effects.shop import Plain, Store, quick, until
from tests.simulation.loop import simulated_loop


def lease_of(cp: Store | Plain, thread: str, **options: Any) -> Lease:
    """Return a lease with a short ``stale_after``."""
    return thread_lease(cp, thread, **{"stale_after": 0.5, **options})


async def state_of(cp: Store, thread: str) -> RunState:
    """Return what the thread of a run shows."""
    return await RunThread(cp, thread).look()


async def abandon(cp: Store, thread: str) -> Lease:
    """Take the lease and never release it, like a process that is killed."""
    lease = lease_of(cp, thread)
    await lease._acquire()
    return lease


@pytest.mark.parametrize("option", ["stale_after", "timeout"])
@pytest.mark.parametrize("seconds", [nan, inf, -1.0])
async def test_impossible_intervals_are_refused(
    option: str, seconds: float, cp: Store, thread: str
) -> None:
    """With nan, a wait would not end; the store cannot keep either value."""
    with pytest.raises(ValueError, match=option):
        lease_of(cp, thread, **{option: seconds})


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
async def test_a_damaged_term_is_logged(
    error: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The block's own error counts more."""
    async with open_checkpointer(f"sqlite:///{tmp_path}/store.db") as cp:
        with pytest.raises(error):
            await run_on_damaged_term(cp, tmp_path, error)

        assert "CorruptThread" in caplog.text


async def run_on_damaged_term(
    cp: Checkpointer[Any], folder: Path, error: type[BaseException]
) -> None:
    """Damage the term while its block runs, and raise the error in the block."""
    async with thread_lease(cp, "t"):
        with closing(sqlite3.connect(folder / "store.db")) as raw, raw:
            damaged = raw.execute("UPDATE cpkit_calls SET args = '{'")
            assert damaged.rowcount == 1

        raise error


async def test_one_runner_at_a_time(cp: Store, thread: str) -> None:
    """Runners take turns, and each term has a higher token than the one before."""
    inside = 0
    tokens = []

    async def runner() -> None:
        nonlocal inside

        async with lease_of(Plain(cp), thread) as lease:
            inside += 1
            assert inside == 1
            tokens.append(lease.token)
            await asyncio.sleep(0.005)
            inside -= 1

    await asyncio.gather(*(runner() for _ in range(8)))
    assert tokens == list(range(1, 9))


async def test_leases_of_different_threads_are_independent(
    cp: Store, thread: str
) -> None:
    """This holds for ids of the maximal length, which differ in one character."""
    long = thread.ljust(512, "x")

    async with lease_of(cp, thread), lease_of(cp, long), lease_of(cp, f"{long[:-1]}y"):
        with pytest.raises(LeaseTimeout, match="is run by"):
            await lease_of(cp, long, timeout=0.05).__aenter__()


async def test_a_held_lease_is_renewed(cp: Store, thread: str) -> None:
    """A runner that waits longer than ``stale_after`` does not get the lease."""
    async with lease_of(cp, thread, stale_after=0.4 * slowdown()) as lease:
        with pytest.raises(LeaseTimeout):
            await lease_of(cp, thread, timeout=1.2 * slowdown()).__aenter__()

        await lease.check()
        assert not lease.lost

        data = await cp.load(f"cpkit:run:{thread}")
        assert data is not None
        assert list(data.extra) == ["renewed"]  # extra does not grow

    # The run ended well and left nothing open, so its thread is gone.
    assert await cp.load(f"cpkit:run:{thread}") is None


async def test_a_dead_holder_is_taken_over(cp: Store, thread: str) -> None:
    """The new token is higher, and the holder's own ``stale_after`` applies."""
    dead = await abandon(cp, thread)

    async with lease_of(cp, thread, stale_after=30) as lease:
        assert lease.token == dead.token + 1

        with pytest.raises(LeaseLost, match="took it over"):
            await dead.check()


async def test_a_runner_that_lost_its_lease_cannot_write(
    cp: Store, thread: str
) -> None:
    """The version of its term is out of date, so its append conflicts."""
    await cp.append(thread, [{"n": 1}])
    paused = await abandon(cp, thread)
    data = await paused.load()
    assert data is not None

    async with lease_of(cp, thread) as lease:
        found = await lease.load()
        assert found is not None
        await cp.append(thread, [{"n": 2}], expected_version=found.version)

    with pytest.raises(VersionConflict):
        await cp.append(thread, [{"paused": 2}], expected_version=data.version)

    with pytest.raises(LeaseLost):
        await paused.load()  # the thread has its successor's messages now


async def test_a_lost_lease_cancels_the_block(cp: Store, thread: str) -> None:
    """The block is cancelled at its next await, and ``LeaseLost`` is raised."""
    lease = lease_of(cp, thread)
    cancelled = False

    async def work() -> None:
        nonlocal cancelled

        async with lease:
            call = lease.term_id
            await cp.record_result(f"cpkit:run:{thread}", call, {}, success=False)

            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled = True
                raise

    with pytest.raises(LeaseLost) as lost:
        await work()

    assert cancelled
    assert lost.value.token == lease.token == 1
    assert lease.lost
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_loss_after_the_last_await_raises_too(cp: Store, thread: str) -> None:
    """The cancellation does not leak out of the ``async with``."""
    lease = lease_of(cp, thread)

    async def work() -> None:
        async with lease:
            # What the renewer does, after the last await of the block.
            lease._reason = "taken over"
            lease._cancelled_block = True
            assert lease._task is not None
            lease._task.cancel()

    with pytest.raises(LeaseLost):
        await work()

    await asyncio.sleep(0)  # raises if a cancellation is left


async def test_a_holder_that_cannot_renew_stops_before_a_takeover(
    cp: Store, thread: str
) -> None:
    """It measures with its own clock."""

    class Away(Plain):
        async def refuse(self, *_: object) -> None:
            raise BackendUnavailable("test", "away")

    async def work() -> None:
        store: Any = Away(cp)

        async with lease_of(store, thread, stale_after=0.3 * slowdown()):
            store.load = store.refuse
            await asyncio.Event().wait()

    with pytest.raises(LeaseLost, match="could not be renewed"):
        await work()


def test_a_claim_whose_answer_was_late_is_renewed_at_once() -> None:
    """Other runners count from the claim. By its answer, the term is almost stale."""

    async def main() -> None:
        async with Reference() as cp:
            slow = Plain(cp)
            other = thread_lease(cp, "thread", stale_after=15, timeout=40)
            waiting: list[asyncio.Task[Lease]] = []

            async def claim(thread_id: str, call: ToolCall) -> Any:
                slow.record_issued = cp.record_issued
                record = await cp.record_issued(thread_id, call)
                waiting.append(asyncio.create_task(other.__aenter__()))
                await asyncio.sleep(14)
                return record

            slow.record_issued = claim

            async with thread_lease(slow, "thread", stale_after=15):
                with pytest.raises(LeaseTimeout):
                    await waiting[0]

    simulated_loop(Random(1)).run(main())


def test_a_heartbeat_is_counted_once_if_its_answer_was_lost() -> None:
    """Others count from when they saw it, and not from when it was tried again."""

    async def main() -> None:
        async with Reference() as cp:
            clock = asyncio.get_running_loop().time
            flaky = Plain(cp)
            applied: list[float] = []

            async def renew(thread_id: str, extra: Any) -> None:
                """Lose the answer, then fail, then write again, then fail."""
                if not applied or (len(applied) == 1 and clock() > applied[0] + 6):
                    applied.append(clock())
                    await cp.save_extra(thread_id, extra)

                    if len(applied) == 2:
                        return

                raise BackendUnavailable("test", "away", maybe_applied=True)

            flaky.save_extra = renew

            async def hold() -> float:
                with pytest.raises(LeaseLost):
                    async with thread_lease(flaky, "thread", stale_after=15):
                        await asyncio.Event().wait()

                return clock()

            async def follow() -> float:
                await asyncio.sleep(1)

                async with thread_lease(cp, "thread", stale_after=15):
                    return clock()

            ended, begun = await asyncio.gather(hold(), follow())
            assert len(applied) == 2
            assert ended <= begun

    simulated_loop(Random(1)).run(main())


async def test_a_renewal_that_raises_any_exception_is_retried(
    cp: Store, thread: str
) -> None:
    """Without its renewer, the holder would not learn that the lease is lost."""
    calls = 0

    class FailsOnce(Plain):
        async def fail_once(self, thread_id: str, extra: Any) -> None:
            nonlocal calls
            calls += 1

            if calls == 1:
                raise RuntimeError("a bug in a driver")

            await cp.save_extra(thread_id, extra)

    store: Any = FailsOnce(cp)
    store.save_extra = store.fail_once

    async with lease_of(store, thread, stale_after=0.3 * slowdown()) as lease:

        async def renewed() -> bool:
            return calls > 2

        await until(renewed)
        await lease.check()


@pytest.mark.parametrize("how", ["returns", "raises", "is cancelled"])
async def test_a_lease_is_released_on_exit(cp: Store, thread: str, how: str) -> None:
    """However the block ends, the next runner gets the lease at once."""

    async def block() -> None:
        async with lease_of(cp, thread, stale_after=60):
            if how == "raises":
                raise ZeroDivisionError

            if how == "is cancelled":
                await asyncio.Event().wait()

    task = asyncio.create_task(block())

    async def held() -> bool:
        return task.done() or await cp.load(f"cpkit:run:{thread}") is not None

    await until(held)
    task.cancel() if how == "is cancelled" else None
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert (
        type(outcome)
        is {
            "returns": type(None),
            "raises": ZeroDivisionError,
            "is cancelled": asyncio.CancelledError,
        }[how]
    )

    async with lease_of(cp, thread, timeout=5) as lease:
        assert lease.token == 2


async def test_an_error_of_the_block_is_raised_unchanged(
    cp: Store, thread: str
) -> None:
    """``VersionConflict`` is raised, even if the lease is lost."""

    async def work() -> None:
        async with lease_of(cp, thread) as lease:
            call = lease.term_id
            await cp.record_result(f"cpkit:run:{thread}", call, {}, success=False)

            with pytest.raises(LeaseLost):
                await lease.check()

            raise VersionConflict(thread, 1, 2)

    with pytest.raises(VersionConflict):
        await work()


async def test_a_term_with_malformed_args_can_be_taken_over(
    cp: Store, thread: str
) -> None:
    """A recorded ``stale_after`` that is not a number is ignored."""
    mine = lease_of(cp, thread)
    odd = ToolCall(
        "odd", "cpkit:lease", {"stale_after": "x"}, mine._term.idempotency_key
    )
    await cp.record_issued(f"cpkit:run:{thread}", odd)

    async with mine as lease:
        assert lease.token == 2


async def test_a_run_stays_on_the_list_until_one_ends_well(
    cp: Store, thread: str
) -> None:
    """A dead run and failed runs call for another, and a well ended one for none."""
    await abandon(cp, thread)

    async with lease_of(cp, thread) as recovering:  # takes the dead run's term over
        recovering.run_no_agent()

    assert [one.why for one in (await state_of(cp, thread)).wakes] == ["died"]

    with pytest.raises(ZeroDivisionError):
        async with lease_of(cp, thread):
            raise ZeroDivisionError

    state = await state_of(cp, thread)
    assert [one.why for one in state.wakes] == ["died", "ended: ZeroDivisionError"]
    assert state.failures == 1

    async with lease_of(cp, thread) as lease:
        assert [one.why for one in lease.wakes] == ["died", "ended: ZeroDivisionError"]

    assert await cp.load(f"cpkit:run:{thread}") is None


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, ValueError, asyncio.CancelledError]
)
async def test_a_run_that_ends_with_an_error_is_unfinished(
    cp: Store, thread: str, error: type[BaseException]
) -> None:
    """Ctrl-C, an exception and a cancelled request are as a kill: a worker goes on."""
    with pytest.raises(error):
        async with lease_of(cp, thread):
            raise error

    (wake,) = (await state_of(cp, thread)).wakes
    assert wake.why == f"ended: {error.__name__}"


async def test_a_run_that_is_cancelled_at_every_await_is_unfinished(
    cp: Store, thread: str
) -> None:
    """As a web framework does; the lease is released all the same."""
    began = asyncio.Event()

    async def work() -> None:
        async with lease_of(cp, thread, stale_after=60):
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await began.wait()

    while not task.done():
        task.cancel()
        await asyncio.sleep(0)

    assert task.cancelled()

    async with lease_of(cp, thread, timeout=5) as lease:
        assert [one.why for one in lease.wakes] == ["ended: CancelledError"]


async def test_a_run_that_leaves_an_effect_open_is_unfinished(
    cp: Store, thread: str
) -> None:
    """Cancelled in the middle, or begun by hand and not committed."""
    ledger = quick(cp)

    async def pay(_: Effect) -> None:
        limit.reschedule(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    async with lease_of(cp, thread):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                await ledger.run(thread, "pay", {}, pay)

    async with lease_of(cp, thread) as lease:
        assert [one.why for one in lease.wakes] == ["ended: an effect is open"]
        begun = await ledger.begin(thread, "mail", {})

    async with lease_of(cp, thread) as lease:
        assert len(lease.wakes) == 2
        again = await ledger.begin(thread, "fax", {})
        await ledger.commit(again.record)

    await ledger.commit(begun.record)
    assert await cp.load(f"cpkit:run:{thread}") is None


@pytest.mark.parametrize("denied", [True, False])
async def test_an_effect_that_a_wait_for_a_person_ended_is_not_open(
    cp: Store, thread: str, denied: bool
) -> None:
    """It is begun by hand: a person denies it, or another run does it meanwhile."""
    ledger = quick(cp, requires_approval=lambda _: True)
    key = ledger.key(thread, "pay", {})

    async def begin() -> bool:
        async with lease_of(cp, thread, stale_after=60) as lease:
            with suppress(EffectDenied):
                assert not (await ledger.begin(thread, "pay", {})).fresh

            return lease.would_end_well(None)

    begun = asyncio.create_task(begin())
    await until(lambda: ledger.pending(thread))

    if denied:
        await ledger.deny(key)
    else:
        await quick(cp).run(thread, "pay", {}, lambda _: "paid")
        await ledger.approve(key)

    assert await begun


async def test_a_wake_during_a_run_is_for_the_next_one(cp: Store, thread: str) -> None:
    """The run began before it, so it may not have seen what it is about."""
    async with lease_of(cp, thread):
        await wake_run(cp, thread, Wake("submitted", {"n": 1}))

    async with lease_of(cp, thread) as lease:
        assert [one.event for one in lease.wakes] == [{"n": 1}]

    assert await cp.load(f"cpkit:run:{thread}") is None


async def test_a_store_that_cannot_delete_keeps_the_thread_of_a_run(
    cp: Store, thread: str
) -> None:
    """Its wakes are done all the same."""
    await wake_run(cp, thread, Wake("submitted"))

    async with lease_of(Plain(cp), thread):
        pass

    assert await state_of(cp, thread) == RunState(thread, version=2)


async def test_a_lease_is_entered_once(cp: Store, thread: str) -> None:
    """A second entry is an error that names the function to call."""
    lease = lease_of(cp, thread)

    async with lease:
        pass

    with pytest.raises(RuntimeError, match="thread_lease again"):
        await lease.__aenter__()


async def test_a_task_does_not_wait_for_itself(cp: Store, thread: str) -> None:
    """It gets an error at once, which says what to do."""
    async with lease_of(cp, thread):
        with pytest.raises(LeaseTimeout) as caught:
            await lease_of(cp, thread).__aenter__()

    assert str(caught.value) == (
        f"thread {thread!r} is run by this task: pass its lease on, or set a timeout"
    )


async def test_a_thread_forgotten_while_it_is_claimed_is_claimed_again(
    cp: Store, thread: str
) -> None:
    """The look after the claim does not find the term."""
    forgotten = Plain(cp)
    looks = 0

    async def load(thread_id: str) -> Any:
        nonlocal looks
        looks += 1

        if looks < 3:
            await cp.delete_thread(thread_id, forget_keys=True)

        return await cp.load(thread_id)

    forgotten.load = load

    async with lease_of(forgotten, thread) as lease:
        assert (looks, lease.token) == (3, 1)


async def test_a_deleted_lease_can_be_taken(cp: Store, thread: str) -> None:
    """Its term shows nowhere, and would hold the key for ever."""
    run = RunThread(cp, thread)
    await run.claim(run.new_term("dead", 60))
    await cp.delete_thread(run.name)

    async with asyncio.timeout(10), lease_of(cp, thread, timeout=0) as lease:
        assert lease.token == 2
