"""One simulated run: workers, approvers, a faulty store, and a seed for all of it.

No worker holds a lease here, except where it recovers. People decide, withdraw, reopen
final failures, and say of calls in doubt what the books show.
"""

from __future__ import annotations

import asyncio
import logging
import random as global_random
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

from cpkit import BackendUnavailable, JsonValue
from cpkit.effects import (
    Effect,
    EffectDenied,
    EffectErased,
    EffectFailed,
    EffectLedger,
    EffectTimeout,
    NoEffect,
    Superseded,
    Tool,
    effect_of,
)
from cpkit.lease import LeaseLost, LeaseTimeout
from cpkit.retention import Retention, prune
from tests.broken.reference import Reference
from tests.simulation.faults import Crash, FaultyAbleStore, Life, Weather
from tests.simulation.history import History
from tests.simulation.loop import Stuck, simulated_loop
from tests.simulation.notices import Notices, WatchedAbleStore
from tests.simulation.world import Declined, World

__all__ = ["simulate"]

STALE_AFTER = 6.0
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
    global_random.seed(seed)  # the pauses between two looks

    try:
        loop.run(_main(seed, make_store, make_ledger, world))
    except Stuck:
        world[0].violations.append("every task waits for ever")
    finally:
        quiet.setLevel(level)

    return History(seed, world[0].violations, world[0].log, len(world[0].charges))


async def _main(
    seed: int,
    make_store: MakeStore,
    make_ledger: MakeLedger,
    out: list[World],
) -> None:
    async with make_store() as store:
        random = Random(f"scenario {seed}")
        scenario = Scenario(seed, random, store, make_ledger)
        out.append(scenario.world)

        try:
            async with asyncio.timeout(DEADLINE):
                await scenario.run()
        except TimeoutError:
            scenario.world.violate("no progress")


class Scenario:
    """What is drawn for one run: its workers, its options and its faults."""

    def __init__(
        self, seed: int, random: Random, store: Reference, make_ledger: MakeLedger
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
            STALE_AFTER / 6,
        )
        # Not drawn from ``random``: other seeds keep their histories.
        self.prunes = Random(f"prune {seed}")
        self.notices = Notices(random) if random.random() < 0.5 else None
        # Where a dead holder is taken over, each wait must end by itself.
        self.timeout = None if self.notices and self.takeovers else PATIENCE
        self.by_hand = random.choice([0.0, 0.0, 0.6])
        self.withdraws = random.choice([0.0, 0.0, 0.3])
        self.reopens = "declined" in self.moods and random.random() < 0.5
        self.tool = Tool(
            self._nothing, name="charge", verify=self.world.verify, key_fields=["order"]
        )

    async def run(self) -> None:
        """Run all tasks until every worker has an outcome for every order."""
        people = [
            asyncio.create_task(self._approve(f"approver-{n}"))
            for n in range(self.approvers)
        ]

        if self.reopens:
            people.append(asyncio.create_task(self._reopen()))

        if self.prunes.random() < 0.25:
            people.append(asyncio.create_task(self._prune()))

        calm = asyncio.create_task(self._calm())
        workers = [
            asyncio.create_task(self._work(f"worker-{n}")) for n in range(self.workers)
        ]

        try:
            await asyncio.gather(*workers)
        finally:
            for task in (calm, *people, *workers):
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
        )

    def _store(self, life: Life) -> FaultyAbleStore:
        """Return the store as a worker sees it; some seeds also have a watch."""
        if self.notices is None:
            return FaultyAbleStore(self.store, life, self.world.applied)

        return WatchedAbleStore(self.store, life, self.world.applied, self.notices)

    async def _order(self, life: Life, ledger: EffectLedger, order: str) -> None:
        """Try an order until it has an outcome."""
        while True:
            may_be_reopened = self.reopens

            try:
                result = await self._try(life, ledger, order)
            except (EffectFailed, Declined):
                if not may_be_reopened:
                    return self.world.returned(life, order, "failed")

                await asyncio.sleep(self.random.uniform(0, 10))
            except EffectDenied as exc:
                if type(exc) is EffectDenied:
                    return self.world.returned(life, order, "denied")

                self.world.note(life.name, str(exc))  # withdrawn: ask again
            except NoEffect:
                continue
            except TimeoutError:
                self.world.note(life.name, "was cancelled")
            except EffectTimeout as exc:
                self.world.note(life.name, str(exc))
                await self._resume(life, ledger)
            except EffectErased as exc:
                return self.world.note(life.name, str(exc))
            except BackendUnavailable as exc:
                self.world.note(life.name, str(exc))
                await asyncio.sleep(1)
            else:
                return self.world.returned(life, order, str(result))

            life.check()

    async def _try(self, life: Life, ledger: EffectLedger, order: str) -> Any:
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
                await self._to_the_end(lambda: ledger.release(record))
                raise
            except Declined as exc:
                error = exc
                await self._to_the_end(lambda: ledger.commit(record, error=error))
                raise

            await self._to_the_end(lambda: ledger.commit(record, result))
        except Superseded as exc:
            self.world.note(life.name, str(exc))
        except asyncio.CancelledError:
            # What was begun by hand is its process's to end: here the process ends.
            life.alive = False
            raise Crash(life.name) from None

    async def _to_the_end(self, record: Callable[[], Any]) -> None:
        while True:
            try:
                await record()
                return
            except BackendUnavailable:
                await asyncio.sleep(1)

    async def _handle(self, life: Life, effect: Effect) -> JsonValue:
        mood = "good" if self.weather.calm else self.random.choice(self.moods)
        return await self.world.charge(effect, life, mood)

    async def _resume(self, life: Life, ledger: EffectLedger) -> None:
        """Resume or recover after a timeout, if holders are not taken over.

        Other processes run the same thread without a lease; a lease that this one takes
        must say nothing about their calls.
        """
        if self.takeovers:
            return

        try:
            if self.random.random() < 0.5:
                report = await ledger.resume("thread", [self.tool])
            else:
                self.tool.function = partial(self._again, life)
                report = await ledger.recover("thread", [self.tool])
        except (BackendUnavailable, LeaseTimeout, LeaseLost) as exc:
            self.world.note(life.name, f"resume: {exc}")
            return

        for found in report.calls:
            self.world.note(life.name, f"resume {found.action}")

    @staticmethod
    async def _nothing(order: str) -> None:
        """Stand for the tool's function, which resume never calls."""

    async def _again(self, life: Life, order: str) -> None:
        """Refuse what recover runs again: the worker itself runs it next."""
        raise NoEffect("recovered")

    # People, who decide at random times, also against each other

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
        if not self.weather.calm and self.random.random() < self.withdraws:
            if await ledger.withdraw(key, reason="the user cancelled"):
                self.world.note("approver", f"withdrew {key[:6]}")
        elif self.random.random() < 0.7:
            if await ledger.approve(key, by="a person"):
                self.world.decided(key, True)
        elif await ledger.deny(key, reason="too much"):
            self.world.decided(key, False)

    async def _reopen(self) -> None:
        """Reopen final failures, which were all without effect."""
        ledger = self._ledger(Life("reopener", self.weather, mortal=False))

        while not self.weather.calm:
            await asyncio.sleep(self.random.uniform(0, 15))

            for order in self.orders:
                args: dict[str, JsonValue] = {"order": order}
                key = ledger.key("thread", "charge", args, key_fields=["order"])

                try:
                    await ledger.reopen(key, by="a person")
                    self.world.note("reopener", f"reopened {order}")
                except (ValueError, BackendUnavailable) as exc:
                    self.world.note("reopener", f"{exc!r:.40}")

        self.reopens = False

    async def _prune(self) -> None:
        """Erase or delete by policy, again and again, what is not in use."""
        now = timedelta(0)
        erases = Retention(calls_older_than=now, keep_last=1)
        deletes = Retention(older_than=now)

        while True:
            await asyncio.sleep(self.prunes.uniform(0, 10))
            policy = deletes if self.prunes.random() < 0.2 else erases
            pruned = await prune(self.store, policy)

            if pruned.erased_calls:
                self.world.note("policy", f"erased {pruned.erased_calls}")

            if pruned.threads:
                self.world.note("policy", f"deleted {pruned.threads}")

    def _policy(self, effect: Effect) -> bool:
        return effect.args["order"] in self.world.needs_approval
