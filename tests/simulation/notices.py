"""Notifications of the simulated store: lost, delayed, doubled, and false.

What a store promises of `watch` is broken here on purpose: a lost notification is never
made up for. The layers must not rely on it, because waiting is latency alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import Any

from cpkit import BackendUnavailable
from tests.broken.reference import Reference
from tests.simulation.faults import FaultyAbleStore, Life

__all__ = ["Notices", "WatchedAbleStore"]

_LATEST = 5.0
"""Virtual seconds that a notification takes at most."""


class Notices:
    """Sends each change to the watchers, not at all or up to twice, and late."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.sent = 0
        self.lost = 0
        self._watchers: dict[_Watcher, None] = {}

    def changed(self, thread_id: str) -> None:
        """Notify the watchers of a thread that changed."""
        loop = asyncio.get_running_loop()

        for watcher in self._watchers:
            if watcher.thread_ids and thread_id not in watcher.thread_ids:
                continue

            times = self.random.choice((0, 0, 1, 1, 2))
            self.lost += times == 0
            self.sent += times

            for _ in range(times):
                late = self.random.choice((0.0, self.random.random() * _LATEST))
                loop.call_later(late, watcher.hear, thread_id)

    @asynccontextmanager
    async def watch(
        self, life: Life, thread_ids: tuple[str, ...]
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Register a watcher of one worker; entering may fail, like a read."""
        await life.point()

        if life.weather.strikes(life.weather.faults):
            raise BackendUnavailable("sim", "refused")

        watcher = _Watcher(life, thread_ids)
        self._watchers[watcher] = None

        if self.random.random() < 0.2:  # a false alarm
            watcher.hear(next(iter(thread_ids), "another"))

        try:
            yield watcher
        finally:
            del self._watchers[watcher]


class _Watcher:
    """The iterator of one watch; that of a dead worker never yields."""

    def __init__(self, life: Life, thread_ids: tuple[str, ...]) -> None:
        self.thread_ids = thread_ids
        self._life = life
        self._heard: asyncio.Queue[str] = asyncio.Queue()

    def hear(self, thread_id: str) -> None:
        if self._life.alive:
            self._heard.put_nowait(thread_id)

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        weather = self._life.weather

        if weather.strikes(weather.faults / 4):
            raise RuntimeError("the watch fails")

        return await self._heard.get()


class WatchedAbleStore(FaultyAbleStore):
    """The same with a watch."""

    def __init__(
        self,
        inner: Reference,
        life: Life,
        applied: Callable[[Life, str, Any], None],
        notices: Notices,
    ) -> None:
        super().__init__(inner, life, applied)
        self._notices = notices

    def watch(
        self, *thread_ids: str
    ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        return self._notices.watch(self._life, thread_ids)

    def _changed(self, thread_id: str) -> None:
        self._notices.changed(thread_id)
