"""Workers call a function for threads whose run died or whose request is decided."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from math import inf, nan
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    Checkpointer,
    JsonValue,
    MemoryCheckpointer,
    SerializationError,
)
from cpkit.effects import (
    ApprovalRequest,
    Backoff,
    Effect,
    EffectLedger,
    EffectTimeout,
    NoEffect,
)
from cpkit.lease import Lease, thread_lease
from cpkit.terms import Terms
from cpkit.worker import Worker
from tests.effects.shop import OnlySix, Shop, Store, quick, until


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
    terms = Terms(cp, thread, Backoff(), 1.0)
    await terms.claim(terms.new_call("host:7", stale_after))


async def test_a_live_run_is_left_while_the_clock_is_set_back(
    thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats count, also where they do not move the time of its lease."""
    async with MemoryCheckpointer[Any]() as cp:
        terms = Terms(cp, thread, Backoff(), 1.0)
        term = terms.new_call("host:7", stale_after=0.2)
        await terms.claim(term)
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() - 10**15)
        payer = Payer(thread)
        worker = payer.worker(cp)

        for count in range(12):
            await terms.renew(term, count)
            await worker.run_due()
            await asyncio.sleep(0.05)

        assert payer.calls == []
        assert (await terms.look()).term is not None

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
    worker, other = payer.worker(cp), payer.worker(OnlySix(cp))
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


async def test_a_decision_is_acted_upon_after_a_killed_run_on_a_store_without_lists(
    cp: Store, thread: str
) -> None:
    """The worker reads the lease of the thread, and takes it over when it is stale."""
    payer = Payer(thread)
    six = OnlySix(cp)

    with pytest.raises(EffectTimeout):
        await payer.ledger(cp).run(thread, "pay", {}, payer.shop.charge)

    assert await quick(cp).approve(quick(cp).key(thread, "pay", {}))
    await die(cp, thread)
    worker = payer.worker(six)
    assert await worker.run_due() == 0
    assert await worker.run_due(wait_for_stale=True) == 1
    assert len(payer.shop.effects) == 1
    assert await worker.run_due(wait_for_stale=True) == 0


@pytest.mark.parametrize("recorded", [0, -1, nan, inf, 10**400, "1"])
async def test_a_forged_lease_does_not_stop_a_worker(recorded: Any) -> None:
    """The worker's own ``stale_after`` counts."""
    async with MemoryCheckpointer[Any]() as cp:
        args = {"thread_id": "t", "holder": "host:7", "stale_after": recorded}
        terms = Terms(cp, "t", Backoff(), 1.0)
        term = terms.new_call("host:7", 1.0)

        try:
            await terms.claim(replace(term, args=args))
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
    """The mark of the dead run stays until the function ended well."""
    payer = Payer(thread)
    payer.fails = 1
    worker = payer.worker(cp)
    await die(cp, thread)
    await until(lambda: due(worker))
    assert worker.health.failed == 1
    assert "1 failed" in str(worker.health)
    assert worker.health.as_json()["ok"]
    another = payer.worker(cp)  # it does not know of the failure
    assert await another.run_due() == 1
    assert another.health.ran == 1
    assert await asked(cp, thread)
    assert await another.run_due() == 0


async def test_an_approval_without_an_effect_still_needs_a_run(
    cp: Store, thread: str
) -> None:
    """A released attempt leaves its request on the list, so that a worker acts."""
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


class AwayAfterwards(OnlySix):
    """A store that refuses to merge extra, once it is away."""

    def __init__(self, cp: Store) -> None:
        super().__init__(cp)
        self.is_away = False
        merge = cp.save_extra

        async def save_extra(thread_id: str, extra: Mapping[str, JsonValue]) -> None:
            if self.is_away:
                raise BackendUnavailable("test", "away", maybe_applied=False)

            await merge(thread_id, extra)

        self.save_extra = save_extra


async def test_a_run_that_fails_with_the_store_is_repeated(
    cp: Store, thread: str
) -> None:
    """The store shows that the thread needs a run before the function is called."""
    payer = Payer(thread)
    away = AwayAfterwards(cp)

    async def agent(cp: Checkpointer[Any], lease: Lease) -> None:
        await payer(cp, lease)
        away.is_away = True
        raise RuntimeError("the process has no network")

    ledger = payer.ledger(cp)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "pay", {}, payer.shop.charge)

    assert await ledger.approve(ledger.key(thread, "pay", {}))
    worker = Worker(away, agent, prefix=thread, poll=0.1)
    assert await worker.run_due() == 1
    assert worker.health.failed == 1
    assert await payer.worker(cp).run_due() == 1
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
    assert await payer.worker(cp).run_due() == 1
    assert payer.calls == [thread]


def test_a_function_that_cannot_be_called_is_refused() -> None:
    """A blocking function, or one with other parameters, is a ``TypeError``."""

    async def one_parameter(cp: Any) -> None:
        raise AssertionError

    def blocking(cp: Any, lease: Any) -> None:
        raise AssertionError

    for wrong in (one_parameter, blocking, "text"):
        with pytest.raises(TypeError, match="agent must"):
            Worker(object(), wrong)  # type: ignore[arg-type]


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
