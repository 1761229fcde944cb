"""Simulates workers: runs that die, decisions by people, and notices that get lost.

Each thread has a first run or is submitted; a first run dies, ends with an error, or
asks for an approval. From then on the list of runs alone says which threads need a run.
An agent charges by itself, through a sub-agent, or beside another effect in a task
group. Clocks are wrong by days. The rules are those of the effects, and: in the end
each thread is charged and has its message, or is denied, and no run is left open.
"""

from __future__ import annotations

import asyncio
import logging
import random as global_random
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, tzinfo
from functools import partial
from random import Random
from typing import Any
from unittest import mock

from cpkit import BackendUnavailable, ThreadInfo, VersionConflict, worker
from cpkit.effects import (
    Effect,
    EffectDenied,
    EffectLedger,
    EffectTimeout,
    NoEffect,
    Superseded,
)
from cpkit.effects import people as people_module
from cpkit.effects import requests as requests_module
from cpkit.lease import Lease, LeaseLost, thread_lease
from cpkit.runs.threads import RUNS
from cpkit.worker import Worker, submit
from tests.broken.reference import Reference
from tests.simulation.faults import Crash, Life, Weather
from tests.simulation.history import History
from tests.simulation.loop import simulated_loop
from tests.simulation.notices import Notices, WatchedAbleStore
from tests.simulation.world import World

__all__ = ["simulate_worker"]

STALE_AFTER = 6.0
CALM_AFTER = 60.0
DEADLINE = 6000.0

MakeWorker = Callable[..., Worker]


def simulate_worker(seed: int, make_worker: MakeWorker = Worker) -> History:
    """Run the workers of a seed; the same seed gives the same history."""
    quiet = logging.getLogger("cpkit")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)
    global_random.seed(seed)  # the pauses between two looks
    random = Random(f"worker {seed}")
    off = timedelta(days=random.choice([0, 0, -40, 40]))

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return super().now(tz) + off

    try:
        with (
            mock.patch.object(worker, "datetime", Clock),
            mock.patch.object(people_module, "datetime", Clock),
            mock.patch.object(requests_module, "datetime", Clock),
        ):
            world = simulated_loop(Random(seed)).run(_main(random, make_worker))
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
        self.ways = {
            one: random.choice(["alone", "alone", "sub-agent", "group"])
            for one in self.threads
        }
        self.submitted = {one for one in self.threads if random.random() < 0.4}
        self.workers = random.choice([1, 2, 2])
        self.world = World(store, self.needing, STALE_AFTER, STALE_AFTER / 6)
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
        """Return whether each thread has its outcome, and no run is left open."""
        for one in self.threads:
            data = await self.store.load(one)

            if one not in self.denied and (data is None or not data.messages):
                return False

        found: list[ThreadInfo] = await self.store.list_threads(prefix=f"{RUNS}:")
        return not found

    async def _calm(self) -> None:
        await asyncio.sleep(CALM_AFTER)
        self.weather.calm = True

    def _store(self, life: Life) -> WatchedAbleStore:
        return WatchedAbleStore(self.store, life, self.world.applied, self.notices)

    def _ledger(self, cp: Any) -> EffectLedger:
        return EffectLedger(
            cp,
            requires_approval=lambda effect: effect.args["order"] in self.needing,
            timeout=20,
            approval_timeout=0,
            stale_after=STALE_AFTER,
            expires_after=86_400,
        )

    def _agent(self, life: Life) -> Callable[[Any, Lease], Awaitable[None]]:
        """Return the function that a worker calls for a thread."""

        async def agent(cp: Any, lease: Lease) -> None:
            order = lease.thread_id
            self.world.note(life.name, f"runs {order}")

            try:
                result = await self._charge(cp, life, order)
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

    async def _charge(self, cp: Any, life: Life, order: str) -> Any:
        """Charge an order in the way of its thread."""
        way = self.ways[order]
        ledger = self._ledger(cp)

        async def run(where: str) -> Any:
            return await ledger.run(
                where,
                "charge",
                {"order": order},
                partial(self._handle, life),
                key_fields=["order"],
                verify=self.world.verify,
            )

        if way == "sub-agent":
            return await run(f"sub of {order}")

        if way == "alone":
            return await run(order)

        async def run_beside() -> Any:
            try:
                return await run(order)
            except EffectDenied as exc:  # else it would cancel the other, each time
                return exc

        async with asyncio.TaskGroup() as group:
            charge = group.create_task(run_beside())
            group.create_task(self._note_down(ledger, order))

        if isinstance(charge.result(), EffectDenied):
            raise charge.result()

        return charge.result()

    async def _note_down(self, ledger: EffectLedger, order: str) -> None:
        """Run an effect beside the charge, which needs no approval and takes long."""
        await ledger.run(
            order,
            "note",
            {"order": ""},
            lambda _: asyncio.sleep(3),
            verify=self.world.nothing_landed,
        )

    async def _handle(self, life: Life, effect: Effect) -> Any:
        is_good = self.weather.calm or self.random.random() < 0.8
        return await self.world.charge(effect, life, "good" if is_good else "no effect")

    async def _first(self, thread_id: str) -> None:
        """Run a thread once under its lease, however that ends; or submit it.

        From then on only workers run it.
        """
        life = Life(f"first-{thread_id}", self.weather)
        cp = self._store(life)

        if thread_id in self.submitted:
            await self._submit(thread_id)
            return

        entered = False

        while not entered:
            try:
                async with thread_lease(
                    cp, thread_id, stale_after=STALE_AFTER
                ) as lease:
                    entered = True
                    await self._agent(life)(cp, lease)
            except _ENDS as exc:
                self.world.note(life.name, f"ended: {exc!r:.60}")
            except BaseExceptionGroup as exc:
                self.world.note(life.name, f"ended: {exc.exceptions!r:.60}")

                if exc.split(Crash)[0] is not None:
                    life.alive = False

            if not life.alive and not entered:
                await self._submit(thread_id)  # it died before its run began
                return

        life.alive = False

    async def _submit(self, thread_id: str) -> None:
        """Submit a thread; a program repeats that until it has an answer."""
        cp = self._store(Life("submitter", self.weather, mortal=False))

        while True:
            try:
                await submit(cp, thread_id)
                return
            except BackendUnavailable:
                await asyncio.sleep(1)

    async def _work(self, name: str) -> None:
        restarts = 0

        while not self.stop.is_set():
            life = Life(f"{name}.{restarts}", self.weather)
            made = self.make_worker(
                self._store(life),
                self._agent(life),
                poll=2.0,
                stale_after=STALE_AFTER,
                grace=5.0,
                concurrency=2,
                holder=life.name,
            )

            try:
                await made.run(self.stop)
            except (Crash, BackendUnavailable) as exc:
                self.world.note(life.name, f"is dead: {exc!r:.60}")
            except BaseExceptionGroup:
                self.world.note(life.name, "is dead")
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


_ENDS = (
    Crash,
    EffectDenied,
    NoEffect,
    Superseded,
    LeaseLost,
    BackendUnavailable,
    VersionConflict,
    EffectTimeout,
)
