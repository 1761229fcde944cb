"""A store whose commits wait for the test, and fail when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from cpkit.driver import (
    DriverOptions,
    FullHandle,
    Outcome,
    StoredCall,
    StoreFailure,
    Write,
)
from cpkit.memory import MemoryStore

__all__ = ["GatedStore", "handle", "not_sent", "run_ready_tasks"]


class GatedStore(MemoryStore):
    """The memory store, with a gate in front of each commit.

    ``failures`` are raised by the next commits, one each, before anything is applied.
    ``lost`` is raised after the commit was applied: its answer is lost.
    """

    def __init__(
        self,
        *,
        open_gate: bool = True,
        max_writes: int = 256,
        timeout: float | None = None,
        locks_threads: bool = False,
    ) -> None:
        super().__init__()
        self.max_writes = max_writes
        self.timeout = timeout
        self.locks_threads = locks_threads
        self.gate = asyncio.Semaphore(1_000_000 if open_gate else 0)
        self.batches: list[list[Write]] = []
        self.failures: list[Exception] = []
        self.lost: list[Exception] = []
        self.closed = False

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        self.batches.append(list(batch))
        await self.gate.acquire()

        if self.failures:
            raise self.failures.pop(0)

        outcomes = await super().commit(batch)

        if self.lost:
            raise self.lost.pop(0)

        return outcomes

    async def holder(self, key: str) -> StoredCall | None:
        if self.failures:
            raise self.failures.pop(0)

        return await super().holder(key)

    async def close(self) -> None:
        self.closed = True

    def sizes(self) -> list[int]:
        """Return how many writes each commit had."""
        return [len(batch) for batch in self.batches]


def handle(store: GatedStore, **options: Any) -> FullHandle[dict[str, Any]]:
    """Return an unopened handle over the store."""
    return FullHandle(store, options=DriverOptions(**options))


async def run_ready_tasks() -> None:
    """Let every task run until it waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


def not_sent() -> StoreFailure:
    return StoreFailure("not sent", "no connection")
