"""A simulated run of watching, with notifications lost, delayed and doubled.

Handles write to a few threads. Watchers enter, look, wait, are cancelled, leave and
come back. Reads of markers take time and fail. The rule: a watcher that looks after
each yield sees every change within the poll interval and the time of a few reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from random import Random
from typing import Any

from cpkit import ToolCall
from cpkit.driver import DriverOptions, Heard, StoreFailure, handle_over
from cpkit.memory import MemoryStore
from tests.simulation.loop import simulated_loop

__all__ = ["Faulty", "simulate_watching"]

POLL = 1.0
READ = 0.2
"""The longest time of one read of markers, in virtual seconds."""

BOUND = POLL + 4 * READ
THREADS = ["a", "b", "c"]


class Faulty(MemoryStore):
    """A store in memory whose notifications and reads of markers cannot be trusted."""

    random: Random
    reads_fail = True

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        await asyncio.sleep(self.random.random() * READ / 2)

        if self.reads_fail and self.random.random() < 0.2:
            raise StoreFailure("rejected", "the read fails")

        found = await super().markers(thread_ids)
        await asyncio.sleep(self.random.random() * READ / 2)
        return found

    async def listen(self, heard: Heard) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def faulty(thread_id: str | None) -> None:
            for _ in range(self.random.choice((0, 0, 1, 1, 2))):
                loop.call_later(self.random.random() * 3, heard, thread_id)

            if self.random.random() < 0.05 and not ended.done():
                ended.set_exception(StoreFailure("unknown", "the connection is lost"))

        self._data.listeners.add((loop, faulty))

        try:
            await ended
        finally:
            self._data.listeners.discard((loop, faulty))


class _Run:
    """The books of one run: when each thread changed, and what watchers saw."""

    def __init__(self, seed: int, kind: type[Faulty], poll: float) -> None:
        self.random = Random(seed)
        self.kind = kind
        self.poll = poll
        self.changed: dict[str, list[float]] = {name: [] for name in THREADS}
        self.violations: list[str] = []
        self.writing = True

    async def run(self) -> None:
        shared = self.kind()
        fails = self.random.random() < 0.5
        handles: list[Any] = []

        for _ in range(3):
            store = self.kind()
            store._data = shared._data
            store.random = self.random
            store.reads_fail = fails
            options = DriverOptions(poll=self.poll)
            handles.append(handle_over(store, options=options))
            await handles[-1].__aenter__()

        async with asyncio.TaskGroup() as group:
            for number in range(5):
                cp = self.random.choice(handles[:2])
                group.create_task(
                    self._watch(f"watcher {number}", cp, strict=not fails)
                )

            await self._write(handles)

            for one in handles:
                one.store.reads_fail = False

            await asyncio.sleep(BOUND)
            self.writing = False

        for one in handles:
            await one.aclose()

    async def _write(self, handles: list[Any]) -> None:
        for number in range(self.random.randint(5, 25)):
            await asyncio.sleep(self.random.choice((0, 0.001, 0.3, 2)))
            cp, name = self.random.choice(handles), self.random.choice(THREADS)

            match self.random.randrange(4):
                case 0:
                    await cp.save_extra(name, {"n": number})
                case 1:
                    call = ToolCall(f"c{number}", "pay", {}, f"k{number}")
                    await cp.record_issued(name, call)
                case 2:
                    await cp.append(name, [{"n": number}])
                    await cp.delete_thread(name)
                    self._note(name)
                    await cp.append(name, [{"n": number}])
                case _:
                    await cp.append(name, [{"n": number}])

            self._note(name)

    def _note(self, name: str) -> None:
        self.changed[name].append(asyncio.get_running_loop().time())

    async def _watch(self, who: str, cp: Any, *, strict: bool) -> None:
        while self.writing:
            names = self.random.sample(THREADS, self.random.randrange(4))
            watched = names or THREADS
            last = self.random.random() < 0.3

            try:
                async with cp.watch(*names) as changes:
                    # What was committed before the entering is in the first look.
                    seen = {name: len(self.changed[name]) for name in watched}
                    await self._stay(who, changes, seen, strict=strict, stays=last)
            except TimeoutError:
                continue  # the wait was cancelled, and with it the watch
            except Exception as exc:
                if strict:
                    self.violations.append(f"{who}: {exc!r}")

                await asyncio.sleep(0.1)

    async def _stay(
        self, who: str, changes: Any, seen: dict[str, int], *, strict: bool, stays: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.random.random() * 10

        while self.writing and (stays or loop.time() < until):
            try:
                async with asyncio.timeout(self.random.random() * BOUND):
                    name = await anext(changes)
                    seen[name] = len(self.changed[name])
            except TimeoutError:
                if self.random.random() < 0.1:
                    raise

            if strict:
                self._check(who, seen)

        if stays:
            self._check(who, seen)

    def _check(self, who: str, seen: dict[str, int]) -> None:
        now = asyncio.get_running_loop().time()

        for name, count in seen.items():
            missed = self.changed[name][count:]

            if missed and now - missed[0] > BOUND:
                self.violations.append(f"{who} missed {name!r} at {missed[0]:.3f}")


def simulate_watching(
    seed: int, kind: type[Faulty] = Faulty, poll: float = POLL
) -> list[str]:
    """Return the violations of one seed."""
    run = _Run(seed, kind, poll)
    loop = simulated_loop(run.random)
    loop.run(run.run())
    return run.violations + [str(error) for error in loop.errors]
