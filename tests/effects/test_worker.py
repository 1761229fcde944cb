"""Workers call a function for threads whose run died or whose request is decided."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import product
from math import inf, nan
from random import Random
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    Checkpointer,
    MemoryCheckpointer,
    SerializationError,
)
from cpkit.effects import (
    ApprovalExpired,
    ApprovalRequest,
    Effect,
    EffectLedger,
    EffectTimeout,
    NoEffect,
    NotLanded,
)
from cpkit.lease import Lease, thread_lease
from cpkit.runs.threads import (
    HINTS,
    RunThread,
    Wake,
    stale_after_of,
    wake_run,
)
from cpkit.worker import Worker, submit
from tests.effects.shop import Counting, Plain, Shop, Store, quick, until
from tests.simulation.loop import simulated_loop


class Payer:
    """An agent that pays once per thread, after an approval."""

    def __init__(self, thread: str) -> None:
        self.shop = Shop()
        self.calls: list[str] = []
        self.thread = thread
        self.fails = 0

    async def __call__(self, cp: Checkpointer[Any], lease: Lease) -> None:
        assert lease.thread_id.startswith(self.thread)
        self.calls.append(lease.thread_id)

        if self.fails:
            self.fails -= 1
            raise RuntimeError("a bug")

        await self.ledger(cp).run(lease.thread_id, "pay", {}, self.shop.charge)

    def ledger(self, cp: Checkpointer[Any]) -> EffectLedger:
        return quick(cp, requires_approval=lambda _: True, approval_timeout=0)

    def worker(self, cp: Checkpointer[Any], **options: Any) -> Worker:
        async def agent(cp: Checkpointer[Any], lease: Lease) -> None:
            await self(cp, lease)

        return Worker(cp, agent, prefix=self.thread, **{"poll": 0.1, **options})


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[None]:
    """Run a worker while the block runs."""
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))

    try:
        yield
    finally:
        stop.set()
        await task


@pytest.mark.parametrize(
    ("option", "seconds"),
    [
        *product(["stale_after", "poll", "grace"], [nan, inf, -1.0]),
        *product(["stale_after", "poll"], [0.0]),
    ],
)
async def test_impossible_intervals_are_refused(option: str, seconds: float) -> None:
    """They would fail in every run, and not when the worker is made."""
    async with MemoryCheckpointer[Any]() as cp:
        with pytest.raises(ValueError, match=option):
            Payer("t").worker(cp, **{option: seconds})


async def die(cp: Checkpointer[Any], thread: str, stale_after: float = 0.2) -> None:
    """Leave a lease behind, like a process that was killed."""
    run = RunThread(cp, thread)
    await run.claim(run.new_term("host:7", stale_after))


async def test_a_live_run_is_left_while_the_clock_is_set_back(
    thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats count, also where they do not move the time of its lease."""
    async with MemoryCheckpointer[Any]() as cp:
        run = RunThread(cp, thread)
        term = run.new_term("host:7", stale_after=0.2)
        await run.claim(term)
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() - 10**15)
        payer = Payer(thread)
        worker = payer.worker(cp)

        for count in range(12):
            await run.renew(term, count)
            await worker.run_due()
            await asyncio.sleep(0.05)

        assert payer.calls == []
        assert (await run.look()).term is not None

        # It falls silent.
        await until(lambda: ran(worker))


async def ran(worker: Worker) -> bool:
    await worker.run_due()
    return worker.health.ran > 0


async def test_a_decided_request_wakes_a_worker(cp: Store, thread: str) -> None:
    """The thread of a dead run is run, waits for its approval, and is run again."""
    payer = Payer(thread)
    worker = payer.worker(cp)
    await die(cp, thread)

    async with running(worker):
        await until(lambda: asked(cp, thread))
        (request,) = await quick(cp).pending(thread)
        assert payer.shop.effects == []
        assert await quick(cp).approve(request.key, by="ann")
        await until(lambda: charged(payer))
        await until(lambda: idle(worker))

    assert len(payer.shop.effects) == 1
    # Once only, if the approval came before the first run looked for it.
    assert payer.calls in ([thread], [thread, thread])
    assert (worker.health.ran, worker.health.failed) == (2, 0)
    # Nothing is left to do, for another worker too.
    assert await payer.worker(cp).run_due() == 0


async def asked(cp: Store, thread: str) -> bool:
    return bool(await quick(cp).pending(thread))


async def charged(payer: Payer) -> bool:
    return bool(payer.shop.effects)


async def idle(worker: Worker) -> bool:
    return worker.health.decided == 0 and not worker.health.running


async def test_a_denial_is_acted_upon_too(cp: Store, thread: str) -> None:
    """The function gets ``EffectDenied``, which ends the run if it is not handled."""
    payer = Payer(thread)
    worker, other = payer.worker(cp), payer.worker(cp)
    await die(cp, thread)
    await until(lambda: due(worker))
    (request,) = await quick(cp).pending(thread)
    await quick(cp).deny(request.key)
    assert await other.run_due() == 1
    assert (other.health.ran, other.health.failed) == (1, 0)
    assert await other.run_due() == 0
    assert payer.shop.effects == []


async def test_a_new_worker_finds_a_killed_run_if_it_may_wait(
    cp: Store, thread: str
) -> None:
    """As ``cpkit worker --once`` does; a run that lives is left, and ends the wait."""
    payer = Payer(thread)
    await die(cp, thread)
    assert await payer.worker(cp).run_due() == 0

    async with thread_lease(cp, f"{thread}-alive", stale_after=0.6):
        worker = payer.worker(cp)
        assert await worker.run_due(wait_for_stale=True) == 1
        assert payer.calls == [thread]
        assert await worker.run_due(wait_for_stale=True) == 0


@pytest.mark.parametrize("recorded", [0, -1, nan, inf, 10**400, "1"])
async def test_a_forged_lease_does_not_stop_a_worker(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default ``stale_after`` counts."""
    monkeypatch.setattr(stale_after_of, "__defaults__", (0.2,))

    async with MemoryCheckpointer[Any]() as cp:
        args = {"thread_id": "t", "holder": "host:7", "stale_after": recorded}
        run = RunThread(cp, "t")
        term = run.new_term("host:7", 1.0)

        try:
            await run.claim(replace(term, args=args))
        except SerializationError:
            return  # no store takes it

        worker = Payer("t").worker(cp, stale_after=0.2)
        assert await worker.run_due() == 0
        await until(lambda: due(worker))


async def due(worker: Worker) -> bool:
    return bool(await worker.run_due())


@pytest.mark.parametrize("is_decided", [True, False])
async def test_a_deleted_thread_is_not_run(
    is_decided: bool, cp: Store, thread: str
) -> None:
    """Its request was erased with it, so no run can act on the decision."""
    payer = Payer(thread)

    with pytest.raises(EffectTimeout):
        await payer.ledger(cp).run(thread, "pay", {}, payer.shop.charge)

    if is_decided:
        assert await quick(cp).approve(quick(cp).key(thread, "pay", {}))

    await cp.delete_thread(thread)
    worker = payer.worker(cp)
    assert await worker.run_due() == 0
    assert payer.calls == []
    assert worker.health.oldest_decided is worker.health.oldest_undecided is None


async def test_a_run_that_fails_is_repeated(cp: Store, thread: str) -> None:
    """The thread stays on the list of runs until the function ended well."""
    payer = Payer(thread)
    payer.fails = 1
    worker = payer.worker(cp)
    await die(cp, thread)
    await until(lambda: due(worker))
    assert worker.health.failed == 1
    assert "1 failed" in str(worker.health)
    assert worker.health.as_json()["ok"]
    another = payer.worker(cp)  # it knows of the failure, too, and pauses
    assert await another.run_due() == 0
    await until(lambda: due(another))
    assert another.health.ran == 1
    assert await asked(cp, thread)
    assert await another.run_due() == 0


async def test_an_approval_without_an_effect_still_needs_a_run(
    cp: Store, thread: str
) -> None:
    """A released attempt leaves its request on the list of runs."""
    payer = Payer(thread)
    ledger = payer.ledger(cp)

    async def refuses(effect: Effect) -> None:
        raise NoEffect("the bank is closed")

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "pay", {}, refuses)

    assert await ledger.approve(ledger.key(thread, "pay", {}))

    with pytest.raises(NoEffect):
        await ledger.run(thread, "pay", {}, refuses)

    worker = payer.worker(cp)
    assert await worker.run_due() == 1
    assert len(payer.shop.effects) == 1
    assert await worker.run_due() == 0


async def test_a_run_that_fails_with_the_store_is_repeated(
    cp: Store, thread: str
) -> None:
    """It cannot be recorded how it ended, so its lease stays and falls silent."""
    payer = Payer(thread)
    away = Plain(cp)
    away.list_threads = cp.list_threads  # type: ignore[attr-defined]

    async def refuse(*_: Any, **__: Any) -> Any:
        raise BackendUnavailable("test", "away")

    async def agent(cp: Checkpointer[Any], lease: Lease) -> None:
        await payer(cp, lease)
        away.record_result = away.append = refuse
        raise RuntimeError("the process has no network")

    ledger = payer.ledger(cp)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "pay", {}, payer.shop.charge)

    assert await ledger.approve(ledger.key(thread, "pay", {}))
    worker = Worker(away, agent, prefix=thread, poll=0.1, stale_after=0.2)
    assert await worker.run_due() == 1

    assert worker.health.failed == 1
    other = payer.worker(cp)
    await until(lambda: due(other))
    assert len(payer.shop.effects) == 1


async def test_any_number_of_workers_run_a_thread_once_at_a_time(
    cp: Store, thread: str
) -> None:
    """A live runner's thread is left alone, and one worker takes over a dead one's."""
    payer = Payer(thread)
    threads = [f"{thread}-{n}" for n in range(4)]
    workers = [payer.worker(cp) for _ in range(3)]

    async with thread_lease(cp, f"{thread}-live"):
        for one in threads:
            await die(cp, one)

        async def all_asked() -> bool:
            found = [await quick(cp).pending(one) for one in threads]
            return all(found)

        async with running(workers[0]), running(workers[1]), running(workers[2]):
            await until(all_asked)

    assert sorted(payer.calls) == threads
    assert sum(worker.health.ran for worker in workers) == 4


async def test_a_stopped_worker_leaves_its_thread_to_another(
    cp: Store, thread: str
) -> None:
    """A run that does not end in time is cancelled, and marked as not ended."""
    began = asyncio.Event()

    async def slow(cp: Checkpointer[Any], lease: Lease) -> None:
        began.set()
        await asyncio.Event().wait()

    await die(cp, thread)
    worker = Worker(cp, slow, prefix=thread, poll=0.1, grace=0)

    async with running(worker):
        await began.wait()

    payer = Payer(thread)
    other = payer.worker(cp)
    await until(lambda: due(other))
    assert payer.calls == [thread]


def test_a_function_that_cannot_be_called_is_refused() -> None:
    """A blocking function, or one with other parameters, is a ``TypeError``."""

    async def one_parameter(cp: Any) -> None:
        raise AssertionError

    def blocking(cp: Any, lease: Any) -> None:
        raise AssertionError

    for wrong in (one_parameter, blocking, "text"):
        with pytest.raises(TypeError, match="agent must"):
            Worker(MemoryCheckpointer(), wrong)  # type: ignore[arg-type]


async def test_a_notifier_that_failed_is_called_again(cp: Store, thread: str) -> None:
    """Otherwise no person would know of the request, and nothing would wake the run."""
    told: list[str] = []

    def notify(request: ApprovalRequest) -> None:
        told.append(request.key)

        if len(told) == 1:
            raise RuntimeError("no mail")

    async def agent(cp: Checkpointer[Any], lease: Lease) -> None:
        ledger = quick(
            cp,
            requires_approval=lambda _: True,
            approval_timeout=0,
            on_approval_required=notify,
        )
        await ledger.run(lease.thread_id, "pay", {}, Shop().charge)

    await die(cp, thread)
    worker = Worker(cp, agent, prefix=thread, poll=0.1, stale_after=0.2)

    async def twice() -> bool:
        return len(told) == 2

    async with running(worker):
        await until(twice)


async def has_no_run(cp: Store, thread: str) -> bool:
    return await cp.load(RunThread(cp, thread).name) is None


async def test_a_submitted_thread_is_run(cp: Store, thread: str) -> None:
    """At once, once for each submission, and with the events recorded for it."""
    seen: list[Any] = []

    async def agent(_: Any, lease: Lease) -> None:
        seen.append([(one.why, one.event) for one in lease.wakes])

    worker = Worker(cp, agent, prefix=thread, poll=60)

    async with running(worker):
        await submit(cp, thread, event={"mail": 1})

        async def ran_once() -> bool:
            return worker.health.ran == 1

        await until(ran_once)
        await worker.submit(thread)

        async def ran_twice() -> bool:
            return worker.health.ran == 2

        await until(ran_twice)
        await until(lambda: has_no_run(cp, thread))

    assert seen == [[("submitted", {"mail": 1})], [("submitted", None)]]
    assert await cp.load(RunThread(cp, thread).name) is None


async def test_a_submission_at_the_end_of_a_run_is_not_lost(
    cp: Store, thread: str
) -> None:
    """The run has decided to delete its thread when the event comes."""
    calls: list[str] = []

    class Late(Counting):
        def __init__(self, cp: Any) -> None:
            super().__init__(cp)
            self.delete_thread = self._delete_late

        async def _delete_late(self, thread_id: str, **options: Any) -> None:
            if calls == ["first"]:
                calls.append("submitted")
                await submit(cp, thread, event="late")

            await cp.delete_thread(thread_id, **options)

    async def agent(_: Any, lease: Lease) -> None:
        calls.extend(str(one.event) for one in lease.wakes)

    worker = Worker(Late(cp), agent, prefix=thread)
    await submit(cp, thread, event="first")
    assert await worker.run_due() == 2
    assert calls == ["first", "submitted", "late"]
    assert await has_no_run(cp, thread)


async def test_a_thread_is_submitted_for_a_later_time(cp: Store, thread: str) -> None:
    """An earlier event wakes it before; the later one stays."""
    calls: list[str] = []

    async def agent(_: Any, lease: Lease) -> None:
        calls.append(lease.thread_id)

    worker = Worker(cp, agent, prefix=thread)
    await submit(cp, thread, after=timedelta(hours=1))
    assert await worker.run_due() == 0
    await submit(cp, thread, event="a mail came")
    assert await worker.run_due() == 1
    assert await worker.run_due() == 0
    state = await RunThread(cp, thread).look()
    assert [one.event for one in state.wakes] == [None]
    await submit(cp, f"{thread}-2", after=0.2)
    await until(lambda: due(worker))
    assert calls == [thread, f"{thread}-2"]

    with pytest.raises(ValueError, match="time zone"):
        await submit(cp, thread, after=datetime(2030, 1, 1))

    with pytest.raises(ValueError, match="after"):
        await submit(cp, thread, after=-1)


async def test_an_effect_of_a_worker_does_not_wait_for_people(
    cp: Store, thread: str
) -> None:
    """Without approval_timeout, too. Else a few waiting runs would fill the worker."""

    async def agent(cp: Any, lease: Lease) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda _: True)
        await ledger.run(lease.thread_id, "pay", {}, Shop().charge)

    threads = [f"{thread}-{n}" for n in range(5)]

    for one in threads:
        await submit(cp, one)

    worker = Worker(cp, agent, prefix=thread)
    assert await worker.run_due() == 5
    assert (worker.health.ran, worker.health.ok) == (5, True)


async def test_a_worker_full_of_waiting_runs_is_not_ok(cp: Store, thread: str) -> None:
    """Its health says what to set."""

    async def agent(cp: Any, lease: Lease) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda _: True)
        await ledger.run(lease.thread_id, "pay", {}, Shop().charge, approval_timeout=60)

    for n in range(2):
        await submit(cp, f"{thread}-{n}")

    worker = Worker(cp, agent, prefix=thread, concurrency=2, poll=0.1, grace=0)

    async with running(worker):

        async def is_full() -> bool:
            return worker.health.looks > 0 and not worker.health.ok

        await until(is_full)
        assert "full of runs that wait for people: set approval_timeout=0" in str(
            worker.health
        )


@pytest.mark.parametrize("start_first", ["approved", "undecided"])
async def test_an_approved_effect_beside_an_undecided_one_is_looked_at_again(
    cp: Store, thread: str, start_first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout of one cancels the other in the middle: the run is unfinished."""
    monkeypatch.setattr("cpkit.effects.run._OTHERS_END_WITHIN", 0.5)
    began, effects = asyncio.Event(), []

    async def handler(effect: Effect) -> None:
        effects.append(effect.args["n"])

        if len(effects) == 1:
            began.set()
            await asyncio.Event().wait()

    def policy(effect: Effect) -> bool:
        return bool(effect.args["n"] == 2)

    async def agent(cp: Any, lease: Lease) -> None:
        ledger = quick(cp, requires_approval=policy, stale_after=0.2)
        options: Any = {"verify": lambda _: NotLanded()}
        order = [1, 2] if start_first == "approved" else [2, 1]

        async with asyncio.TaskGroup() as group:
            for n in order:
                if n == 2 and not effects:
                    group.create_task(second(ledger, lease))
                else:
                    group.create_task(
                        ledger.run(lease.thread_id, "pay", {"n": n}, handler, **options)
                    )

    async def second(ledger: EffectLedger, lease: Lease) -> None:
        await began.wait()
        await ledger.run(lease.thread_id, "pay", {"n": 2}, handler)

    await submit(cp, thread)
    worker = Worker(cp, agent, prefix=thread)
    assert await worker.run_due() == 1
    assert (worker.health.failed, effects) == (1, [1])
    (request,) = await quick(cp).pending(thread)
    assert await quick(cp).approve(request.key)
    await until(lambda: due(worker))
    assert sorted(map(str, effects)) == ["1", "1", "2"]
    assert await cp.load(RunThread(cp, thread).name) is None


async def test_a_sub_agents_approval_runs_the_main_agent(
    cp: Store, thread: str
) -> None:
    """Its thread is another one, and no worker would know what to do with it."""
    shop, ran = Shop(), []

    async def agent(cp: Any, lease: Lease) -> None:
        ran.append(lease.thread_id)
        ledger = quick(cp, requires_approval=lambda _: True)
        await ledger.run(f"sub of {lease.thread_id}", "pay", {}, shop.charge)

    await submit(cp, thread)
    worker = Worker(cp, agent, prefix=thread)
    assert await worker.run_due() == 1
    (request,) = await quick(cp).pending(f"sub of {thread}")
    assert await quick(cp).approve(request.key)
    assert await worker.run_due() == 1
    assert (ran, len(shop.effects)) == ([thread, thread], 1)


async def test_an_undecided_request_expires_under_a_worker(
    cp: Store, thread: str
) -> None:
    """No run waits for it; the worker has watched it for so long."""
    ended: list[str] = []

    async def agent(cp: Any, lease: Lease) -> None:
        ledger = quick(cp, requires_approval=lambda _: True, expires_after=0.3)

        try:
            await ledger.run(lease.thread_id, "pay", {}, Shop().charge)
        except ApprovalExpired:
            ended.append(lease.thread_id)

    await submit(cp, thread)
    worker = Worker(cp, agent, prefix=thread, poll=0.1)

    async def has_ended() -> bool:
        return ended == [thread] and not worker.health.running

    async with running(worker):
        await until(has_ended)

    assert await cp.load(RunThread(cp, thread).name) is None


async def test_a_worker_reads_hints_of_a_thread_that_was_started_again(
    cp: Store, thread: str
) -> None:
    """It may have fewer of them than the worker has read, or more."""
    worker = Payer(thread).worker(cp)
    await cp.append(HINTS, [{"run": "a"}] * 3)
    assert await worker._read_hints() == []
    await cp.append(HINTS, [{"run": "b"}])
    assert await worker._read_hints() == [{"run": "b"}]
    await cp.delete_thread(HINTS)
    await cp.append(HINTS, [{"run": "c"}])
    assert await worker._read_hints() == [{"run": "c"}]
    assert await worker._read_hints() == []


async def test_hints_start_again(cp: Store, thread: str) -> None:
    """A thousand of them; the thread does not grow for ever, and no wake is lost."""
    await cp.append(HINTS, [{"request": "x"}] * 999)
    await wake_run(cp, thread, Wake("submitted"))
    data = await cp.load(HINTS)
    assert data is None or data.version < 1_000


def test_a_thousand_waiting_runs_cost_few_reads(thread: str) -> None:
    """Below ten a second, for the runs in one process and the worker beside them."""
    simulated_loop(Random(0)).run(count_reads(thread))


async def count_reads(thread: str) -> None:
    """Count them for some seconds of virtual time."""
    async with MemoryCheckpointer[Any]() as cp:
        reads: list[str] = []

        class Counted(Counting):
            def __init__(self, cp: Any) -> None:
                super().__init__(cp)
                self.calls = reads
                self.watch = cp.watch
                self.read = self._logged(cp.read)

        ledger = quick(Counted(cp), requires_approval=lambda _: True, timeout=60)
        runs = [
            asyncio.create_task(ledger.run(f"{thread}-{n}", "pay", {}, lambda _: None))
            for n in range(1_000)
        ]
        worker = Payer(thread).worker(Counted(cp), poll=2.0)
        await asyncio.sleep(1)
        assert len(await quick(cp).requests()) == 1_000

        async with running(worker):
            await asyncio.sleep(3)
            assert worker.health.looks > 1
            reads.clear()
            await asyncio.sleep(4)
            assert len(reads) < 10 * 4

        for run in runs:
            run.cancel()

        await asyncio.gather(*runs, return_exceptions=True)
