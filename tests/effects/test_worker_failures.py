"""What a worker does after failures, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from cpkit import BackendUnavailable, CorruptThread, MemoryCheckpointer
from cpkit.effects import EffectLedger, EffectTimeout
from cpkit.effects.effect import request_key
from cpkit.lease import Lease, LeaseTimeout, thread_lease
from cpkit.runs.threads import RunThread
from cpkit.worker import Worker, submit
from tests.effects.shop import Plain
from tests.simulation.loop import simulated_loop

Agent = Callable[[Any, Lease], Awaitable[None]]
Story = Callable[[MemoryCheckpointer[Any]], Awaitable[None]]


def tell(story: Story) -> None:
    """Run a story with a store, in virtual time."""

    async def main() -> None:
        async with MemoryCheckpointer[Any]() as cp:
            await story(cp)

    simulated_loop(Random(0)).run(main())


def run_of(cp: Any, thread: str = "t") -> RunThread:
    return RunThread(cp, thread)


async def died(cp: Any, thread: str = "t") -> None:
    """Record that a run of the thread died."""
    await run_of(cp, thread).add(wake={"why": "died"})


async def well(cp: Any, lease: Lease) -> None:
    """End well."""


async def run_for(worker: Worker, seconds: float) -> None:
    """Run a worker for some virtual seconds."""
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    await worker.run(stop)


async def raise_an_error() -> None:
    raise RuntimeError("a bug")


async def await_a_cancelled_task() -> None:
    task = asyncio.create_task(asyncio.sleep(9))
    task.cancel()
    await task


async def raise_a_lease_timeout() -> None:
    """Fail as a recover does in a task of its own that was not given the lease."""
    raise LeaseTimeout("t", 30.0, "this worker")


@pytest.mark.parametrize(
    ("fail", "count"),
    [(raise_an_error, 10), (await_a_cancelled_task, 6), (raise_a_lease_timeout, 6)],
)
def test_the_pauses_after_failures_double(
    fail: Callable[[], Awaitable[None]], count: int
) -> None:
    """1, 2, 4 … 300 seconds, for an error and for a task that was cancelled inside."""
    wanted = [1, 2, 4, 8, 16, 32, 64, 128, 256, 300][:count]

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        calls: list[float] = []

        async def agent(cp: Any, lease: Lease) -> None:
            calls.append(asyncio.get_running_loop().time())
            await fail()

        await died(cp)
        worker = Worker(cp, agent, poll=0.5)
        await run_for(worker, sum(wanted) + count)
        pauses = [int(late - early) for early, late in pairwise(calls)]
        assert pauses == wanted
        assert worker.health.failed == len(calls)

    tell(story)


@pytest.mark.parametrize("method", ["record_issued", "record_result", "append"])
def test_a_job_that_fails_before_the_function_pauses_too(method: str) -> None:
    """The lease cannot be taken: neither run nor run_due tries again at once."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        tries = 0

        async def refuse(*_: Any, **__: Any) -> None:
            nonlocal tries
            tries += 1
            raise BackendUnavailable("test", "away")

        run = run_of(cp)
        await run.claim(run.new_term("dead", 1.0))
        store: Any = Plain(cp)
        store.list_threads = cp.list_threads
        setattr(store, method, refuse)
        await run_for(worker := Worker(store, well, poll=0.1), 8)
        assert 1 <= tries <= 5
        assert worker.health.failed
        assert await Worker(store, well).run_due() <= 1

    tell(story)


def test_a_run_that_waited_for_another_run_is_repeated() -> None:
    """Nothing would wake it, so the worker marks it: its own decision is used up."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        began, go_on = asyncio.Event(), asyncio.Event()
        effects: list[str] = []

        async def pay(_: Any) -> str:
            effects.append("paid")
            return "paid"

        async def book(_: Any) -> str:
            began.set()
            await go_on.wait()
            return "booked"

        ledger = EffectLedger(
            cp,
            requires_approval=lambda effect: effect.tool == "pay",
            approval_timeout=0,
            timeout=0.1,
        )

        async def agent(cp: Any, lease: Lease) -> None:
            await ledger.run("t", "pay", {}, pay)
            effects.append(str(await ledger.run("t", "book", {}, book)))

        elsewhere = asyncio.create_task(EffectLedger(cp).run("t", "book", {}, book))
        await began.wait()

        with pytest.raises(EffectTimeout):
            await ledger.run("t", "pay", {}, pay)

        (request,) = await ledger.requests()
        await ledger.approve(request.key)
        asyncio.get_running_loop().call_later(5, go_on.set)
        await run_for(worker := Worker(cp, agent, poll=0.1), 20)
        await elsewhere
        assert effects == ["paid", "booked"]
        assert worker.health.ran == 1

    tell(story)


def test_tools_that_wait_side_by_side_wait_for_people() -> None:
    """A group of timeouts is not a failure: the decision wakes the worker at once."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)
        paid: list[Any] = []

        async def agent(_: Any, lease: Lease) -> None:
            async with asyncio.TaskGroup() as group:
                for n in range(2):
                    run = ledger.run(
                        "t", "pay", {"n": n}, lambda one: paid.append(one.args["n"])
                    )
                    group.create_task(run)

        await died(cp)
        worker = Worker(cp, agent)
        await worker.run_due()
        assert (worker.health.ran, worker.health.failed) == (1, 0)

        # The group cancels the second task before it has asked.
        while requests := await ledger.requests():
            assert await ledger.approve(requests[0].key)
            await worker.run_due()

        assert sorted(paid) == [0, 1]
        assert worker.health.failed == 0

    tell(story)


def test_a_wait_for_people_cancels_no_payment() -> None:
    """In a group of tasks the timeout of one effect cancels the others."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda one: one.tool == "ask")
        paid: list[Any] = []
        clock = asyncio.get_running_loop().time

        async def pay(_: Any) -> None:
            await asyncio.sleep(5)
            paid.append(1)

        async def agent(_: Any, lease: Lease) -> None:
            async with asyncio.TaskGroup() as group:
                for n in (2, 3):
                    group.create_task(ledger.run("t", "ask", {"n": n}, lambda _: None))

                group.create_task(ledger.run("t", "pay", {}, pay))

        await died(cp)
        worker = Worker(cp, agent)
        began = clock()
        await worker.run_due()
        assert paid == [1]
        assert clock() - began < 10
        assert (worker.health.ran, worker.health.failed) == (1, 0)
        assert len(await ledger.requests()) == 2
        assert "completed" in [one.status for one in await cp.list_calls("t")]

    tell(story)


def test_a_handler_waits_for_people_in_a_worker_too() -> None:
    """The timeout would be the error of the sub-agent's effect, for all runs."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda one: one.tool == "pay")
        results: list[Any] = []

        async def sub_agent(_: Any) -> Any:
            return await ledger.run("t", "pay", {}, lambda _: "paid")

        async def agent(_: Any, lease: Lease) -> None:
            results.append(await ledger.run("t", "sub", {}, sub_agent))

        await died(cp)
        worker = Worker(cp, agent)
        run = asyncio.create_task(worker.run_due())

        await asyncio.sleep(100)
        requests = await ledger.requests()
        assert await ledger.approve(requests[0].key)
        await run
        assert results == ["paid"]

    tell(story)


def test_a_worker_that_lost_its_lease_sets_no_mark() -> None:
    """Its successor took the thread over, ran it, and removed the mark."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        async def agent(cp: Any, lease: Lease) -> None:
            await run_of(cp).take_over(await run_of(cp).look())

            async with thread_lease(cp, "t"):
                pass  # the successor's run

            await asyncio.Event().wait()

        await died(cp)
        worker = Worker(cp, agent, stale_after=1)
        assert await worker.run_due() == 1
        assert worker.health.failed == 1
        assert (await run_of(cp).look()).wakes == ()

    tell(story)


def test_a_holder_that_renews_during_a_long_look_keeps_its_lease() -> None:
    """The worker saw it stale, and compares its heartbeat before it takes over."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        run = run_of(cp)
        term = run.new_term("a slow holder", 15.0)
        looks: list[float] = []

        class SlowLook(Worker):
            async def _note_runs(self) -> None:
                await super()._note_runs()

                if any(one.is_stale for one in self._seen.values()):
                    looks.append(asyncio.get_running_loop().time())
                    await run.renew(term, len(looks))

        await run.claim(term)
        worker = SlowLook(cp, well)
        await run_for(worker, 40)
        assert len(looks) == 2
        assert worker.health.ran == 0
        state = await run.look()
        assert state.term is not None
        assert state.wakes == ()

    tell(story)


def test_a_slow_list_of_runs_rests() -> None:
    """Hinted runs start meanwhile; without a hint one waits for the next look."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        scans: list[float] = []
        clock = asyncio.get_running_loop().time

        class SlowList(Worker):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                refresh = self._runs.refresh

                async def slowly() -> None:
                    scans.append(clock())
                    await asyncio.sleep(5)
                    await refresh()

                self._runs.refresh = slowly  # type: ignore[method-assign]

        for thread in "abc":
            await died(cp, thread)

        worker = SlowList(cp, well, concurrency=1)
        await run_for(worker, 40)
        assert worker.health.ran == 3
        assert len(scans) == 1
        await died(cp, "d")
        await submit(cp, "e")
        await run_for(worker, 5)
        assert worker.health.ran == 4
        await run_for(worker, 40)
        assert worker.health.ran == 5
        assert 50 <= scans[1] - scans[0] <= 53

    tell(story)


def test_damage_of_one_thread_does_not_stop_the_others() -> None:
    """Neither of a request nor of a lease; both are logged."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)
        keys = {}

        for thread in ("bad", "good"):
            keys[thread] = ledger.key(thread, "pay", {})
            await died(cp, f"{thread} lease")

            with pytest.raises(EffectTimeout):
                await ledger.run(thread, "pay", {}, lambda _: None)

        store: Any = Plain(cp)
        store.list_threads, store.list_calls = cp.list_threads, cp.list_calls

        async def find_call(key: str) -> Any:
            if key == request_key(keys["bad"], 1):
                raise CorruptThread("bad", "call 0", "not JSON")

            return await cp.find_call(key)

        async def load(thread_id: str) -> Any:
            if thread_id == run_of(cp, "bad lease").name:
                raise CorruptThread(thread_id, "extra", "not JSON")

            return await cp.load(thread_id)

        store.find_call, store.load = find_call, load
        assert [one.key for one in await EffectLedger(store).requests()] == [
            keys["good"]
        ]
        assert await EffectLedger(store).approve(keys["good"])
        ran: list[str] = []

        async def agent(_: Any, lease: Lease) -> None:
            ran.append(lease.thread_id)

        await Worker(store, agent).run_due()
        assert sorted(ran) == ["good", "good lease"]

    tell(story)


def test_a_worker_starts_while_the_store_is_away() -> None:
    """It watches and runs once the store is back."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        read = cp._watching._read

        async def refuse(_: Any) -> Any:
            raise BackendUnavailable("test", "away")

        cp._watching._read = refuse
        await died(cp)
        worker = Worker(cp, well, poll=0.1)
        running = asyncio.create_task(run_for(worker, 10))
        await asyncio.sleep(1)
        states = [worker.health.ok]
        cp._watching._read = read
        await running
        assert [*states, worker.health.ok] == [False, True]
        assert worker.health.ran == 1

    tell(story)


def test_a_worker_that_is_cancelled_twice_ends_its_jobs() -> None:
    """The second cancellation cuts the grace short, and the run is cancelled."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        began, ended = asyncio.Event(), asyncio.Event()

        async def agent(cp: Any, lease: Lease) -> None:
            try:
                began.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        await died(cp)
        worker = Worker(cp, agent, poll=0.1)
        running = asyncio.create_task(worker.run())
        await began.wait()
        running.cancel()
        await asyncio.sleep(1)
        states = [ended.is_set()]
        running.cancel()
        await asyncio.wait([running])
        assert [*states, ended.is_set()] == [False, True]
        assert worker._jobs == {}

    tell(story)


def test_a_cancelled_run_due_ends_its_jobs() -> None:
    """No run goes on, and no lease is held, after the call has ended."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        began = asyncio.Event()
        ended: list[str] = []

        async def agent(cp: Any, lease: Lease) -> None:
            began.set()

            try:
                await asyncio.Event().wait()
            finally:
                ended.append(lease.thread_id)

        await died(cp)
        worker = Worker(cp, agent, grace=1)
        task = asyncio.create_task(worker.run_due())
        await began.wait()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task

        assert ended == ["t"]
        assert worker.health.running == []

        async with thread_lease(cp, "t", timeout=0):
            pass

    tell(story)


def test_a_worker_lists_only_the_runs_of_its_prefix() -> None:
    """A long thread id is among them: its run is listed under a hash."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        ran: list[str] = []

        async def agent(cp: Any, lease: Lease) -> None:
            ran.append(lease.thread_id)

        long = "mine-".ljust(512, "x")

        for thread in ("mine-1", "other", long):
            await died(cp, thread)

        worker = Worker(cp, agent, prefix="mine-")
        assert await worker.run_due() == 2
        assert sorted(ran) == ["mine-1", long]
        assert worker._seen.keys() == set()

    tell(story)


def test_old_threads_cost_a_new_worker_nothing() -> None:
    """A run that ended well is on no list, so nothing of it is read."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        for n in range(300):
            async with thread_lease(cp, f"t{n}"):
                pass

        assert await cp.list_threads(prefix="cpkit:") == []

    tell(story)


def test_a_request_that_is_gone_leaves_the_list_of_runs() -> None:
    """Its thread was forgotten, so no decision will ever call for a run."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)

        with pytest.raises(EffectTimeout):
            await ledger.run("t", "pay", {}, lambda _: None)

        await cp.delete_thread("t", forget_keys=True)
        worker = Worker(cp, well, poll=2)
        await run_for(worker, 10)
        assert await cp.list_threads(prefix="cpkit:run:") == []
        assert worker.health.ran == 0

    tell(story)


def test_a_damaged_request_stays_on_the_list_of_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log names it once; its thread runs after it was repaired and decided."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)

        with pytest.raises(EffectTimeout):
            await ledger.run("t", "pay", {}, lambda _: None)

        key = ledger.key("t", "pay", {})
        damaged = True
        find_call = cp.find_call
        ran: list[str] = []

        async def damaged_call(wanted: str) -> Any:
            if damaged and wanted == request_key(key, 1):
                raise CorruptThread("t", "a call", "not JSON")

            return await find_call(wanted)

        async def agent(_: Any, lease: Lease) -> None:
            ran.append(lease.thread_id)

        vars(cp)["find_call"] = damaged_call
        worker = Worker(cp, agent, poll=1)
        await run_for(worker, 60)
        assert caplog.text.count("cannot read a request of thread 't'") == 1
        assert await cp.list_threads(prefix="cpkit:run:") != []
        damaged = False
        assert await ledger.approve(key)
        await run_for(worker, 60)
        assert ran == ["t"]

    tell(story)


def test_every_lost_hint_is_made_up_for() -> None:
    """A few requests are read at each look, each in its turn."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)
        ran: list[str] = []

        async def agent(_: Any, lease: Lease) -> None:
            ran.append(lease.thread_id)

        for n in range(30):
            with pytest.raises(EffectTimeout):
                await ledger.run(f"t{n}", "pay", {}, lambda _: None)

        worker = Worker(cp, agent, poll=1)
        await run_for(worker, 1)
        (first, *_, last) = await ledger.requests()

        for one in (first, last):  # the decision is recorded, and its hint is lost
            call_id = one.record.call.call_id
            await cp.record_result(one.thread_id, call_id, {"approved": True})

        await run_for(worker, 20)
        assert sorted(ran) == sorted([first.thread_id, last.thread_id])

    tell(story)
