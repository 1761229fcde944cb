"""A process with a graph or a saver, for tests that kill it or run several."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.graph import END, START, StateGraph

from cpkit import open_checkpointer
from cpkit.integrations.langgraph import CheckpointSaver

CONFIG: Any = {"configurable": {"thread_id": "t"}}


def extend(state: list[str], writes: list[str]) -> list[str]:
    return [*state, *writes]


class State(TypedDict):
    log: Annotated[list[str], extend]


class Dies:
    """A store that kills its process instead of writing one more checkpoint.

    LangGraph stores a step's writes before its checkpoint, and the saver may join them.
    So the store first writes what stands before the checkpoint. Then it has ``writes``.
    """

    def __init__(self, inner: Any, checkpoints: int, writes: int) -> None:
        self._inner = inner
        self._checkpoints = checkpoints
        self._writes = writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        kinds = [one["type"] for one in messages]
        self._checkpoints -= kinds.count("checkpoint")
        self._writes -= kinds.count("writes")

        if self._checkpoints < 0:
            before = messages[: kinds.index("checkpoint")]
            await self._inner.append(thread_id, before, **options)
            assert self._writes == 0
            os._exit(9)

        version: int = await self._inner.append(thread_id, messages, **options)
        return version


async def run(url: str, effects: Path, checkpoints: int, writes: int) -> None:
    """Run two parallel nodes and a third; each adds a line to a file."""

    def node(name: str) -> Any:
        def act(state: State) -> State:
            with effects.open("a") as file:
                file.write(f"{name}\n")

            return {"log": [name]}

        return act

    builder = StateGraph(State)

    for name in ("left", "right", "last"):
        builder.add_node(name, node(name))

    builder.add_edge(START, "left")
    builder.add_edge(START, "right")
    builder.add_edge(["left", "right"], "last")
    builder.add_edge("last", END)

    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(Dies(cp, checkpoints, writes))
        graph: Any = builder.compile(checkpointer=saver)
        started = await graph.aget_state(CONFIG)
        inputs = None if started.values else {"log": ["go"]}
        state = await graph.ainvoke(inputs, CONFIG, durability="sync")
        print(*state["log"])  # noqa: T201  # the answer to the test


async def put(url: str, start: str, name: str, count: int) -> None:
    """Put checkpoints on a branch, each with a list that is one item longer."""
    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        first = {**CONFIG["configurable"], "checkpoint_id": start}
        found = await saver.aget_tuple({"configurable": first})
        assert found is not None
        config = found.config
        log = found.checkpoint["channel_values"]["log"]

        for number in range(count):
            log.append(f"{name} {number}")
            checkpoint = empty_checkpoint()
            checkpoint["id"] = str(uuid6())
            checkpoint["channel_values"] = {"log": log}
            version = saver.get_next_version(number, None)
            new = checkpoint["channel_versions"] = {"log": version}
            config = await saver.aput(config, checkpoint, {"source": "loop"}, new)
            await saver.aput_writes(config, [("log", name)], name)

            if number % 7 == 0:
                await saver.aget_tuple(CONFIG)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        asyncio.run(run(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:])))
    else:
        url, start, name, count = sys.argv[2:]
        asyncio.run(put(url, start, name, int(count)))
