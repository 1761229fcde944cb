"""Simulates workers: runs that die, decisions by people, and notices that get lost.

Each thread has a first run, which dies or asks for an approval. From then on the store
alone says which threads need a run. The rules are those of the effects, and: in the end
each thread is charged and has its message, or is denied, and no request is left over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Any

from cpkit import BackendUnavailable, ThreadInfo, VersionConflict
from cpkit.driver.backoff import Backoff
from cpkit.effects import (
    Effect,
    EffectDenied,
    EffectLedger,
    EffectTimeout,
    NoEffect,
    Superseded,
)
from cpkit.effects.attempts import Attempts
from cpkit.effects.requests import Requests
from cpkit.lease import Lease, LeaseLost, thread_lease
from cpkit.worker import Worker
from tests.broken.reference import Reference
from tests.simulation.faults import Crash, Life, Weather
from tests.simulation.history import History
from tests.simulation.loop import simulated_loop
from tests.simulation.notices import Notices, WatchedAbleStore
from tests.simulation.world import World

__all__ = ["simulate_worker"]

STALE_AFTER = 6.0
HEARTBEAT = 2.0
PATIENCE = 20.0
CALM_AFTER = 300.0
DEADLINE = 3000.0

_ENDS = (
    Crash,
    EffectDenied,
    EffectTimeout,
    NoEffect,
    Superseded,
    LeaseLost,
    BackendUnavailable,
    VersionConflict,
)

MakeWorker = Callable[..., Worker]


def simulate_worker(seed: int, make_worker: MakeWorker = Worker) -> History:
    """Run the workers of a seed; the same seed gives the same history."""
    quiet = logging.getLogger("cpkit")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)

    try:
        loop = simulated_loop(Random(seed))
        world = loop.run(_main(Random(f"worker {seed}"), make_worker))
    finally:
        quiet.setLevel(level)

    return History(seed, world.violations, world.log, len(world.charges))


async def _main(random: Random, make_worker: MakeWorker) -> World:
    async with Reference() as store:
        office = Office(random, store, make_worker)

        try:
            async with asyncio.timeout(DEADLINE):
                await office.run()
        except TimeoutError:
            office.world.violate("no progress")

        return office.world


class _Store(WatchedAbleStore):
    """What a worker needs: the list of threads too."""

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        return await self._read(lambda: self._able.list_threads(**options))


class Office:
    """Threads to run, workers that die and are started again, and a person."""

    def __init__(
        self, random: Random, store: Reference, make_worker: MakeWorker
    ) -> None:
        self.random = random
        self.store = store
        self.make_worker = make_worker
        self.weather = Weather(random)
        self.notices = Notices(random)
        self.threads = [f"thread-{n}" for n in range(random.choice([1, 2, 3]))]
        self.needing = {one for one in self.threads if random.random() < 0.7}
        self.workers = random.choice([1, 2, 2])
        self.world = World(store, self.needing, STALE_AFTER, HEARTBEAT / 2)
        self.denied: set[str] = set()
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Run everything until each thread has ended."""
        helpers = [
            asyncio.create_task(self._calm()),
            asyncio.create_task(self._decide()),
        ]
        firsts = [asyncio.create_task(self._first(one)) for one in self.threads]
        workers = [
            asyncio.create_task(self._work(f"worker-{n}")) for n in range(self.workers)
        ]

        try:
            while True:
                await asyncio.sleep(5)

                if await self._has_ended():
                    break

            self.stop.set()
            await asyncio.gather(*firsts, *workers)
        finally:
            for task in (*helpers, *firsts, *workers):
                task.cancel()

    async def _has_ended(self) -> bool:
        """Return whether each thread has its outcome, and no entry is left over."""
        for one in self.threads:
            data = await self.store.load(one)

            if one not in self.denied and (data is None or not data.messages):
                return False

        attempts = Attempts(self.store, Backoff(), PATIENCE)
        return not await Requests(attempts, None).entries()

    async def _calm(self) -> None:
        await asyncio.sleep(CALM_AFTER)
        self.weather.calm = True

    def _store(self, life: Life) -> _Store:
        return _Store(self.store, life, self.world.applied, self.notices)

    def _backoff(self) -> Backoff:
        return Backoff(0.05, 2.0, self.random.random)

    def _ledger(self, cp: Any) -> EffectLedger:
        return EffectLedger(
            cp,
            requires_approval=lambda effect: effect.args["order"] in self.needing,
            timeout=PATIENCE,
            approval_timeout=0,
            stale_after=STALE_AFTER,
            heartbeat=HEARTBEAT,
            backoff=self._backoff(),
            patience=PATIENCE,
        )

    def _agent(self, life: Life) -> Callable[[Any, Lease], Awaitable[None]]:
        """Return the function that a worker calls for a thread."""

        async def agent(cp: Any, lease: Lease) -> None:
            order = lease.thread_id
            self.world.note(life.name, f"runs {order}")

            try:
                result = await self._ledger(cp).run(
                    order,
                    "charge",
                    {"order": order},
                    partial(self._handle, life),
                    key_fields=["order"],
                    verify=self.world.verify,
                )
            except EffectDenied:
                self.world.returned(life, order, "denied")
                self.denied.add(order)
                raise

            self.world.returned(life, order, str(result))
            data = await lease.load()

            if data is None or not data.messages:
                version = 0 if data is None else data.version
                await cp.append(order, [{"charged": result}], expected_version=version)

        return agent

    async def _handle(self, life: Life, effect: Effect) -> Any:
        is_good = self.weather.calm or self.random.random() < 0.8
        return await self.world.charge(effect, life, "good" if is_good else "no effect")

    async def _first(self, thread_id: str) -> None:
        """Run a thread until it dies in the middle, waits for a person, or ends.

        From then on only workers run it. After any other error it is repeated here: a
        run that ended with an exception is its caller's to repeat.
        """
        is_over = False

        while not is_over:
            life = Life(f"first-{thread_id}", self.weather)
            cp = self._store(life)

            try:
                async with thread_lease(
                    cp, thread_id, stale_after=STALE_AFTER, backoff=self._backoff()
                ) as lease:
                    try:
                        await self._agent(life)(cp, lease)
                        is_over = True
                    except (Crash, EffectDenied):
                        is_over = True
                        raise
                    except EffectTimeout as exc:
                        is_over = exc.holder is None
                        raise
            except _ENDS as exc:
                self.world.note(life.name, f"ended: {exc!r:.60}")
            finally:
                life.alive = False

    async def _work(self, name: str) -> None:
        restarts = 0

        while not self.stop.is_set():
            life = Life(f"{name}.{restarts}", self.weather)
            worker = self.make_worker(
                self._store(life),
                self._agent(life),
                poll=2.0,
                stale_after=STALE_AFTER,
                grace=5.0,
                concurrency=2,
                holder=life.name,
            )

            try:
                await worker.run(self.stop)
            except (Crash, BackendUnavailable) as exc:
                self.world.note(life.name, f"is dead: {exc!r:.60}")
            finally:
                life.alive = False

            restarts += 1
            await asyncio.sleep(self.random.uniform(0, 3))

    async def _decide(self) -> None:
        """Approve or deny what is asked for, each request by its key alone."""
        ledger = self._ledger(self._store(Life("approver", self.weather, mortal=False)))

        while True:
            await asyncio.sleep(self.random.uniform(0, 15))

            try:
                for request in await ledger.requests():
                    approves = self.random.random() < 0.7
                    record = ledger.approve if approves else ledger.deny

                    if await record(request.key, by="a person"):
                        self.world.decided(request.key, approves)
            except BackendUnavailable as exc:
                self.world.note("approver", str(exc))
