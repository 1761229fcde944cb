"""A real graph behaves as with LangGraph's own saver in memory, at every step."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Durability

from cpkit import open_checkpointer
from cpkit.integrations.langgraph import CheckpointSaver
from cpkit.sync import SyncCheckpointer
from tests.integrations.langgraph_graphs import Seen, build
from tests.sweeps import sweep

CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}


async def story(
    saver: BaseCheckpointSaver[str], durability: Durability = "async"
) -> list[Any]:
    """Run, interrupt, resume, go back, change and fork; return each state."""
    graph: Any = build().compile(checkpointer=saver)
    see = Seen()
    out: list[Any] = []

    async def run(inputs: Any, config: RunnableConfig = CONFIG) -> None:
        out.append(see(await graph.ainvoke(inputs, config, durability=durability)))
        await look()

    async def look() -> None:
        history = [state async for state in graph.aget_state_history(CONFIG)]
        out.append(see(history))
        out.append(see(await graph.aget_state(CONFIG, subgraphs=True)))
        out.extend([see(await graph.aget_state(state.config)) for state in history])

    await run({"messages": [HumanMessage("hi", id="h0")]})
    stopped = await graph.aget_state(CONFIG)
    await run(Command(resume="yes"))
    # Change the state of the subgraph that was interrupted.
    inner = (await graph.aget_state(CONFIG, subgraphs=True)).tasks[0].state.config
    out.append(see(await graph.aget_state(inner)))
    out.append(see([s async for s in graph.aget_state_history(inner)]))
    await graph.aupdate_state(inner, {"inner": "changed"})
    await look()
    await run(Command(resume="out"))
    await run({"messages": [HumanMessage("more", id="h1")]})
    # Go back in time: answer the same interrupt differently, then change the past.
    await run(Command(resume=""), stopped.config)
    changed = await graph.aupdate_state(
        stopped.config, {"seen": ["another past"]}, as_node="worker"
    )
    await look()
    await run(None, changed)
    earlier = [state async for state in graph.aget_state_history(CONFIG)][-1]
    await run(None, earlier.config)

    for choice in (
        {"limit": 3},
        {"before": stopped.config},
        {"filter": {"source": "update"}},
        {"filter": {"source": "loop", "step": 2}, "limit": 1},
    ):
        found = graph.aget_state_history(CONFIG, **choice)
        out.append(see([state async for state in found]))

    return out


async def test_every_step_is_the_same(url: str) -> None:
    """Values, tasks, interrupts, history and forks, also in a new saver."""
    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        assert await story(saver) == await story(InMemorySaver())
        before = [found async for found in saver.alist(CONFIG)]

    async with open_checkpointer(url) as cp:
        after = [found async for found in CheckpointSaver(cp).alist(CONFIG)]

    assert len(after) > 15
    assert after == before


@pytest.mark.parametrize("durability", sweep(["sync", "exit"], ["exit"]))
async def test_every_durability_is_the_same(durability: Durability) -> None:
    """LangGraph may write at each step, or only at the end."""
    async with open_checkpointer("memory://") as cp:
        ours = await story(CheckpointSaver(cp), durability)

    assert ours == await story(InMemorySaver(), durability)


def test_synchronous_runs_are_the_same(url: str) -> None:
    """A program without a loop gets the same states."""

    def tale(saver: BaseCheckpointSaver[str]) -> list[Any]:
        graph: Any = build().compile(checkpointer=saver)
        see = Seen()
        out = [
            see(graph.invoke({"messages": [HumanMessage("hi", id="h0")]}, CONFIG)),
            see(graph.invoke(Command(resume="yes"), CONFIG)),
            see(graph.get_state(CONFIG, subgraphs=True)),
            see(graph.invoke(Command(resume="out"), CONFIG)),
        ]
        history = [*graph.get_state_history(CONFIG)]
        fork = graph.update_state(history[2].config, {"seen": ["fork"]})
        out.append(see(graph.get_state(fork)))
        out.append(see([*graph.get_state_history(CONFIG)]))
        return out

    with SyncCheckpointer(url) as cp:
        assert tale(CheckpointSaver(cp)) == tale(InMemorySaver())


async def test_a_synchronous_run_works_in_another_thread() -> None:
    """The store's loop runs in the main thread."""
    async with open_checkpointer("memory://") as cp:
        graph: Any = build().compile(checkpointer=CheckpointSaver(cp))
        inputs = {"messages": [HumanMessage("hi", id="h0")]}
        await asyncio.to_thread(graph.invoke, inputs, CONFIG)
        state = await graph.aget_state(CONFIG)
        assert state.next == ("ask",)


def extend(state: list[str], writes: list[list[str]]) -> list[str]:
    return [*state, *(item for write in writes for item in write)]


class Delta(TypedDict):
    log: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=4)]


@pytest.mark.parametrize("prune", [False, True])
async def test_delta_channels_are_rebuilt(url: str, prune: bool) -> None:
    """They are rebuilt from writes and snapshots, also after pruning."""
    expected = []

    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        builder = StateGraph(Delta)
        builder.add_node("node", lambda state: {"log": [f"node {len(state['log'])}"]})
        builder.add_edge(START, "node")
        builder.add_edge("node", END)
        graph: Any = builder.compile(checkpointer=saver)

        for turn in range(7):
            expected += [f"turn {turn}", f"node {2 * turn + 1}"]
            state = await graph.ainvoke({"log": [f"turn {turn}"]}, CONFIG)
            assert state["log"] == expected

            if prune:
                await saver.aprune(["t"])
                assert len([one async for one in saver.alist(CONFIG)]) == 1

            assert (await graph.aget_state(CONFIG)).values["log"] == expected
            # A cheap fork has what the channel is rebuilt from, and goes on.
            fork: Any = {"configurable": {"thread_id": f"fork {turn}"}}
            await saver.acopy_thread("t", f"fork {turn}", last=1)
            assert (await graph.aget_state(fork)).values["log"] == expected
            state = await graph.ainvoke({"log": ["on"]}, fork)
            assert state["log"] == [*expected, "on", f"node {2 * turn + 3}"]

        again = await asyncio.to_thread(builder.compile(saver).get_state, CONFIG)
        assert again.values["log"] == expected
