"""The memory store: handles of one name in this process share a store."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any
from uuid import uuid4

import pytest

from cpkit import MemoryCheckpointer, Survives, ToolCall, open_checkpointer

Memory = MemoryCheckpointer[Any]


@pytest.fixture
def name() -> str:
    """A name that no other test uses; a named store lives as long as the process."""
    return f"store-{uuid4().hex}"


def in_threads(count: int, body: Any) -> None:
    """Run a coroutine function in ``count`` threads at once, each with a loop."""
    start = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            start.wait()
            asyncio.run(body(number))
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]

    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()

    assert not errors


async def test_handles_of_one_name_share_a_store(name: str) -> None:
    """The store outlives its handles, and names are compared exactly."""
    async with open_checkpointer(f"memory://{name}") as cp:
        await cp.append("t", [{"n": 1}])

    async with Memory(name) as cp, Memory(name.upper()) as no:
        data = await cp.load("t")
        assert data is not None
        assert data.messages == [{"n": 1}]
        assert await no.load("t") is None


async def test_a_handle_without_a_name_has_its_own_store() -> None:
    """Two such handles do not see each other's threads."""
    async with open_checkpointer("memory://") as a, Memory() as b:
        await a.append("t", [{}])
        assert await b.load("t") is None


async def test_a_name_in_a_url_is_decoded(name: str) -> None:
    """``%20`` is a space."""
    async with Memory(f"{name} x") as cp:
        await cp.append("t", [{}])

    async with open_checkpointer(f"memory://{name}%20x") as cp:
        assert await cp.load("t") is not None


def test_loops_in_many_threads_share_a_store(name: str) -> None:
    """Versions have no gaps, every merge is kept, and each key has one holder."""
    versions: list[int] = []
    claimed: list[str] = []

    async def work(number: int) -> None:
        async with Memory(name) as cp:
            for i in range(50):
                versions.append(await cp.append("t", [{"from": number, "i": i}]))
                await cp.save_extra("t", {f"{number}-{i}": i})
                call = ToolCall(f"{number}-{i}", "tool", {}, f"key-{i}")

                if await cp.record_issued("t", call) is None:
                    claimed.append(call.idempotency_key)

    in_threads(4, work)

    async def look() -> None:
        async with Memory(name) as cp:
            data = await cp.load("t")
            assert data is not None
            assert len(data.messages) == len(data.extra) == 200
            assert [m["i"] for m in data.messages if m["from"] == 2] == list(range(50))
            assert len(data.pending) == 50

    asyncio.run(look())
    assert sorted(versions) == list(range(1, 201))
    assert set(Counter(claimed).values()) == {1}


async def test_its_durability_survives_nothing() -> None:
    """The text names a store that keeps the state."""
    cp = Memory("a")
    assert cp.durability.survives is Survives.NONE
    assert str(cp.durability) == (
        "none: the state ends with this process: use sqlite:///agent.db to keep it"
    )
    assert repr(cp) == "<MemoryCheckpointer memory://a>"
