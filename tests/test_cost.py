"""What an operation costs in Python: calls of functions in all threads, not time.

The same on a busy machine and on a quiet one. ``tests/<store>/test_cost.py`` counts the
round trips, statements and syncs of each store.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cpkit import ToolCall, open_checkpointer
from tests.stores import KINDS, fresh_url

# At most so many calls, with a tenth of room for other versions of Python. The last one
# is an append of 64 tasks to 64 threads.
OPERATIONS = "append", "extra", "find", "load of 100", "claim + result + find", "64x64"
LIMITS = {
    "memory": (95, 105, 45, 165, 265, 65),
    "sqlite": (160, 172, 92, 220, 450, 54),
    "file": (205, 215, 132, 260, 795, 125),
    "postgres": (180, 200, 115, 320, 530, 60),
    "redis": (245, 255, 170, 400, 710, 55),
}

TIMES = 50
MESSAGE = {"role": "assistant", "content": "x" * 900, "id": 1}


class Calls:
    """Counts the calls of Python and C functions in all threads that begin later."""

    def __init__(self) -> None:
        self.count = 0

    def hook(self, frame: object, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            self.count += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.count = 0
        sys.setprofile(self.hook)

        try:
            yield
        finally:
            sys.setprofile(None)

    async def of(self, one: Callable[[int], Awaitable[object]]) -> int:
        """Return the calls of one operation, on average."""
        await one(-1)

        with self.counted():
            for i in range(TIMES):
                await one(i)

        return round(self.count / TIMES)


async def measured(url: str, calls: Calls) -> list[int]:
    """Return the calls of each operation, in the order of `OPERATIONS`."""
    async with open_checkpointer(url) as opened:
        cp: Any = opened
        await cp.append("t", [MESSAGE] * 50)
        await cp.append("hundred", [MESSAGE] * 100)

        async def call(i: int) -> None:
            await cp.record_issued("t", ToolCall(f"c{i}", "tool", {"i": i}, f"k{i}"))
            await cp.record_result("t", f"c{i}", {"ok": i})
            await cp.find_completed(f"k{i}")

        async def task(k: int) -> None:
            for _ in range(10):
                await cp.append(f"w{k}", [MESSAGE])

        found = [
            await calls.of(lambda i: cp.append("t", [MESSAGE])),
            await calls.of(lambda i: cp.save_extra("t", {"k": i})),
            await calls.of(lambda i: cp.find_completed("unknown")),
            await calls.of(lambda i: cp.load("hundred")),
            await calls.of(call),
        ]
        await asyncio.gather(*map(task, range(64)))

        with calls.counted():
            await asyncio.gather(*map(task, range(64)))

        return [*found, round(calls.count / 640)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_has_few_calls(kind: str, tmp_path: Path) -> None:
    """More of them are paid by every user of the store."""
    url = fresh_url(kind, tmp_path)
    calls = Calls()
    threading.setprofile(calls.hook)

    try:
        found = asyncio.run(measured(url, calls))
    finally:
        threading.setprofile(None)

    limits = [limit * 1.1 for limit in LIMITS[kind]]
    over = {
        name: count
        for name, count, limit in zip(OPERATIONS, found, limits, strict=True)
        if count > limit
    }
    assert not over, f"{dict(zip(OPERATIONS, found, strict=True))}"
