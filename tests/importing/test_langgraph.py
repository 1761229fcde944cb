"""Import of LangGraph's threads from its own savers into every store."""

from __future__ import annotations

import asyncio
import operator
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import ormsgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send, StateSnapshot, interrupt
from psycopg import Connection
from psycopg.rows import dict_row

from cpkit import Checkpointer, open_checkpointer
from cpkit.integrations.langgraph import CheckpointSaver, store_thread_id
from cpkit.tools.importing import BadSource, import_from
from cpkit.tools.importing.langgraph import read
from cpkit.tools.importing.langgraph.thread import _in_order, _packed
from cpkit.tools.importing.source import Differs
from tests.servers.postgres import shared_postgres
from tests.stores import LAYERED, fresh_url


@dataclass
class Plan:
    """A class of the application, which the import must not look up."""

    steps: list[str]
    done: bool = False


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    parts: Annotated[list[int], operator.add]
    plan: Plan
    tags: set[str]
    blob: bytes


class Inner(TypedDict):
    parts: Annotated[list[int], operator.add]


def build(saver: BaseCheckpointSaver[Any]) -> Any:
    """Compile a graph with a fan-out, a subgraph and an interrupt."""

    def plan(state: State) -> Any:
        said = AIMessage(f"planning {len(state['messages'])}")
        return {
            "messages": [said],
            "plan": Plan(["a", "b"]),
            "tags": {"x"},
            "blob": b"\xff\0",
        }

    def fan(_state: State) -> list[Send]:
        return [Send("part", n) for n in range(3)]

    def part(n: int) -> Any:
        return {"parts": [n]}

    def ask(_state: State) -> Any:
        return {"messages": [HumanMessage(interrupt("sure?"))]}

    inner = StateGraph(Inner)
    inner.add_node("add", lambda _state: {"parts": [100]})
    inner.add_edge(START, "add")
    outer: Any = StateGraph(State)
    outer.add_node("plan", plan)
    outer.add_node("part", part)
    outer.add_node("inner", inner.compile(checkpointer=True))
    outer.add_node("ask", ask)
    outer.add_edge(START, "plan")
    outer.add_conditional_edges("plan", fan, ["part"])
    outer.add_edge("part", "inner")
    outer.add_edge("inner", "ask")
    outer.add_edge("ask", END)
    return outer.compile(checkpointer=saver)


def config(thread_id: str) -> Any:
    return {"configurable": {"thread_id": thread_id}}


def talk(graph: Any, thread_id: str) -> None:
    """Run a thread to its interrupt, resume it, and run it to the next."""
    asks = {"messages": [HumanMessage("hello", id="1")], "parts": [-1]}
    graph.invoke(asks, config(thread_id))
    graph.invoke(Command(resume="yes"), config(thread_id))
    graph.invoke({"messages": [HumanMessage("again", id="2")]}, config(thread_id))


def allowing() -> JsonPlusSerializer:
    return JsonPlusSerializer(allowed_msgpack_modules=[Plan])


@contextmanager
def sqlite_saver(path: Path) -> Iterator[SqliteSaver]:
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        yield SqliteSaver(connection, serde=allowing())


@contextmanager
def postgres_saver(url: str) -> Iterator[PostgresSaver]:
    with Connection.connect(
        url, autocommit=True, prepare_threshold=0, row_factory=dict_row
    ) as connection:
        yield PostgresSaver(connection, serde=allowing())


@pytest.fixture(params=LAYERED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store in turn."""
    return fresh_url(request.param, tmp_path)


@pytest.fixture
def thread_id() -> str:
    """An id that is not used in any store."""
    return uuid4().hex


@pytest.fixture
def source(tmp_path: Path, thread_id: str) -> Path:
    """A file of LangGraph's SQLite saver with one thread, and no connection."""
    path = tmp_path / "checkpoints.sqlite"

    with sqlite_saver(path) as saver:
        talk(build(saver), thread_id)

    return path


@pytest.fixture
def postgres() -> Iterator[str]:
    """The URL of an empty Postgres schema."""
    schema = f"langgraph_{uuid4().hex}"
    server = shared_postgres()

    with Connection.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA "{schema}"'.encode())
        yield f"{server}?options=-csearch_path%3D{schema}"
        connection.execute(f'DROP SCHEMA "{schema}" CASCADE'.encode())


def shown(snapshots: list[StateSnapshot]) -> list[Any]:
    """Return a history without the fields that differ between savers."""
    return [
        (
            snapshot.values,
            snapshot.next,
            snapshot.config["configurable"]["checkpoint_id"],
            snapshot.metadata,
            snapshot.created_at,
            (snapshot.parent_config or config(""))["configurable"].get("checkpoint_id"),
            snapshot.tasks,
            snapshot.interrupts,
        )
        for snapshot in snapshots
    ]


async def history(cp: Checkpointer[Any], thread_id: str) -> list[Any]:
    graph = build(CheckpointSaver(cp, serde=allowing()))
    return shown([s async for s in graph.aget_state_history(config(thread_id))])


async def test_an_imported_thread_continues_like_the_source(
    url: str, source: Path, thread_id: str
) -> None:
    """History, interrupt and next steps equal those of LangGraph's saver."""
    async with open_checkpointer(url) as cp:
        report = await import_from(str(source), cp)
        assert (report.kind, report.ok, report.left) == ("langgraph-sqlite", True, {})
        assert [thread.status for thread in report.threads] == ["new"]

        with sqlite_saver(source) as saver:
            own = build(saver)
            expected = shown([*own.get_state_history(config(thread_id))])
            assert await history(cp, thread_id) == expected
            assert expected[0][7][0].value == "sure?"
            said = own.invoke(Command(resume="no"), config(thread_id))

        graph = build(CheckpointSaver(cp, serde=allowing()))
        answer = await graph.ainvoke(Command(resume="no"), config(thread_id))
        assert contents(answer) == contents(said)
        assert isinstance(answer["plan"], Plan)


def contents(state: Any) -> Any:
    """Return a state with only the texts of messages, whose ids are random."""
    return {**state, "messages": [message.content for message in state["messages"]]}


@pytest.mark.long
async def test_postgres_is_read_from_one_snapshot(
    postgres: str, thread_id: str
) -> None:
    """All namespaces and blobs are read, and nothing is changed."""
    with postgres_saver(postgres) as saver:
        saver.setup()
        own = build(saver)
        talk(own, thread_id)
        expected = shown([*own.get_state_history(config(thread_id))])

    async with open_checkpointer("memory://") as cp:
        first = await import_from(postgres, cp)
        again = await import_from(postgres, cp)
        assert (first.kind, first.ok) == ("langgraph-postgres", True)
        assert first.written == first.read > 5
        assert (again.ok, again.written) == (True, 0)
        assert await history(cp, thread_id) == expected
        inner = CheckpointSaver(cp)
        found = [t async for t in inner.alist(config(thread_id))]
        assert {t.config["configurable"]["checkpoint_ns"] for t in found} == {
            "",
            "inner",
        }


async def test_a_repeated_import_writes_only_new_records(
    source: Path, thread_id: str
) -> None:
    """It follows a source that has grown."""
    async with open_checkpointer("memory://") as cp:
        dry = await import_from(str(source), cp, dry_run=True)
        assert await cp.load(store_thread_id(thread_id)) is None
        first = await import_from(str(source), cp)
        assert dry.to_dict() == {**first.to_dict(), "dry_run": True}
        data = await cp.load(store_thread_id(thread_id))
        again = await import_from(str(source), cp)
        assert [t.status for t in again.threads] == ["there"]
        assert await cp.load(store_thread_id(thread_id)) == data

        with sqlite_saver(source) as saver:
            own = build(saver)
            own.invoke(Command(resume="no"), config(thread_id))
            expected = shown([*own.get_state_history(config(thread_id))])
            # The saver has the file open, and its last writes are in the -wal.
            grown = await import_from(str(source), cp)

        assert [t.status for t in grown.threads] == ["grown"]
        assert 0 < grown.written < first.written
        assert await history(cp, thread_id) == expected


async def test_the_order_of_channels_does_not_matter(tmp_path: Path) -> None:
    """One node adds eight channels at once, the next one four."""
    path = tmp_path / "channels.sqlite"

    with sqlite_saver(path) as saver:
        for number in range(20):
            names = [f"{chr(97 + number * n % 26)}{n}" for n in range(12)]
            fields: Any = dict.fromkeys(names, int)
            schema: Any = TypedDict("Twelve", fields, total=False)  # type: ignore[misc]
            builder: Any = StateGraph(schema)
            builder.add_node("one", lambda _, names=names: dict.fromkeys(names[4:], 1))
            builder.add_node("two", lambda _, names=names: dict.fromkeys(names[:4], 2))
            builder.add_edge(START, "one")
            builder.add_edge("one", "two")
            builder.add_edge("two", END)
            builder.compile(checkpointer=saver).invoke({}, config(f"t{number}"))

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(path), cp)
        assert report.left == {}
        assert [thread.status for thread in report.threads] == ["new"] * 20


# Run by another interpreter, whose hashes of texts and so orders of sets are others.
IMPORT = """
import asyncio, sys
from cpkit import open_checkpointer
from cpkit.tools.importing import import_from

async def main():
    async with open_checkpointer("memory://") as cp:
        for _ in range(2):
            report = await import_from(sys.argv[1], cp)
            print([thread.status for thread in report.threads], report.left)

asyncio.run(main())
"""


@pytest.mark.long
def test_no_process_finds_another_order(tmp_path: Path) -> None:
    """Twelve int keys, of which node one writes eight and node two four."""
    path = tmp_path / "channels.sqlite"

    with sqlite_saver(path) as saver:
        for number in range(8):
            run_two_nodes(saver, f"t{number}", names_of(number), 8)

    for seed in range(4):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT, str(path)],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        )
        first, again = ([one] * 8 for one in ("new", "there"))
        assert done.stdout == f"{first} {{}}\n{again} {{}}\n"


def names_of(number: int) -> list[str]:
    return [f"{chr(97 + number * n % 26)}{n}" for n in range(12)]


def run_two_nodes(saver: Any, thread_id: str, names: list[str], first: int) -> None:
    """Run a graph whose nodes write the first of the channels, and the others."""
    fields: Any = dict.fromkeys(names, int)
    schema: Any = TypedDict("Channels", fields, total=False)  # type: ignore[misc]
    builder: Any = StateGraph(schema)
    builder.add_node("one", lambda _: dict.fromkeys(names[:first], 1))
    builder.add_node("two", lambda _: dict.fromkeys(names[first:], 2))
    builder.add_edge(START, "one")
    builder.add_edge("one", "two")
    builder.add_edge("two", END)
    builder.compile(checkpointer=saver).invoke({}, config(thread_id))


channel_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=4)
        | st.sets(st.text(max_size=3) | st.integers(0, 9), max_size=5)
    ),
    max_leaves=6,
)


@pytest.mark.long  # graphs are slow to compile and run
@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdefgh"), channel_values, max_size=8),
        min_size=1,
        max_size=4,
    ),
    st.randoms(),
)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_graph_is_imported_whatever_the_order(
    tmp_path: Path, updates: list[dict[str, Any]], random: Any
) -> None:
    """Each node writes some channels, in an order of its own."""
    path = tmp_path / f"{uuid4().hex}.sqlite"
    fields: Any = dict.fromkeys(random.sample("abcdefgh", 8), Any)
    builder: Any = StateGraph(TypedDict("Random", fields, total=False))  # type: ignore[operator]
    before = START

    for number, update in enumerate(updates):
        shuffled = dict(random.sample(sorted(update.items(), key=str), len(update)))
        builder.add_node(f"n{number}", lambda _, shuffled=shuffled: shuffled)
        builder.add_edge(before, before := f"n{number}")

    with sqlite_saver(path) as saver:
        builder.compile(checkpointer=saver).invoke({}, config("t"))

    async def check() -> None:
        async with open_checkpointer("memory://") as cp:
            for status in ("new", "there"):
                report = await import_from(str(path), cp)
                assert report.left == {}
                assert [one.status for one in report.threads] == [status]

    asyncio.run(check())


async def test_a_file_of_an_old_saver_is_named(tmp_path: Path) -> None:
    """LangGraph before 0.2 pickled its checkpoints, under other column names."""
    path = tmp_path / "old.sqlite"

    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "CREATE TABLE checkpoints (thread_id TEXT, thread_ts TEXT, parent_ts TEXT, "
            "checkpoint BLOB, metadata BLOB, PRIMARY KEY (thread_id, thread_ts))"
        )

    async with open_checkpointer("memory://") as cp:
        with pytest.raises(BadSource, match="LangGraph before 0.2 .2024. are pickled"):
            await import_from(str(path), cp)


def test_values_are_compared_without_the_order_of_keys() -> None:
    """At any depth; 1, 1.0 and True differ, and so do lists in another order."""
    assert _packed([{"a": 1, "b": {1: 2, "c": 3}}]) == _packed(
        [{"b": {"c": 3, 1: 2}, "a": 1}]
    )
    different = [1, 1.0, True, "1", b"1", [1, 2], [2, 1], {"a": 1}, {"a": True}]
    assert all(_packed(a) != _packed(b) for a, b in combinations(different, 2))


def test_packed_sets_are_compared_without_their_order() -> None:
    """A later process packs the same set in the order of its own hashes."""
    packs = [as_packed(0, ["builtins", "set", order]) for order in ("ab", "ba")]
    wrapped = [as_packed(5, ["m", "Plan", {"tags": one, "n": 1}]) for one in packs]
    assert _packed({"s": packs[0]}) == _packed({"s": packs[1]})
    assert _packed(wrapped[0]) == _packed(wrapped[1])
    different = [
        *packs[:1],
        as_packed(0, ["builtins", "set", "abb"]),
        as_packed(0, ["builtins", "frozenset", "ab"]),
        as_packed(0, ["other", "set", "ab"]),
        as_packed(0, ["other", "set", "ba"]),
        as_packed(5, ["m", "Plan", {"tags": packs[0], "n": True}]),
        wrapped[0],
        ormsgpack.Ext(9, b"\xc1"),
        ormsgpack.Ext(9, b"\xc1\xc1"),
    ]
    assert all(_packed(a) != _packed(b) for a, b in combinations(different, 2))


def as_packed(tag: int, parts: list[Any]) -> Any:
    """Return an object as LangGraph's serializer packs it; a text is a list."""
    *names, last = parts
    last = list(last) if isinstance(last, str) else last
    return ormsgpack.Ext(tag, ormsgpack.packb([*names, last]))


class Large(TypedDict, total=False):
    data: bytes


@pytest.mark.long
async def test_a_large_thread_is_there_after_its_import(tmp_path: Path) -> None:
    """Also one that is larger than an append may be by default."""
    path = tmp_path / "large.sqlite"

    with sqlite_saver(path) as saver:
        builder = StateGraph(Large)
        builder.add_node("grow", lambda _: {"data": os.urandom(11 * 1024 * 1024)})
        builder.add_edge(START, "grow")
        own = builder.compile(checkpointer=saver)

        for _ in range(5):
            own.invoke({}, config("large"))

    async with open_checkpointer("memory://") as cp:
        for status in ("new", "there"):
            report = await import_from(str(path), cp)
            assert [one.status for one in report.threads] == [status], report.left


async def test_a_thread_that_grew_in_both_places_is_left(
    source: Path, thread_id: str
) -> None:
    """The import does not choose one of two newest checkpoints."""
    async with open_checkpointer("memory://") as cp:
        await import_from(str(source), cp)
        graph = build(CheckpointSaver(cp, serde=allowing()))
        await graph.ainvoke(Command(resume="here"), config(thread_id))
        ahead = await import_from(str(source), cp)
        assert [t.status for t in ahead.threads] == ["there"]

        with sqlite_saver(source) as saver:
            build(saver).invoke(Command(resume="there"), config(thread_id))

        before = await history(cp, thread_id)
        both = await import_from(str(source), cp)
        assert not both.ok
        assert [*both.left] == ["the thread has gone on in the store as well"]
        assert await history(cp, thread_id) == before


async def test_branches_with_equal_versions_stay_separate(
    tmp_path: Path,
) -> None:
    """Old savers counted versions, so two branches may have the same ones."""
    path = tmp_path / "old.sqlite"

    class Counting(SqliteSaver):
        def get_next_version(self, current: Any, channel: None) -> Any:
            return (current or 0) + 1

    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        own = build(Counting(connection, serde=allowing()))
        talk(own, "t")
        end, *rest = own.get_state_history(config("t"))
        fork = own.update_state(rest[2].config, {"parts": [7]})
        own.update_state(fork, {"messages": [HumanMessage("fork", id="f")]})
        own.update_state(end.config, {"parts": [8]}, as_node="ask")
        expected = shown([*own.get_state_history(config("t"))])

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(path), cp)
        assert report.ok, report.left
        assert await history(cp, "t") == expected


async def test_the_source_does_not_change(source: Path) -> None:
    """Its bytes are the same, and no file is added beside it."""
    before = source.read_bytes()
    files = sorted(source.parent.iterdir())

    async with open_checkpointer("memory://") as cp:
        await import_from(str(source), cp)

    assert source.read_bytes() == before
    assert sorted(source.parent.iterdir()) == files


async def test_pickled_and_damaged_values_are_left(source: Path) -> None:
    """They are counted by reason; other threads are imported."""
    with sqlite_saver(source) as saver:
        for name in ("pickled", "cipher", "damaged", "list", "metadata", "bytes"):
            talk(build(saver), name)

        for name, change in [
            ("pickled", "type = 'pickle'"),
            ("cipher", "type = 'msgpack+aes'"),
            ("damaged", "checkpoint = x'c1'"),
            ("list", "checkpoint = x'90'"),
            ("metadata", "metadata = 'no JSON'"),
            ("bytes", "metadata = x'ff'"),
        ]:
            saver.conn.execute(
                f"UPDATE checkpoints SET {change} WHERE thread_id = ?", (name,)
            )

        saver.conn.commit()

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(source), cp)

    assert report.counts("left") == 6
    assert report.counts("new") == 1
    assert sorted(reason[:20] for reason in report.left) == [
        "a checkpoint is dama",
        "a value is damaged: ",
        "pickled values are n",
        "the metadata is dama",
        "the metadata is dama",
        "values stored as 'ms",
    ]


def packed(**fields: Any) -> str:
    """Return the hex digits of a checkpoint that has these fields."""
    usual = {"id": "1", "channel_versions": {"a": 1}, "channel_values": {"a": 1}}
    return JsonPlusSerializer().dumps_typed({**usual, **fields})[1].hex()


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("checkpoints", "metadata = 'null'"),
        ("checkpoints", "metadata = 1.5"),
        ("checkpoints", f"metadata = '{'[' * 100_000}'"),
        ("checkpoints", f"checkpoint = x'{packed(v='new')}'"),
        ("checkpoints", f"checkpoint = x'{packed(channel_values=None)}'"),
        ("writes", "idx = 'x'"),
        ("writes", "idx = 1.5"),
    ],
)
async def test_values_of_other_types_are_left(
    table: str, change: str, source: Path
) -> None:
    """A damaged row ends the import of its thread, and of no other one."""
    with sqlite_saver(source) as saver:
        talk(build(saver), "other")
        saver.conn.execute(f"UPDATE {table} SET {change} WHERE rowid = 1")
        saver.conn.commit()

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(source), cp)

    assert (report.counts("left"), report.counts("new")) == (1, 1)


def test_a_damaged_index_does_not_fill_the_memory() -> None:
    """Replaced interrupts leave gaps, but never so many."""
    interrupts = ("__interrupt__", 1)
    assert _in_order({-3: interrupts, 2: ("c", 2)})[2:] == [("c", 2), interrupts]

    with pytest.raises(Differs):
        _in_order({-3: interrupts, 10**12: ("c", 2)})


@pytest.mark.long  # psycopg waits for two seconds at least
async def test_a_server_that_does_not_answer_is_a_bad_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The import ends by itself; it waited for more than two minutes."""
    monkeypatch.setattr(read, "_CONNECT_TIMEOUT", 2)

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql://me@127.0.0.1:{server.getsockname()[1]}/db"

        async with asyncio.timeout(20), open_checkpointer("memory://") as cp:
            with pytest.raises(BadSource, match="timeout"):
                await import_from(url, cp)


async def test_a_database_without_checkpoints_is_a_bad_source(postgres: str) -> None:
    """The error names what is missing, and hides the password."""
    async with open_checkpointer("memory://") as cp:
        with pytest.raises(BadSource, match="no tables of LangGraph"):
            await import_from(postgres, cp)

        with pytest.raises(BadSource) as caught:
            await import_from("postgresql://me:secret@127.0.0.1:1/db", cp)

    assert "127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)
