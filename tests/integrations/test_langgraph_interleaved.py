"""Savers that write one thread at the same time, with ids in any order.

A saver that reads the end of the thread finds what one that reads all of it finds. The
order of appends decides what is the newest.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple, empty_checkpoint

from cpkit import MemoryCheckpointer
from cpkit.integrations.langgraph import CheckpointSaver, store_thread_id
from tests.integrations.langgraph_runs import thread
from tests.sweeps import sweep

NAMESPACES = ("", "child")
SIZES = (1, 1, 400, 40_000, 40_000)


class Slow:
    """A handle whose appends and reads take some turns of the event loop."""

    def __init__(self, cp: MemoryCheckpointer[Any], random: Random) -> None:
        self._cp = cp
        self._random = random

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cp, name)

        if name not in ("append", "read", "load_range"):
            return method

        async def slow(*args: Any, **options: Any) -> Any:
            await self._wait()
            answer = await method(*args, **options)
            await self._wait()
            return answer

        return slow

    async def _wait(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)


class Clients:
    """Three savers that write to one thread, each one operation after the other."""

    def __init__(self, cp: MemoryCheckpointer[Any], seed: int) -> None:
        self._cp = cp
        self._random = Random(seed)
        numbers = self._random.sample(range(10**6), 900)
        self._unused = [f"{number:036d}" for number in numbers]
        self.ids: dict[str, list[str]] = {ns: [] for ns in NAMESPACES}
        self.savers = [self._saver() for _ in range(3)]
        # A graph writes to a checkpoint that is about to be stored, by the same saver.
        self._next = [{ns: self._unused.pop() for ns in NAMESPACES} for _ in range(3)]

    def _saver(self) -> CheckpointSaver:
        slow: Any = Slow(self._cp, self._random)
        return CheckpointSaver(slow)

    async def run(self, number: int) -> None:
        random = self._random

        for step in range(random.randrange(5, 40)):
            ns = random.choice(("", *NAMESPACES))

            saver = self.savers[number]
            next_id = self._next[number][ns]

            match random.choices(("new", "read", "put", "write"), (1, 2, 4, 3))[0]:
                case "new":
                    self.savers[number] = self._saver()
                    await self.savers[number].aget_tuple(thread(ns=ns))
                    ids = {ns: self._unused.pop() for ns in NAMESPACES}
                    self._next[number] = ids
                case "read":
                    await saver.aget_tuple(thread(ns=ns))
                case "put":
                    self._next[number][ns] = self._unused.pop()
                    await self._put(saver, ns, next_id, f"{number}.{step}")
                case _:
                    text = "w" * random.choice(SIZES)
                    task = f"task {random.randrange(99)}"
                    config = self._config(ns, next_id)
                    await saver.aput_writes(config, [("text", text)], task)

    async def _put(
        self, saver: CheckpointSaver, ns: str, one_id: str, version: str
    ) -> None:
        checkpoint = empty_checkpoint() | {
            "id": one_id,
            "channel_values": {"text": one_id * (self._random.choice(SIZES) // 36 + 1)},
            "channel_versions": {"text": version},
        }
        config = self._config(ns) if self.ids[ns] else thread(ns=ns)
        await saver.aput(config, checkpoint, {}, {"text": version})
        self.ids[ns].append(one_id)

    def _config(self, ns: str, next_id: str | None = None) -> RunnableConfig:
        """Return a config that names a checkpoint, or the one that comes next."""
        ids = self.ids[ns]

        if next_id and (not ids or self._random.random() < 0.4):
            ids = [next_id]

        config = thread(ns=ns)
        config["configurable"]["checkpoint_id"] = self._random.choice(ids)
        return config


def facts(found: CheckpointTuple) -> tuple[Any, ...]:
    return found.checkpoint, found.parent_config, found.pending_writes


async def appended(cp: MemoryCheckpointer[Any], ns: str) -> list[str]:
    """Return the ids of the checkpoints, the last that was appended first."""
    return [
        record["checkpoint_id"]
        for record in reversed(await cp.read(store_thread_id("t")))
        if record["type"] == "checkpoint" and record["ns"] == ns
    ]


@pytest.mark.parametrize(
    "seeds", sweep([range(n, n + 10) for n in range(0, 500, 10)], [range(10)]), ids=str
)
async def test_a_read_of_the_end_is_that_of_the_whole(seeds: range) -> None:
    for seed in seeds:
        async with MemoryCheckpointer[Any]() as cp:
            clients = Clients(cp, seed)
            await asyncio.gather(*(clients.run(number) for number in range(3)))

            for ns, ids in clients.ids.items():
                every = [
                    facts(one) async for one in CheckpointSaver(cp).alist(thread(ns=ns))
                ]
                assert sorted(ids) == sorted(one["id"] for one, *_ in every)
                assert [one["id"] for one, *_ in every] == await appended(cp, ns)
                last = [
                    facts(one)
                    async for one in CheckpointSaver(cp).alist(thread(ns=ns), limit=3)
                ]
                assert last == every[:3], seed

                for saver in (CheckpointSaver(cp), *clients.savers):
                    newest = await saver.aget_tuple(thread(ns=ns))
                    assert ([facts(newest)] if newest else []) == every[:1], seed
