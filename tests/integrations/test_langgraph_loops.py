"""Calls from threads and event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langgraph.checkpoint.base import (
    empty_checkpoint,
)

from cpkit import (
    MemoryCheckpointer,
    WrongEventLoop,
)
from cpkit.integrations.langgraph import CheckpointSaver
from cpkit.sync import SyncCheckpointer
from tests.integrations.langgraph_runs import Run, thread, values

# Loops and threads


async def test_synchronous_calls_on_the_loop_are_refused(
    cp: MemoryCheckpointer[Any],
) -> None:
    """They would block the loop; from another thread they work."""
    saver = CheckpointSaver(cp)
    config = await Run(saver).put(n=1)
    calls: list[Callable[[], Any]] = [
        lambda: saver.get_tuple(config),
        lambda: [*saver.list(config)],
        lambda: saver.put(config, empty_checkpoint(), {}, {}),
        lambda: saver.put_writes(config, [("ch", 1)], "task"),
        lambda: saver.get_delta_channel_history(config=config, channels=["n"]),
        lambda: saver.copy_thread("t", "u"),
        lambda: saver.prune(["t"]),
        lambda: saver.delete_for_runs(["run"]),
        lambda: saver.delete_thread("t"),
    ]

    for call in calls:
        with pytest.raises(RuntimeError, match="SyncCheckpointer"):
            call()

    for call in calls:
        await asyncio.to_thread(call)

    assert await saver.aget_tuple(config) is None


async def test_async_calls_work_from_another_loop(
    cp: MemoryCheckpointer[Any],
) -> None:
    """They run on the store's loop."""
    saver = CheckpointSaver(cp)

    async def elsewhere() -> dict[str, Any]:
        await Run(saver).put(n=1)
        assert len([one async for one in saver.alist(thread())]) == 1
        return await values(saver, thread())

    with pytest.raises(WrongEventLoop):
        await asyncio.to_thread(asyncio.run, _load(cp))

    assert await asyncio.to_thread(asyncio.run, elsewhere()) == {"n": 1}


async def _load(cp: MemoryCheckpointer[Any]) -> None:
    await cp.load("t")


def test_without_a_loop_the_error_says_what_to_do() -> None:
    """No loop runs yet, or the store's loop has ended."""
    with pytest.raises(RuntimeError, match="SyncCheckpointer"):
        CheckpointSaver(MemoryCheckpointer[Any]())

    async def make() -> CheckpointSaver:
        async with MemoryCheckpointer[Any]() as cp:
            return CheckpointSaver(cp)

    saver = asyncio.run(make())

    with pytest.raises(RuntimeError, match="does not run any more"):
        saver.get_tuple(thread())


def test_a_sync_checkpointer_serves_threads_and_loops() -> None:
    """Synchronous calls and async calls of any loop work."""
    with SyncCheckpointer("memory://") as cp:
        saver = CheckpointSaver(cp)
        asyncio.run(_put(saver))
        there = saver.get_tuple(thread())
        assert there is not None
        assert there.checkpoint["channel_values"] == {"n": 1}
        assert len([*saver.list(thread())]) == 1


async def _put(saver: CheckpointSaver) -> None:
    await Run(saver).put(n=1)


async def test_a_single_string_is_refused_as_ids(cp: MemoryCheckpointer[Any]) -> None:
    """Its letters would be taken for ids."""
    saver = CheckpointSaver(cp)

    with pytest.raises(TypeError, match="not the str"):
        await saver.aprune("abc")

    with pytest.raises(TypeError, match="not the str"):
        await saver.adelete_for_runs("abc")

    with pytest.raises(ValueError, match="keep_latest"):
        await saver.aprune(["t"], strategy="other")
