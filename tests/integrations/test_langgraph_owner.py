"""A run that owns its thread: a stale run is refused."""

from __future__ import annotations

import asyncio
from typing import Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph

from cpkit import open_checkpointer
from cpkit.integrations.langgraph import CheckpointSaver, NotOwner
from tests.integrations.langgraph_runs import Run, found, thread, values


class Count(TypedDict):
    n: int


async def test_a_stale_run_is_refused(url: str) -> None:
    """Its checkpoints and writes change nothing after another run's claim."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        stale, next_ = Run(CheckpointSaver(one)), Run(CheckpointSaver(two))
        stale.config = await stale.saver.aclaim(thread())
        owned = stale.config
        config = await stale.put(n=1)
        await stale.saver.aput_writes({**owned, **config}, [("n", 2)], "early")
        next_.config = await next_.saver.aclaim(thread())
        stale.config = owned

        with pytest.raises(NotOwner):
            await stale.put(n="stale")

        for ids in (config["configurable"], {"checkpoint_id": "unknown"}):
            late: Any = {"configurable": {**owned["configurable"], **ids}}

            with pytest.raises(NotOwner):
                await stale.saver.aput_writes(late, [("n", "stale")], "late")

        assert await values(next_.saver, thread()) == {"n": 1}
        await next_.put(n=3)

        for saver in (stale.saver, next_.saver, CheckpointSaver(two)):
            assert await values(saver, thread()) == {"n": 3}
            assert (await found(saver, thread())).pending_writes == []


async def test_a_run_stays_the_owner_in_another_process(url: str) -> None:
    """Its claim may stand before the records that the process reads first."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        run = Run(CheckpointSaver(one))
        owned = run.config = await run.saver.aclaim(thread())

        for n in range(20):
            run.config = owned
            await run.put(text=f"{n} " * 9000)

        run.saver = CheckpointSaver(two)
        assert await values(run.saver, thread()) == {"text": "19 " * 9000}
        run.config = owned
        await run.put(text="last")
        await CheckpointSaver(one).aclaim(thread())
        run.saver = CheckpointSaver(two)
        await values(run.saver, thread())
        run.config = owned

        with pytest.raises(NotOwner):
            await run.put(text="stale")


async def test_an_owner_appends_a_large_value_behind_another_writer(url: str) -> None:
    """The value is in parts, and the first attempt to append them is refused."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        run = Run(CheckpointSaver(one))
        owned = run.config = await run.saver.aclaim(thread())
        config: Any = await run.put(n=1)
        await CheckpointSaver(two).aput_writes(config, [("n", 2)], "other")
        run.config = owned
        text = "large " * 500_000
        await run.put(text=text)

        assert (await values(CheckpointSaver(two), thread()))["text"] == text


async def test_only_one_of_two_racing_owners_goes_on(url: str) -> None:
    """After both claims, every checkpoint is of the last owner."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        runs = [Run(CheckpointSaver(cp)) for cp in (one, two)]

        async def go(run: Run, name: str) -> str:
            config = await run.saver.aclaim(thread())

            for n in range(10):
                run.config = config
                await run.put(name=name, n=n)

            return name

        ended = await asyncio.gather(
            *(go(run, name) for run, name in zip(runs, "ab", strict=True)),
            return_exceptions=True,
        )
        winners = [one for one in ended if isinstance(one, str)]
        losers = [one for one in ended if not isinstance(one, str)]
        assert all(isinstance(one, NotOwner) for one in losers)
        last = await values(CheckpointSaver(one), thread())
        assert last["name"] in winners
        assert last["n"] == 9


async def test_a_graph_runs_as_owner(url: str) -> None:
    """The token goes with the config, through interrupts and parallel writes."""
    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        builder = StateGraph(Count)
        builder.add_node("add", lambda state: {"n": state["n"] + 1})
        builder.add_edge(START, "add")
        builder.add_edge("add", END)
        graph: Any = builder.compile(checkpointer=saver)
        first = await saver.aclaim({"configurable": {"thread_id": "t"}})
        assert await graph.ainvoke({"n": 1}, first) == {"n": 2}
        second = await saver.aclaim({"configurable": {"thread_id": "t"}})

        with pytest.raises(NotOwner):
            await graph.ainvoke({"n": 5}, first)

        assert await graph.ainvoke({"n": 2}, second) == {"n": 3}
        state = await graph.aget_state({"configurable": {"thread_id": "t"}})
        assert state.values == {"n": 3}


async def test_a_copy_has_no_owner_of_the_source(url: str) -> None:
    """A run that owns the target goes on, and the source's run cannot write to it."""
    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        source, target = Run(saver, "source"), Run(saver, "target")
        source.config = owned = await saver.aclaim(thread("source"))
        await source.put(n=1)
        target.config = owner = await saver.aclaim(thread("target"))
        await saver.acopy_thread("source", "target")
        assert await values(saver, thread("target")) == {"n": 1}
        await target.put(n=2)
        assert await values(CheckpointSaver(cp), thread("target")) == {"n": 2}

        stale = {**owned["configurable"], "thread_id": "target"}
        source.config = {"configurable": stale}

        with pytest.raises(NotOwner):
            await source.put(n=3)

        target.config = owner
        await target.put(n=4)
        await saver.acopy_thread("source", "new")
        assert await values(CheckpointSaver(cp), thread("new")) == {"n": 1}
