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
from cpkit.terms import Terms
from cpkit.worker import Worker
from tests.effects.shop import QUICK, OnlySix
from tests.simulation.loop import simulated_loop

Agent = Callable[[Any, Lease], Awaitable[None]]
Story = Callable[[MemoryCheckpointer[Any]], Awaitable[None]]


def tell(story: Story) -> None:
    """Run a story with a store, in virtual time."""

    async def main() -> None:
        async with MemoryCheckpointer[Any]() as cp:
            await story(cp)

    simulated_loop(Random(0)).run(main())


def terms_of(cp: Any, thread: str = "t") -> Terms:
    return Terms(cp, thread, QUICK, 1.0)


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
    "fail", [raise_an_error, await_a_cancelled_task, raise_a_lease_timeout]
)
def test_the_pauses_after_failures_double(fail: Callable[[], Awaitable[None]]) -> None:
    """1, 2, 4 … 300 seconds, for an error and for a task that was cancelled inside."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        calls: list[float] = []

        async def agent(cp: Any, lease: Lease) -> None:
            calls.append(asyncio.get_running_loop().time())
            await fail()

        await terms_of(cp).mark_died()
        worker = Worker(cp, agent, poll=0.5)
        await run_for(worker, 1100)
        pauses = [int(late - early) for early, late in pairwise(calls)]
        assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
        assert worker.health.failed == len(calls)

    tell(story)


def test_the_pauses_double_where_a_scan_takes_long() -> None:
    """Between two scans, the worker does not know which threads need a run."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        calls: list[float] = []
        list_threads = cp.list_threads

        async def slowly(**options: Any) -> Any:
            await asyncio.sleep(0.2)
            return await list_threads(**options)

        async def agent(cp: Any, lease: Lease) -> None:
            calls.append(asyncio.get_running_loop().time())
            raise RuntimeError("a bug")

        cp.list_threads = slowly  # type: ignore[method-assign]
        await terms_of(cp).mark_died()
        await run_for(Worker(cp, agent, poll=0.5), 100)
        pauses = [late - early for early, late in pairwise(calls)]
        assert all(late > early - 0.1 for early, late in pairwise(pauses))
        assert pauses[-1] > 30

    tell(story)


def test_the_pauses_end_at_five_minutes() -> None:
    """After days of failures, too."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        worker = Worker(cp, well)

        for _ in range(1100):
            worker._failed("t", RuntimeError("a bug"))

        pause, _ = worker._retry["t"]
        assert pause == 300

    tell(story)


@pytest.mark.parametrize("method", ["record_issued", "record_result", "save_extra"])
def test_a_job_that_fails_before_the_function_pauses_too(method: str) -> None:
    """The lease cannot be taken: neither run nor run_due tries again at once."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        tries = 0

        async def refuse(*_: Any, **__: Any) -> None:
            nonlocal tries
            tries += 1
            raise BackendUnavailable("test", "away")

        terms = terms_of(cp)
        await terms.claim(terms.new_call("dead", 1.0))
        store: Any = OnlySix(cp)
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

        await terms_of(cp).mark_died()
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


def test_a_worker_that_lost_its_lease_sets_no_mark() -> None:
    """Its successor took the thread over, ran it, and removed the mark."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        async def agent(cp: Any, lease: Lease) -> None:
            await terms_of(cp).take_over(lease._call.call_id)

            async with thread_lease(cp, "t"):
                pass  # the successor's run

            await asyncio.Event().wait()

        await terms_of(cp).mark_died()
        worker = Worker(cp, agent, stale_after=1)
        assert await worker.run_due() == 1
        assert worker.health.failed == 1
        assert (await terms_of(cp).look()).died is None

    tell(story)


def test_a_holder_that_renews_during_a_long_look_keeps_its_lease() -> None:
    """The worker saw it stale, and compares its heartbeat before it takes over."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        terms = terms_of(cp)
        call = terms.new_call("a slow holder", 15.0)
        looks: list[float] = []

        class SlowLook(Worker):
            async def _scan(self, decided: Any) -> Any:
                if found := await super()._scan(decided):
                    looks.append(asyncio.get_running_loop().time())
                    await terms.renew(call, len(looks))

                return found

        await terms.claim(call)
        worker = SlowLook(cp, well)
        await run_for(worker, 40)
        assert len(looks) == 2
        assert worker.health.ran == 0
        state = await terms.look()
        assert state.term is not None
        assert state.died is None

    tell(story)


def test_a_slow_scan_of_the_leases_rests() -> None:
    """The runs that it found start meanwhile, one after another."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        scans: list[float] = []

        class SlowScan(Worker):
            async def _scan(self, decided: Any) -> Any:
                scans.append(asyncio.get_running_loop().time())
                await asyncio.sleep(5)
                return await super()._scan(decided)

        for thread in "abc":
            await terms_of(cp, thread).mark_died()

        worker = SlowScan(cp, well, concurrency=1)
        began = asyncio.get_running_loop().time()
        await run_for(worker, 40)
        assert worker.health.ran == 3
        assert len(scans) == 1
        await terms_of(cp, "d").mark_died()
        await run_for(worker, 40)
        assert worker.health.ran == 4
        assert [round(one - began) for one in scans] == [0, 50]
        await terms_of(cp, "e").mark_died()
        assert await worker.run_due() == 1

    tell(story)


def test_damage_of_one_thread_does_not_stop_the_others() -> None:
    """Neither of a request nor of a lease; both are logged."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)
        keys = {}

        for thread in ("bad", "good"):
            keys[thread] = ledger.key(thread, "pay", {})
            await terms_of(cp, f"{thread} lease").mark_died()

            with pytest.raises(EffectTimeout):
                await ledger.run(thread, "pay", {}, lambda _: None)

        store: Any = OnlySix(cp)
        store.list_threads, store.list_calls = cp.list_threads, cp.list_calls

        async def find_call(key: str) -> Any:
            if key == request_key(keys["bad"], 1):
                raise CorruptThread("bad", "call 0", "not JSON")

            return await cp.find_call(key)

        async def load(thread_id: str) -> Any:
            if thread_id == terms_of(cp, "bad lease").lease_thread:
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


@pytest.mark.parametrize("damaged", ["a", "b", "c"])
def test_a_lease_that_cannot_be_listed_holds_up_no_other(
    damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that cannot read a lease's times raises for each list that has it."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        for thread in ("a", "b", "c"):
            await terms_of(cp, thread).mark_died()

        lease_thread = terms_of(cp, damaged).lease_thread
        store: Any = OnlySix(cp)

        async def list_threads(**options: Any) -> Any:
            page = await cp.list_threads(**options)

            if lease_thread in [info.thread_id for info in page]:
                raise CorruptThread(lease_thread, "its times", "not numbers")

            return page

        store.list_threads, store.list_calls = list_threads, cp.list_calls
        ran: list[str] = []

        async def agent(_: Any, lease: Lease) -> None:
            ran.append(lease.thread_id)

        worker = Worker(store, agent, poll=0.1)
        await run_for(worker, 10)
        assert sorted([*ran, damaged]) == ["a", "b", "c"]

    tell(story)
    assert [one.getMessage() for one in caplog.records if one.exc_info] == [
        f"cannot list the lease 'cpkit:lease:{damaged}'"
    ]


def test_a_list_that_names_no_lease_ends_no_worker() -> None:
    """Damage may hide which thread it is; decisions are acted on all the same."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        store: Any = OnlySix(cp)

        async def list_threads(**_: Any) -> Any:
            raise CorruptThread("?", "its id", "not text")

        store.list_threads, store.list_calls = list_threads, cp.list_calls
        worker = Worker(store, well, poll=0.1)
        await run_for(worker, 1)
        assert worker.health.ok

    tell(story)


def test_a_worker_forgets_the_threads_that_need_no_run() -> None:
    """Another runner had them, and ended them well."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        worker = Worker(cp, well, poll=0.1)
        await terms_of(cp).mark_died()

        async with thread_lease(cp, "t"):
            await worker._job("t", None)
            assert list(worker._retry) == ["t"]

        await run_for(worker, 1)
        assert worker._retry == {}
        assert worker.health.ran == 0

    tell(story)


def test_a_worker_starts_while_the_store_is_away() -> None:
    """It watches and runs once the store is back."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        read = cp._watching._read

        async def refuse(_: Any) -> Any:
            raise BackendUnavailable("test", "away")

        cp._watching._read = refuse
        await terms_of(cp).mark_died()
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

        await terms_of(cp).mark_died()
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

        await terms_of(cp).mark_died()
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


def test_a_worker_lists_only_the_leases_of_its_prefix() -> None:
    """A long thread id is among them: its lease is listed under a hash."""

    async def story(cp: MemoryCheckpointer[Any]) -> None:
        ran: list[str] = []

        async def agent(cp: Any, lease: Lease) -> None:
            ran.append(lease.thread_id)

        long = "mine-".ljust(512, "x")

        for thread in ("mine-1", "other", long):
            await terms_of(cp, thread).mark_died()

        worker = Worker(cp, agent, prefix="mine-")
        assert await worker.run_due() == 2
        assert sorted(ran) == ["mine-1", long]
        assert len(worker._leases) == 2

    tell(story)
