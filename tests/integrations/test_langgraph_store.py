"""LangGraph's long-term memory, beside its own store in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.config import get_store
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.store.base import (
    GetOp,
    InvalidNamespaceError,
    Item,
    ListNamespacesOp,
    MatchCondition,
    PutOp,
    SearchOp,
)
from langgraph.store.memory import InMemoryStore

from cpkit import InvalidId, MemoryCheckpointer, open_checkpointer
from cpkit.integrations.langgraph_store import MemoryStore, item_thread
from cpkit.sync import SyncCheckpointer
from tests.sweeps import sweep

parts = st.sampled_from(["a", "b", "a/b", "é", "%", ":"])
namespaces = st.lists(parts, min_size=1, max_size=3).map(tuple)
keys = st.sampled_from(["k", "K", "k/1", ":", ""])
data = st.dictionaries(
    st.sampled_from(["n", "tag"]),
    st.integers(-3, 3)
    | st.booleans()
    | st.dictionaries(st.just("n"), st.integers(0, 2)),
)
numbers = st.sampled_from(["$eq", "$ne"]) | st.just("$eq")
filters = st.none() | st.dictionaries(
    st.sampled_from(["n", "tag"]),
    st.integers(-3, 3) | st.dictionaries(numbers, st.integers(-3, 3), min_size=1),
    max_size=2,
)
patterns = st.lists(parts | st.just("*"), min_size=1, max_size=2).map(tuple)
conditions = st.builds(MatchCondition, st.sampled_from(["prefix", "suffix"]), patterns)
operations = st.one_of(
    st.builds(PutOp, namespaces, keys, data | st.none()),
    st.builds(GetOp, namespaces, keys),
    st.builds(
        SearchOp,
        st.lists(parts, max_size=2).map(tuple),
        filters,
        st.just(1000),
        st.just(0),
    ),
)
# Alone: the store in memory lists the namespaces that an operation before it asked for.
listings = st.builds(
    ListNamespacesOp,
    st.none() | st.lists(conditions, max_size=2).map(tuple),
    st.none() | st.integers(1, 3),
    st.just(1000),
    st.just(0),
)
batches = st.lists(operations, min_size=1, max_size=3) | listings.map(lambda op: [op])


def shown(result: Any) -> Any:
    """Return a result without times, and a search without its order."""
    if isinstance(result, Item):
        return result.namespace, result.key, result.value

    if isinstance(result, list) and result and isinstance(result[0], Item):
        return sorted(map(shown, result), key=repr)

    return result


def without_empty(store: InMemoryStore) -> None:
    """Forget namespaces without items, which only the store in memory lists."""
    for namespace in [name for name, items in store._data.items() if not items]:
        del store._data[namespace]


@pytest.mark.parametrize("examples", sweep([10, 50], [10]))
def test_it_behaves_as_langgraphs_own_store(examples: int) -> None:
    """Random batches of all operations give the same results."""

    async def play(batches: list[list[Any]]) -> None:
        async with MemoryCheckpointer[Any]() as cp:
            ours, theirs = MemoryStore(cp), InMemoryStore()

            for ops in batches:
                found = await ours.abatch(ops)
                without_empty(theirs)
                assert [*map(shown, found)] == [*map(shown, theirs.batch(ops))]

    @given(st.lists(batches, max_size=15))
    @settings(max_examples=examples)
    def check(batches: list[list[Any]]) -> None:
        asyncio.run(play(batches))

    check()


async def test_items_outlive_the_handle(url: str) -> None:
    """They keep when they were made first; a search is cut as it is asked for."""
    async with open_checkpointer(url) as cp:
        store = MemoryStore(cp)

        for n in range(5):
            await store.aput(("users", "u1"), f"k{n}", {"n": n})

        first: Any = await store.aget(("users", "u1"), "k0")

    async with open_checkpointer(url) as cp:
        store = MemoryStore(cp)
        await store.aput(("users", "u1"), "k0", {"n": 10})
        again: Any = await store.aget(("users", "u1"), "k0")
        assert (again.created_at, again.value) == (first.created_at, {"n": 10})
        assert again.updated_at > first.updated_at
        found = await store.asearch(("users",), filter={"n": {"$lt": 4}}, limit=2)
        assert [one.key for one in found] == ["k1", "k2"]
        found = await store.asearch((), query="any", limit=2, offset=3)
        assert [(one.key, one.score) for one in found] == [("k3", None), ("k4", None)]
        await store.adelete(("users", "u1"), "k0")
        assert await store.aget(("users", "u1"), "k0") is None
        assert await store.alist_namespaces(prefix=("users",)) == [("users", "u1")]
        await cp.append("cpkit:langgraph-store:users/other", [{"a": 1}])
        assert len(await store.asearch(("users",))) == 4


async def test_what_it_does_not_take_is_an_error(cp: MemoryCheckpointer[Any]) -> None:
    """Times to live, labels with a period, ids too long, and unknown operators."""
    store = MemoryStore(cp)

    with pytest.raises(NotImplementedError):
        await store.aput(("a",), "k", {}, ttl=1.0)

    with pytest.raises(InvalidNamespaceError):
        await store.abatch([GetOp(("a.b",), "k")])

    with pytest.raises(InvalidId):
        await store.aput(("a",), "k" * 500, {})

    await store.aput(("a",), "k", {"n": 1})

    with pytest.raises(ValueError, match="operator"):
        await store.asearch(("a",), filter={"n": {"$in": 1}})

    assert item_thread(("a", "b/c"), "d") == "cpkit:langgraph-store:a/b%2Fc/:d"


def test_a_graph_uses_it() -> None:
    """As ``store=``, with a store that has its own loop."""

    def remember(state: MessagesState) -> Any:
        store = get_store()
        store.put(("facts",), "name", {"text": state["messages"][-1].content})
        return {}

    builder = StateGraph(MessagesState)
    builder.add_node("remember", remember)
    builder.add_edge(START, "remember")
    builder.add_edge("remember", END)

    with SyncCheckpointer[Any]("memory://") as cp:
        store = MemoryStore(cp)
        asked: Any = {"messages": ["Ann"]}
        builder.compile(store=store).invoke(asked)
        (fact,) = store.search(("facts",))
        assert fact.value == {"text": "Ann"}
