"""``prune`` with ``keep_latest`` frees what is older, also beside writers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypedDict

import asyncpg
import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph

from cpkit import (
    BackendUnavailable,
    MemoryCheckpointer,
    VersionConflict,
    open_checkpointer,
)
from cpkit.integrations.langgraph import CheckpointSaver, store_thread_id
from tests.servers.postgres import PostgresServer

CONFIG: Any = {"configurable": {"thread_id": "t"}}
LONG = "a long text " * 2_000
PAGE = 8192


def add(state: list[str], more: list[str]) -> list[str]:
    return [*state, *more]


class Inner(TypedDict):
    note: str


class State(Inner):
    log: Annotated[list[str], add]
    text: str


def graph_on(saver: Any) -> Any:
    """Return a graph of two nodes, one of which is a subgraph."""
    inner = StateGraph(Inner)
    inner.add_node("inner", lambda state: {"note": f"after {state.get('note')}"[:99]})
    inner.add_edge(START, "inner")
    inner.add_edge("inner", END)
    builder = StateGraph(State)
    builder.add_node("sub", inner.compile())
    builder.add_node("last", lambda _: {"text": LONG, "log": ["done"]})
    builder.add_edge(START, "sub")
    builder.add_edge("sub", "last")
    builder.add_edge("last", END)
    return builder.compile(checkpointer=saver)


async def state_of(saver: Any) -> Any:
    return (await graph_on(saver).aget_state(CONFIG)).values


async def test_what_is_older_is_freed_and_the_state_stays(url: str) -> None:
    """The graph goes on; a new process reads the same; the others are gone."""
    expected = graph_on(InMemorySaver())

    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        graph = graph_on(saver)

        for turn in range(6):
            said = {"log": [f"turn {turn}"]}
            assert await graph.ainvoke(said, CONFIG) == await expected.ainvoke(
                said, CONFIG
            )
            old = [one async for one in saver.alist(CONFIG)]
            version = (await cp.load(store_thread_id("t"))).version  # type: ignore[union-attr]
            await saver.aprune(["t"])
            data = await cp.load(store_thread_id("t"))
            assert data is not None
            assert data.first == version
            assert len([one async for one in saver.alist(CONFIG)]) == 1
            assert await state_of(CheckpointSaver(cp)) == await state_of(saver)
            assert await saver.aget_tuple(old[-1].config) is None
            before = data.version
            await saver.aprune(["t"])
            assert (await cp.load(store_thread_id("t"))).version == before  # type: ignore[union-attr]

        await saver.acopy_thread("t", "copy")
        fork: Any = {"configurable": {"thread_id": "copy"}}
        assert (await graph.aget_state(fork)).values == await state_of(saver)


async def test_a_run_with_the_thread_in_memory_goes_on() -> None:
    """It read the thread before the prune, and names nothing that is gone."""
    async with MemoryCheckpointer[Any]() as cp:
        first, second = CheckpointSaver(cp), CheckpointSaver(cp)
        graphs = [graph_on(first), graph_on(second)]

        for turn in range(12):
            said = {"log": [f"turn {turn}"]}
            written = await graphs[turn % 2].ainvoke(said, CONFIG)
            await (first, second)[turn // 2 % 2].aprune(["t"])
            assert await state_of(CheckpointSaver(cp)) == written

        assert len(written["log"]) == 24


async def test_prunes_beside_a_run_lose_nothing(url: str) -> None:
    """Two savers: one runs a graph, the other prunes all the time."""
    async with open_checkpointer(url) as cp:
        graph = graph_on(CheckpointSaver(cp))
        other = CheckpointSaver(cp)

        async def prune() -> None:
            while True:
                with suppress(VersionConflict):  # the run appended again and again
                    await other.aprune(["t"])

                await asyncio.sleep(0)

        pruning = asyncio.create_task(prune())

        for turn in range(10):
            written = await graph.ainvoke({"log": [f"turn {turn}"]}, CONFIG)

        pruning.cancel()
        await asyncio.wait([pruning])
        assert pruning.cancelled()
        assert len(written["log"]) == 20
        assert await state_of(CheckpointSaver(cp)) == written


@asynccontextmanager
async def pruned(cp: Any, read: int) -> AsyncIterator[None]:
    """Let another process prune the thread before this read of its records."""
    left, load_range = read, cp.load_range

    async def load(thread_id: str, *part: Any) -> Any:
        nonlocal left
        left -= thread_id == store_thread_id("t")

        if left == 0:
            cp.load_range = load_range
            await CheckpointSaver(cp).aprune(["t"])

        return await load_range(thread_id, *part)

    cp.load_range = load
    yield
    assert cp.load_range is load_range


@pytest.mark.parametrize("read", [1, 2])
async def test_a_read_beside_a_prune_finds_the_newest(read: int) -> None:
    """What its first records need was trimmed, and is stored again behind them."""
    async with MemoryCheckpointer[Any]() as cp:
        for turn in range(3):
            graph = graph_on(CheckpointSaver(cp))
            written = await graph.ainvoke({"log": [f"turn {turn}"]}, CONFIG)

        saver = CheckpointSaver(cp)

        async with pruned(cp, read):
            found = [one async for one in saver.alist(CONFIG)]

        assert found[0].checkpoint["channel_values"]["log"] == written["log"]
        assert await state_of(saver) == written


@pytest.mark.parametrize("read", [1, 2, 3])
async def test_a_copy_beside_a_prune_has_the_newest(read: int) -> None:
    """It goes on behind what was trimmed."""
    async with MemoryCheckpointer[Any]() as cp:
        saver = CheckpointSaver(cp)

        for turn in range(6):
            said = {"log": [f"turn {turn}"]}
            written = await graph_on(saver).ainvoke(said, CONFIG)

        async with pruned(cp, read):
            await saver.acopy_thread("t", "copy")

        copied: Any = {"configurable": {"thread_id": "copy"}}
        graph = graph_on(CheckpointSaver(cp))
        assert (await graph.aget_state(copied)).values == written
        again = await graph.ainvoke({"log": ["again"]}, copied)
        assert again["log"] == [*written["log"], "again", "done"]


async def test_a_prune_that_dies_before_its_trim_is_done_by_the_next() -> None:
    """All is there twice until then."""
    async with MemoryCheckpointer[Any]() as opened:
        cp: Any = opened
        saver = CheckpointSaver(cp)
        graph = graph_on(saver)
        written = await graph.ainvoke({"log": ["one"]}, CONFIG)
        trim = cp.trim

        async def die(*_args: Any, **_options: Any) -> int:
            raise BackendUnavailable("memory", "the process died", maybe_applied=False)

        cp.trim = die

        with pytest.raises(BackendUnavailable):
            await saver.aprune(["t"])

        cp.trim = trim
        assert (await cp.load(store_thread_id("t"))).first == 0
        assert await state_of(CheckpointSaver(cp)) == written
        assert len([one async for one in CheckpointSaver(cp).alist(CONFIG)]) == 1
        await CheckpointSaver(cp).aprune(["t"])
        assert (await cp.load(store_thread_id("t"))).first > 0
        assert await state_of(CheckpointSaver(cp)) == written
        written = await graph.ainvoke({"log": ["two"]}, CONFIG)
        await CheckpointSaver(cp).aprune(["t"])
        assert (await cp.load(store_thread_id("t"))).first > 0
        assert await state_of(CheckpointSaver(cp)) == written


def of_run(run_id: str) -> Any:
    return {**CONFIG, "metadata": {"run_id": run_id}}


async def test_deleted_runs_free_their_bytes(url: str) -> None:
    """The other run stays, for time travel too; its thread goes on."""
    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        graph = graph_on(saver)

        for turn in range(4):
            await graph.ainvoke({"log": [f"turn {turn}"]}, of_run(f"run {turn}"))

        steps = [one async for one in graph.aget_state_history(CONFIG)]
        kept = [one for one in steps if one.metadata["run_id"] == "run 2"]
        await saver.adelete_for_runs(["run 0"])
        data = await cp.load(store_thread_id("t"))
        assert data is not None
        assert data.first == 0, "three of four would be stored again"
        await saver.adelete_for_runs(["run 1", "run 3"])
        data = await cp.load(store_thread_id("t"))
        assert data is not None
        assert data.first > 0
        assert "turn 3" not in str(data.messages)

        for one in (saver, CheckpointSaver(cp)):
            again = graph_on(one)
            left = [step async for step in again.aget_state_history(CONFIG)]
            assert [step.values for step in left] == [step.values for step in kept]

            for step in kept:
                found = await again.aget_state(step.config)
                assert (found.values, found.next) == (step.values, step.next)

        assert await saver.aget_tuple(steps[0].config) is None
        written = await graph.ainvoke({"log": ["more"]}, kept[0].config)
        assert written["log"] == [*kept[0].values["log"], "more", "done"]


async def test_a_thread_whose_runs_are_all_deleted_is_empty(url: str) -> None:
    """Nothing of them is stored; a new run begins."""
    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        graph = graph_on(saver)
        await graph.ainvoke({"log": ["secret"]}, of_run("run"))
        await saver.adelete_for_runs(["run"])
        data = await cp.load(store_thread_id("t"))
        assert data is not None
        assert "secret" not in str(data.messages)
        assert await saver.aget_tuple(CONFIG) is None
        written = await graph.ainvoke({"log": ["new"]}, CONFIG)
        assert written["log"] == ["new", "done"]
        assert await state_of(CheckpointSaver(cp)) == written


async def test_deleted_runs_beside_a_writer_stay_hidden() -> None:
    """It appended after the thread was read: the bytes stay until a prune."""
    async with MemoryCheckpointer[Any]() as opened:
        cp: Any = opened
        saver, other = CheckpointSaver(cp), CheckpointSaver(cp)

        for turn in range(3):
            await graph_on(saver).ainvoke({"log": [f"{turn}"]}, of_run(f"run {turn}"))

        append = cp.append
        told: list[Any] = []

        async def append_late(store_id: str, messages: Any, **options: Any) -> int:
            if messages[-1]["type"] == "begin" and not told:
                told.append(await other.aclaim(CONFIG))

            return int(await append(store_id, messages, **options))

        cp.append = append_late
        await saver.adelete_for_runs(["run 0", "run 1"])
        assert told
        assert (await cp.load(store_thread_id("t"))).first == 0
        state = await state_of(CheckpointSaver(cp))
        assert state["log"] == ["0", "done", "1", "done", "2", "done"]
        await saver.aprune(["t"])
        assert (await cp.load(store_thread_id("t"))).first > 0
        assert await state_of(CheckpointSaver(cp)) == state


async def thousand_steps(saver: Any, prune: Any) -> None:
    """Run a thousand steps, and prune after each tenth run."""
    graph = graph_on(saver)

    for turn in range(250):  # four steps each
        await graph.ainvoke({"log": [f"turn {turn}"]}, CONFIG)

        if turn % 10 == 9:
            await prune()


@pytest.mark.long
async def test_a_thousand_steps_take_no_more_than_with_langgraphs_saver(
    tmp_path: Path,
) -> None:
    """A prune after each tenth run; then both files are vacuumed.

    LangGraph's saver for SQLite cannot prune, so its newest rows are kept by hand.
    """
    ours, theirs = tmp_path / "ours.db", tmp_path / "theirs.db"

    async with open_checkpointer(f"sqlite:///{ours}") as cp:
        saver = CheckpointSaver(cp)
        await thousand_steps(saver, lambda: saver.aprune(["t"]))

    async with AsyncSqliteSaver.from_conn_string(str(theirs)) as their:

        async def keep_newest() -> None:
            for name in ("checkpoints", "writes"):
                await their.conn.execute(
                    f"DELETE FROM {name} WHERE checkpoint_id NOT IN (SELECT "
                    "MAX(checkpoint_id) FROM checkpoints GROUP BY checkpoint_ns)"
                )

            await their.conn.commit()

        await thousand_steps(their, keep_newest)

    sizes = []

    for path in (ours, theirs):
        with sqlite3.connect(path) as db:
            db.execute("VACUUM")

        db.close()
        sizes.append(path.stat().st_size)

    assert sizes[0] <= sizes[1]


@pytest.mark.long
async def test_a_thousand_steps_take_no_more_on_postgres() -> None:
    """A prune after each tenth run by both savers, and no vacuum meanwhile.

    The tables are smaller than LangGraph's before a VACUUM and after it. A VACUUM FULL
    leaves the pages of two or three rows: cpkit has a page more, because three tables
    have a row, and not two.
    """
    server = PostgresServer(settings={"autovacuum": "off", "fsync": "off"})
    server.start()
    raw = await asyncpg.connect(server.url)

    async def sizes(command: str = "") -> tuple[int, int]:
        found = []

        for schema in ("ours", "theirs"):
            rows = await raw.fetch(
                "SELECT oid::regclass::text AS name FROM pg_class WHERE relkind = 'r' "
                "AND relnamespace = $1::regnamespace",
                schema,
            )
            total = 0

            for (name,) in rows:
                if command:
                    await raw.execute(f"{command} {name}")

                total += await raw.fetchval(f"SELECT pg_total_relation_size('{name}')")

            found.append(total)

        return found[0], found[1]

    try:
        await raw.execute("CREATE SCHEMA theirs")

        async with open_checkpointer(f"{server.url}?schema=ours") as cp:
            saver = CheckpointSaver(cp)
            await thousand_steps(saver, lambda: saver.aprune(["t"]))

        place = f"{server.url}?options=-csearch_path%3Dtheirs"

        async with AsyncPostgresSaver.from_conn_string(place) as their:
            await their.setup()
            await thousand_steps(their, lambda: their.aprune(["t"]))

        ours, theirs = await sizes()
        assert ours <= theirs
        ours, theirs = await sizes("VACUUM")
        assert ours <= theirs
        ours, theirs = await sizes("VACUUM FULL")
        assert ours <= theirs + PAGE
    finally:
        await raw.close()
        server.close()
