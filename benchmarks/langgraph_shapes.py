"""Measure the saver beside LangGraph's own: ``python -m benchmarks.langgraph_shapes``.

Each shape is a graph that runs a number of steps with both savers in turn, so that both
meet the same load of the machine. A ratio below 1.0 says that cpkit is better. On a
busy machine the processor time of this process says more than the time of a clock.
"""

from __future__ import annotations

import asyncio
import operator
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import psycopg
import psycopg.sql
from langchain_core.messages import AIMessage, AnyMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Send

from cpkit import open_checkpointer
from cpkit.integrations.langgraph import CheckpointSaver
from tests.servers.postgres import shared_postgres

STORES = ("sqlite", "postgres")

# A cold read is measured behind each of so many more steps, because it depends on how
# far back a whole checkpoint is. The quickest of some reads counts.
POSITIONS = 12
READS = 3

# Steps of one saver in a row: as in a program that has one, its code is in the
# processor's caches. The load of the machine still meets both.
BLOCK = 10
WORDS = "the model read a plan and called another tool for its next answer".split()


def text(size: int, seed: int) -> str:
    """Return text as models write it: a few words, in any order."""
    words = random.Random(seed).choices(WORDS, k=size // 4)
    return " ".join(words)[:size]


class Chat(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


class Plan(TypedDict):
    plan: dict[str, Any]


class Window(TypedDict):
    log: list[str]


class Sends(TypedDict):
    n: int
    seen: Annotated[list[str], operator.add]


FIELDS: Any = {f"c{i}": str for i in range(100)}
Hundred: Any = TypedDict("Hundred", FIELDS)  # type: ignore[misc]  # fields made above


def chat(state: Any) -> Any:
    return {"messages": [AIMessage(text(1000, len(state["messages"])))]}


def plan(state: Any) -> Any:
    n = state["plan"].get("n", 0) + 1
    steps = {f"step {i}": text(1000, n * 20 + i) for i in range(20)}
    return {"plan": {"n": n, **steps}}


def window(state: Any) -> Any:
    log = state["log"] or [text(1000, i) for i in range(20)]
    return {"log": [*log[:-1], text(1000, random.randrange(10**6))]}


def hundred(state: Any) -> Any:
    return {f"c{random.randrange(100)}": text(50, random.randrange(10**6))}


def fan(state: Any) -> Any:
    return {"seen": [text(200, random.randrange(10**6))]}


def simple(schema: Any, node: Any) -> StateGraph[Any]:
    builder: StateGraph[Any] = StateGraph(schema)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    builder.add_edge("node", END)
    return builder


def sends() -> StateGraph[Any]:
    builder: StateGraph[Any] = StateGraph(Sends)
    builder.add_node("start", lambda state: {"n": state["n"]})
    builder.add_node("task", fan)
    builder.add_edge(START, "start")
    builder.add_conditional_edges("start", lambda _: [Send("task", {})] * 5, ["task"])
    builder.add_edge("task", END)
    return builder


SHAPES: dict[str, tuple[Callable[[], StateGraph[Any]], Any]] = {
    "growing chat": (lambda: simple(Chat, chat), {"messages": ["hello"]}),
    "20 KB dict": (lambda: simple(Plan, plan), {"plan": {}}),
    "list of 20": (lambda: simple(Window, window), {"log": []}),
    "100 channels": (
        lambda: simple(Hundred, hundred),
        {f"c{i}": "x" for i in range(100)},
    ),
    "parallel sends": (sends, {"n": 1, "seen": []}),
}


class Side:
    """One saver on one store, that can be opened again."""

    def __init__(self, store: str, ours: bool, folder: Path) -> None:
        self.store, self.ours = store, ours
        name = f"{'ours' if ours else 'own'}_{uuid4().hex[:8]}"
        self.file = folder / f"{name}.db"
        self.url = shared_postgres(schema=name) if store == "postgres" else ""

    async def open(self, stack: AsyncExitStack) -> BaseCheckpointSaver[Any]:
        if self.ours:
            url = self.url if self.store == "postgres" else f"sqlite:///{self.file}"
            return CheckpointSaver(
                await stack.enter_async_context(open_checkpointer(url))
            )

        if self.store == "sqlite":
            return await stack.enter_async_context(
                AsyncSqliteSaver.from_conn_string(str(self.file))
            )

        base, _, query = self.url.partition("?")
        schema = query.partition("schema=")[2]

        async with await psycopg.AsyncConnection.connect(base, autocommit=True) as c:
            name = psycopg.sql.Identifier(schema)
            await c.execute(
                psycopg.sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name)
            )

        saver = await stack.enter_async_context(
            AsyncPostgresSaver.from_conn_string(
                f"{base}?options=-csearch_path%3D{schema}"
            )
        )
        await saver.setup()
        return saver

    async def size(self) -> int:
        if self.store == "sqlite":
            return sum(
                one.stat().st_size
                for one in self.file.parent.glob(self.file.name + "*")
            )

        base, _, query = self.url.partition("?")
        schema = query.partition("schema=")[2]

        async with await psycopg.AsyncConnection.connect(base) as connection:
            found = await connection.execute(
                "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN "
                "pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND "
                "relkind = 'r'",
                [schema],
            )
            row = await found.fetchone()
            return int(row[0]) if row else 0


async def measure(shape: str, store: str, steps: int, folder: Path) -> dict[str, float]:
    """Return the ratios of cpkit to LangGraph's own saver."""
    make, first = SHAPES[shape]
    sides = [Side(store, ours, folder) for ours in (True, False)]
    config: Any = {"configurable": {"thread_id": "t"}, "recursion_limit": 10_000}
    other: Any = {"configurable": {"thread_id": "other"}}
    times: list[list[float]] = [[], []]
    cold: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    cold_cpu: list[list[float]] = [[], []]

    async with AsyncExitStack() as stack:
        graphs = [make().compile(checkpointer=await side.open(stack)) for side in sides]

        for graph in graphs:
            await graph.ainvoke(first, other)

        for block in range(0, steps, BLOCK):
            order = (0, 1) if block // BLOCK % 2 else (1, 0)

            for which in order:
                for step in range(block, min(block + BLOCK, steps)):
                    given = first if step == 0 else _next(first)
                    begun, used = time.perf_counter(), time.process_time()
                    await graphs[which].ainvoke(given, config)
                    times[which].append(time.perf_counter() - begun)
                    cpu[which].append(time.process_time() - used)

        for _ in range(POSITIONS):
            for which in (0, 1):
                await graphs[which].ainvoke(_next(first), config)
                reads = [await _cold(sides[which], other, config) for _ in range(READS)]
                cold[which].append(min(wall for wall, _ in reads))
                cold_cpu[which].append(min(used for _, used in reads))

    sizes = [await side.size() for side in sides]
    return {
        "time per step": statistics.median(times[0]) / statistics.median(times[1]),
        "processor": statistics.median(cpu[0]) / statistics.median(cpu[1]),
        "bytes": sizes[0] / sizes[1],
        "cold read": statistics.mean(cold[0]) / statistics.mean(cold[1]),
        "its processor": statistics.mean(cold_cpu[0]) / statistics.mean(cold_cpu[1]),
        "step, ms": 1000 * statistics.median(times[0]),
        "cold, ms": 1000 * statistics.mean(cold[0]),
    }


async def _cold(side: Side, other: Any, config: Any) -> tuple[float, float]:
    """Return the time of the first read of a thread, by the clock and the processor.

    Another thread was read before, as in a server that runs.
    """
    async with AsyncExitStack() as stack:
        saver = await side.open(stack)
        assert await saver.aget_tuple(other) is not None
        begun, used = time.perf_counter(), time.process_time()
        assert await saver.aget_tuple(config) is not None
        return time.perf_counter() - begun, time.process_time() - used


def _next(first: dict[str, Any]) -> dict[str, Any]:
    name = next(iter(first))

    if name == "messages":
        return {"messages": ["and then?"]}

    return {"n": 1} if name == "n" else {}


async def main(steps: int, shapes: list[str]) -> None:
    out = sys.stdout.write
    names = ("time per step", "processor", "bytes", "cold read", "its processor")
    out(f"| Shape | Store | {' | '.join(names)} | step | cold |\n")
    out("|---|---|---:|---:|---:|---:|---:|---:|---:|\n")

    for shape in shapes or SHAPES:
        for store in STORES:
            with tempfile.TemporaryDirectory() as folder:
                got = await measure(shape, store, steps, Path(folder))

            ratios = [f"{got[name]:.2f}×" for name in names]
            absolute = [f"{got[name]:.1f} ms" for name in ("step, ms", "cold, ms")]
            out(f"| {shape} | {store} | {' | '.join(ratios + absolute)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 300, sys.argv[2:]))
