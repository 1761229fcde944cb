"""One simulated run: workers, approvers, a faulty store, and a seed for all of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from cpkit import BackendUnavailable, JsonValue
from cpkit.effects import (
    Backoff,
    Effect,
    EffectDenied,
    EffectFailed,
    EffectLedger,
    EffectTimeout,
    NoEffect,
    Superseded,
    Tool,
    effect_of,
)
from tests.broken.reference import Reference
from tests.simulation.faults import Crash, FaultyAbleStore, FaultyStore, Life, Weather
from tests.simulation.history import History
from tests.simulation.loop import Stuck, simulated_loop
from tests.simulation.notices import Notices, WatchedAbleStore, WatchedStore
from tests.simulation.world import Declined, World

__all__ = ["simulate"]

STALE_AFTER = 6.0
HEARTBEAT = 2.0
PATIENCE = 20.0
CALM_AFTER = 300.0
DEADLINE = 3000.0

MakeStore = Callable[[], Any]
MakeLedger = Callable[..., EffectLedger]


def simulate(
    seed: int,
    make_store: MakeStore = Reference,
    make_ledger: MakeLedger = EffectLedger,
) -> History:
    """Run the scenario of a seed; the same seed gives the same history."""
    loop = simulated_loop(Random(seed))
    world: list[World] = []
    quiet = logging.getLogger("cpkit")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)

    try:
        loop.run(_main(Random(f"scenario {seed}"), make_store, make_ledger, world))
    except Stuck:
        world[0].violations.append("every task waits for ever")
    finally:
        quiet.setLevel(level)

    return History(seed, world[0].violations, world[0].log, len(world[0].charges))


async def _main(
    random: Random,
    make_store: MakeStore,
    make_ledger: MakeLedger,
    out: list[World],
) -> None:
    async with make_store() as store:
        scenario = Scenario(random, store, make_ledger)
        out.append(scenario.world)

        try:
            async with asyncio.timeout(DEADLINE):
                await scenario.run()
        except TimeoutError:
            scenario.world.violate("no progress")


class Scenario:
    """What is drawn for one run: its workers, its options and its faults."""

    def __init__(
        self, random: Random, store: Reference, make_ledger: MakeLedger
    ) -> None:
        self.random = random
        self.store = store
        self.make_ledger = make_ledger
        self.weather = Weather(random)
        self.orders = [f"order-{n}" for n in range(random.choice([1, 1, 2]))]
        self.workers = random.choice([2, 2, 3])
        self.approvers = random.choice([1, 2])
        self.takeovers = random.random() < 0.6
        self.verified = random.random() < 0.6
        self.cancels = random.choice([0.0, 0.05])
        self.moods = random.choice(
            [["good"], ["good"], ["good", "declined"], ["good", "no effect"]]
        )
        self.world = World(
            store,
            {order for order in self.orders if random.random() < 0.5},
            STALE_AFTER,
            HEARTBEAT / 2,
        )
        self.able = random.random() < 0.4
        self.notices = Notices(random) if random.random() < 0.5 else None
        # Where a dead holder is taken over, each wait must end by itself.
        self.timeout = None if self.notices and self.takeovers else PATIENCE
        self.by_hand = random.choice([0.0, 0.0, 0.6])
        self.tool = Tool(
            self._nothing, name="charge", verify=self.world.verify, key_fields=["order"]
        )

    async def run(self) -> None:
        """Run all tasks until every worker has an outcome for every order."""
        approvers = [
            asyncio.create_task(self._approve(f"approver-{n}"))
            for n in range(self.approvers)
        ]
        calm = asyncio.create_task(self._calm())
        workers = [
            asyncio.create_task(self._work(f"worker-{n}")) for n in range(self.workers)
        ]

        try:
            await asyncio.gather(*workers)
        finally:
            for task in (calm, *approvers, *workers):
                task.cancel()

    async def _calm(self) -> None:
        await asyncio.sleep(CALM_AFTER)
        self.weather.calm = True

    # A worker, which is restarted whenever it died

    async def _work(self, name: str) -> None:
        restarts = 0
        left = list(self.orders)
        self.random.shuffle(left)

        while left:
            life = Life(f"{name}.{restarts}", self.weather)
            ledger = self._ledger(life)

            try:
                while left:
                    await self._order(life, ledger, left[0])
                    left.pop(0)
            except Crash:
                life.alive = False
                restarts += 1
                self.world.note(life.name, "is dead")
                await asyncio.sleep(self.random.uniform(0, 3))

    def _ledger(self, life: Life) -> EffectLedger:
        return self.make_ledger(
            self._store(life),
            requires_approval=self._policy,
            timeout=self.timeout,
            approval_timeout=self.timeout,
            stale_after=STALE_AFTER if self.takeovers else None,
            heartbeat=HEARTBEAT,
            backoff=Backoff(0.05, 2.0, self.random.random),
            patience=PATIENCE,
        )

    def _store(self, life: Life) -> FaultyStore:
        """Return the store as a worker sees it; some seeds also have a watch."""
        if self.notices is None:
            faulty = FaultyAbleStore if self.able else FaultyStore
            return faulty(self.store, life, self.world.applied)

        watched = WatchedAbleStore if self.able else WatchedStore
        return watched(self.store, life, self.world.applied, self.notices)

    async def _order(self, life: Life, ledger: EffectLedger, order: str) -> None:
        """Try an order until it has an outcome."""
        while True:
            try:
                result = await self._try(life, ledger, order)
            except (EffectFailed, Declined):
                return self.world.returned(life, order, "failed")
            except EffectDenied:
                return self.world.returned(life, order, "denied")
            except NoEffect:
                continue
            except TimeoutError:
                self.world.note(life.name, "was cancelled")
            except EffectTimeout as exc:
                self.world.note(life.name, str(exc))
                await self._resume(life, ledger)
            except BackendUnavailable as exc:
                self.world.note(life.name, str(exc))
                await asyncio.sleep(1)
            else:
                return self.world.returned(life, order, str(result))

            life.check()

    async def _try(self, life: Life, ledger: EffectLedger, order: str) -> JsonValue:
        timeout = None

        if not self.weather.calm and self.random.random() < self.cancels:
            timeout = self.random.uniform(0, 5)

        async with asyncio.timeout(timeout):
            if self.random.random() < self.by_hand:
                await self._begin(life, ledger, order)

            result = await ledger.run(
                "thread",
                "charge",
                {"order": order},
                partial(self._handle, life),
                key_fields=["order"],
                verify=self.world.verify if self.verified else None,
                tool_call_id="call_0",
            )

        life.check()
        return result

    async def _begin(self, life: Life, ledger: EffectLedger, order: str) -> None:
        """Do with `begin` what `run` does, if no attempt holds the key yet."""
        record, fresh = await ledger.begin(
            "thread", "charge", {"order": order}, key_fields=["order"]
        )
        effect = effect_of(record)

        if not fresh or effect is None:
            return

        try:
            try:
                result = await self._handle(life, effect)
            except NoEffect:
                await ledger.release(record)
                raise
            except Declined as exc:
                await ledger.commit(record, error=exc)
                raise

            await ledger.commit(record, result)
        except Superseded as exc:
            self.world.note(life.name, str(exc))

    async def _handle(self, life: Life, effect: Effect) -> JsonValue:
        mood = "good" if self.weather.calm else self.random.choice(self.moods)
        return await self.world.charge(effect, life, mood)

    async def _resume(self, life: Life, ledger: EffectLedger) -> None:
        """Resume the thread after a timeout, if holders are not taken over."""
        if self.takeovers:
            return

        try:
            report = await ledger.resume("thread", [self.tool], stale_after=STALE_AFTER)
        except BackendUnavailable as exc:
            self.world.note(life.name, f"resume: {exc}")
            return

        for found in report.calls:
            self.world.note(life.name, f"resume {found.action}")

    @staticmethod
    async def _nothing(order: str) -> None:
        """Stand for the tool's function, which resume never calls."""

    # Approvers, which decide at random times, also against each other

    async def _approve(self, name: str) -> None:
        ledger = self._ledger(Life(name, self.weather, mortal=False))

        while True:
            await asyncio.sleep(self.random.uniform(0, 15))

            try:
                for request in await ledger.pending("thread"):
                    await self._decide(ledger, request.key)
            except BackendUnavailable as exc:
                self.world.note(name, str(exc))

    async def _decide(self, ledger: EffectLedger, key: str) -> None:
        if self.random.random() < 0.7:
            if await ledger.approve("thread", key, by="a person"):
                self.world.decided(key, True)
        elif await ledger.deny("thread", key, reason="too much"):
            self.world.decided(key, False)

    def _policy(self, effect: Effect) -> bool:
        return effect.args["order"] in self.world.needs_approval
