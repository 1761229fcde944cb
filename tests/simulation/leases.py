"""Simulates runners that take turns by lease, with the same faults as the effects."""

from __future__ import annotations

import asyncio
import logging
import random
from random import Random

from cpkit import BackendUnavailable, VersionConflict
from cpkit.lease import Lease, LeaseLost, thread_lease
from tests.broken.reference import Reference
from tests.simulation.faults import Crash, FaultyAbleStore, Life, Weather
from tests.simulation.history import History
from tests.simulation.loop import simulated_loop
from tests.simulation.notices import Notices, WatchedAbleStore

__all__ = ["simulate_lease"]

STALE_AFTER = 6.0
TERMS = 4
"""Terms that each runner must complete, with writes in each."""


def simulate_lease(seed: int) -> History:
    """Run the runners of a seed; the same seed gives the same history."""
    quiet = logging.getLogger("cpkit")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)

    random.seed(seed)  # the pauses between two looks

    try:
        runners = simulated_loop(Random(seed)).run(_main(Random(f"lease {seed}")))
    finally:
        quiet.setLevel(level)

    return History(seed, runners.violations, runners.log, len(runners.tokens))


async def _main(random: Random) -> Runners:
    async with Reference() as store:
        runners = Runners(random, store)

        try:
            async with asyncio.timeout(3000):
                await runners.run()
        except TimeoutError:
            runners.violations.append("no progress")

        return runners


class Runners:
    """Three runners of one thread, and the rules that they may not break."""

    def __init__(self, random: Random, store: Reference) -> None:
        self.random = random
        self.store = store
        self.weather = Weather(random)
        self.faultless = random.random() < 0.2
        self.notices = Notices(random) if random.random() < 0.5 else None
        self.violations: list[str] = []
        self.log: list[str] = []
        self.inside: set[int] = set()
        self.tokens: list[int] = []

        if self.faultless:
            self.weather.calm = True

    async def run(self) -> None:
        calm = asyncio.create_task(self._calm())

        try:
            await asyncio.gather(*(self._runner(n) for n in range(3)))
        finally:
            calm.cancel()

        data = await self.store.load("thread")
        assert data is not None
        wrote = [message["token"] for message in data.messages]

        if wrote != sorted(wrote):
            self.violations.append(f"a runner wrote after its successor: {wrote}")

    async def _calm(self) -> None:
        await asyncio.sleep(300)
        self.weather.calm = True

    def _note(self, life: Life, event: str) -> None:
        now = asyncio.get_running_loop().time()
        self.log.append(f"{now:9.3f}  {life.name:10} {event}")

    async def _runner(self, number: int) -> None:
        left = TERMS

        while left:
            life = Life(f"runner-{number}", self.weather)
            cp = self._store(life)

            try:
                async with self._lease(cp) as lease:
                    await self._term(cp, lease, life)
                    left -= 1
            except Crash:
                life.alive = False
                self._note(life, "is dead")
            except (LeaseLost, VersionConflict, BackendUnavailable) as exc:
                self._note(life, str(exc))
                await asyncio.sleep(self.random.uniform(0, 1))

    def _store(self, life: Life) -> FaultyAbleStore:
        """Return the store as a runner sees it; in some seeds it has a watch."""
        if self.notices is None:
            return FaultyAbleStore(self.store, life, _ignore)

        return WatchedAbleStore(self.store, life, _ignore, self.notices)

    def _lease(self, cp: FaultyAbleStore) -> Lease:
        return thread_lease(
            cp,
            "thread",
            stale_after=STALE_AFTER,
        )

    async def _term(self, cp: FaultyAbleStore, lease: Lease, life: Life) -> None:
        """Load the thread once, and append a few times at the version of that load."""
        self.inside.add(lease.token)
        self._note(life, f"begins term {lease.token}")

        if lease.token in self.tokens:
            self.violations.append("two terms with one token")

        if self.faultless and len(self.inside) > 1:
            self.violations.append("two runners at a time without faults")

        self.tokens.append(lease.token)

        try:
            data = await lease.load()
            version = 0 if data is None else data.version

            for _ in range(self.random.randrange(1, 4)):
                await life.point()
                version = await cp.append(
                    "thread", [{"token": lease.token}], expected_version=version
                )
                self._note(life, f"writes version {version} in term {lease.token}")
        finally:
            self.inside.discard(lease.token)
            self._note(life, f"ends term {lease.token}")


def _ignore(*_: object) -> None:
    """Stand for the books that the effects keep."""
