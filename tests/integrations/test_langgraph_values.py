"""Ids and values in the store."""

from __future__ import annotations

import json
import random
import sys
import tracemalloc
from typing import Any

import pytest
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from pydantic import SecretStr

from cpkit import (
    CorruptThread,
    InvalidId,
    MemoryCheckpointer,
    open_checkpointer,
)
from cpkit.integrations.langgraph import (
    CheckpointSaver,
    TypeRefused,
    store_thread_id,
)
from cpkit.integrations.langgraph.values import Value, blobs_of, packed
from tests.integrations import langgraph_types as types
from tests.integrations.langgraph_runs import Run, found, thread, values

# Ids

HOSTILE = [
    "t",
    "T",
    "",
    " ",
    "../t",
    "*",
    "%",
    "a:b",
    "a",
    "a\0b",
    "\0",
    "é",
    "e\u0301",
    "x" * 512,
    "x" * 513,
    "x" * 5000,
    "cpkit:langgraph:t",
    store_thread_id("x" * 513),
    "'; drop table messages; --",
]


async def test_different_ids_use_different_threads(url: str) -> None:
    """Threads and namespaces with unusual ids are found again."""
    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        await cp.append("t", [{"not": "ours"}])

        for n, thread_id in enumerate(HOSTILE):
            assert await saver.aget_tuple(thread(thread_id)) is None
            await Run(saver, thread_id).put(n=n)
            inner = Run(saver)
            inner.config = thread(thread_id, thread_id + "|:")
            await inner.put(n=-n)

        for reader in (saver, CheckpointSaver(cp)):
            for n, thread_id in enumerate(HOSTILE):
                assert await values(reader, thread(thread_id)) == {"n": n}
                ns = thread_id + "|:"
                assert await values(reader, thread(thread_id, ns)) == {"n": -n}

        listed = [one.config["configurable"] async for one in saver.alist(None)]
        assert {one["thread_id"] for one in listed} == set(HOSTILE)
        assert len(listed) == 2 * len(HOSTILE)
        assert len([one async for one in saver.alist(None, limit=3)]) == 3
        await saver.acopy_thread("t", "y" * 600)
        await saver.adelete_thread("x" * 513)
        left = {
            one.config["configurable"]["thread_id"] async for one in saver.alist(None)
        }
        assert left == {*HOSTILE, "y" * 600} - {"x" * 513}
        assert await cp.load("t") is not None


@pytest.mark.parametrize("size", [1, 5000])
async def test_half_an_emoji_is_kept(url: str, size: int) -> None:
    """A text that a node cut in two is stored as it is, in values and in names."""
    half = "\ud83d" * size

    async with open_checkpointer(url) as cp:
        run = Run(CheckpointSaver(cp))
        config = await run.put(**{"half": half, "name \ud83d": [1]})
        await run.saver.aput_writes(config, [("half", half)], "task")
        there = await found(CheckpointSaver(cp), config)
        assert there.checkpoint["channel_values"] == {"half": half, "name \ud83d": [1]}
        assert there.pending_writes == [("task", "half", half)]


async def test_an_id_that_no_store_takes_is_refused(
    cp: MemoryCheckpointer[Any],
) -> None:
    """A lone surrogate is refused; a number is converted to text."""
    saver = CheckpointSaver(cp)

    with pytest.raises(InvalidId):
        await Run(saver, "\ud800").put(n=1)

    await Run(saver, 7).put(n=7)
    assert await values(saver, thread("7")) == {"n": 7}


async def test_a_copy_onto_itself_changes_nothing(cp: MemoryCheckpointer[Any]) -> None:
    """A copy to another thread continues independently."""
    saver = CheckpointSaver(cp)
    await Run(saver).put(log=["a"] * 9)
    await saver.acopy_thread("t", "t")
    await saver.acopy_thread("t", "u")
    await saver.aget_tuple(thread("u"))
    await Run(saver, "u").put(log=["a"] * 10)
    assert len([one async for one in saver.alist(thread())]) == 1
    await saver.adelete_thread("t")
    assert await values(CheckpointSaver(cp), thread("u")) == {"log": ["a"] * 10}


@pytest.mark.parametrize(("byte", "packing"), [(b"\xff", "base64"), (b"a", "latin-1")])
def test_a_large_value_is_read_with_few_copies(byte: bytes, packing: str) -> None:
    """Beside its stored texts: its bytes, and their parts until they are joined."""
    size, serde = 5 * 1024 * 1024, JsonPlusSerializer()
    kind, data = serde.dumps_typed(byte * size)
    found, text = packed(data)
    assert found == packing
    value = Value(packing, kind, [blob["text"] for blob in blobs_of(text)])
    tracemalloc.start()

    try:
        loaded = value.load(serde)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert loaded == byte * size
    assert peak < 2.8 * size


@pytest.mark.parametrize("last", [1, 3, 99])
async def test_a_cheap_fork_has_the_newest_checkpoints(url: str, last: int) -> None:
    """Of each namespace, with their writes; the oldest one has no parent."""
    large = "x" * 20_000

    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        source, inner = Run(saver), Run(saver)
        inner.config = thread("t", "inner")

        for n in range(12):
            config = await source.put(log=[f"{m}" for m in range(n)], text=large, n=n)
            await saver.aput_writes(config, [("log", [n]), ("text", large)], "task")
            await saver.aput_writes(config, [("__error__", "no")], "task", "path")
            await inner.put(n=-n)

        await saver.acopy_thread("t", "fork", last=last)

        for reader in (saver, CheckpointSaver(cp)):
            for ns in ("", "inner"):
                theirs = [one async for one in reader.alist(thread("t", ns))][:last]
                ours = [one async for one in reader.alist(thread("fork", ns))]
                assert [one.checkpoint for one in ours] == [
                    one.checkpoint for one in theirs
                ]
                assert [one.metadata for one in ours] == [
                    one.metadata for one in theirs
                ]
                assert [one.pending_writes for one in ours] == [
                    one.pending_writes for one in theirs
                ]
                assert ours[-1].parent_config is None
                assert all(one.parent_config for one in ours[:-1])

        if last == 1:
            sizes = [await cp.read(store_thread_id(one)) for one in ("t", "fork")]
            assert len(sizes[1]) < len(sizes[0]) / 8

        source.config = thread("fork")
        source.config = (await found(saver, source.config)).config
        await source.put(n=100)
        assert (await values(CheckpointSaver(cp), thread("fork")))["n"] == 100
        assert (await values(CheckpointSaver(cp), thread()))["n"] == 11


async def test_a_cheap_fork_of_nothing_is_nothing(cp: MemoryCheckpointer[Any]) -> None:
    """And one onto itself changes nothing."""
    saver = CheckpointSaver(cp)
    await saver.acopy_thread("t", "fork", last=1)
    assert await saver.aget_tuple(thread("fork")) is None
    await Run(saver).put(n=1)
    await saver.acopy_thread("t", "t", last=1)
    assert len(await cp.read(store_thread_id("t"))) == 1

    with pytest.raises(ValueError, match="last"):
        await saver.acopy_thread("t", "fork", last=0)


async def test_a_copy_goes_part_by_part() -> None:
    """It may be larger than an append, and stands behind what the target has."""
    size = 1024 * 1024

    async with MemoryCheckpointer[Any](max_append=size + 10_000) as cp:
        saver = CheckpointSaver(cp)
        source, target = Run(saver, "source"), Run(saver, "target")
        texts = [f"{n}" * size for n in range(4)]

        for text in texts:
            await source.put(text=text, n=0)

        for n in range(9):
            await source.put(n=n)

        await target.put(other=1)
        await saver.acopy_thread("source", "target")
        sizes = [
            len(json.dumps(await cp.read(store_thread_id(name))))
            for name in ("source", "target")
        ]
        assert sizes[1] < sizes[0] + 1000
        last = await saver.aget_tuple(thread("target"))
        assert last is not None
        assert last.checkpoint["channel_values"] == {"text": texts[-1], "n": 8}
        listed = [one async for one in CheckpointSaver(cp).alist(thread("target"))]
        found = [one.checkpoint["channel_values"] for one in listed]
        assert [one["text"] for one in found[8:-1]] == [texts[3], *texts[::-1]]
        assert found[-1] == {"other": 1}


# Stored values


class Own:
    """A type of the application that pickle could store."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)


async def test_nothing_is_pickled(cp: MemoryCheckpointer[Any]) -> None:
    """A value that the serializer cannot store is refused."""
    saver = CheckpointSaver(cp)

    for value in (Own(), [Own()]):
        with pytest.raises(TypeError):
            await Run(saver).put(own=value)

    assert await cp.list_threads() == []
    pickling = JsonPlusSerializer(pickle_fallback=True)

    for serde in (pickling, EncryptedSerializer(_Xor(), pickling)):
        with pytest.raises(ValueError, match="pickle"):
            CheckpointSaver(cp, serde=serde)


async def test_a_stored_pickle_is_not_loaded(cp: MemoryCheckpointer[Any]) -> None:
    """Another program may have stored it."""
    saver = CheckpointSaver(cp)
    await Run(saver).put(n=[1])
    store_id = store_thread_id("t")
    (record,) = await cp.read(store_id)
    record["values"]["n"][1] = "pickle"
    await cp.delete_thread(store_id)
    await cp.append(store_id, [record])

    with pytest.raises(NotImplementedError, match="pickle"):
        await CheckpointSaver(cp).aget_tuple(thread())


async def test_a_graph_keeps_its_typed_state(url: str) -> None:
    """A model, a dataclass, an enum and a named tuple are loaded as such."""
    builder = StateGraph(types.State)
    builder.add_node("think", types.think)
    builder.add_edge(START, "think")
    builder.add_edge("think", END)

    for turn in (1, 2):
        async with open_checkpointer(url) as cp:
            graph: Any = builder.compile(checkpointer=CheckpointSaver(cp))
            await graph.ainvoke({} if turn > 1 else types.FIRST, thread())
            state = (await graph.aget_state(thread())).values
            assert state == {**types.FIRST, "turns": turn}
            assert [type(one) for one in state.values()] == [
                type(one) for one in types.FIRST.values()
            ]


async def test_a_value_of_a_derived_class_is_loaded(
    cp: MemoryCheckpointer[Any],
) -> None:
    """As with LangGraph's own savers; asyncpg, for instance, returns its own UUIDs."""
    given = {
        "tags": types.Tags({"a"}),
        "id": types.Id(int=7),
        "price": types.Price("1.10"),
        "secret": SecretStr("x"),
    }
    await Run(CheckpointSaver(cp)).put(**given)
    assert await values(CheckpointSaver(cp), thread()) == given


async def test_a_type_that_is_not_imported_is_refused(
    cp: MemoryCheckpointer[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The error says how to allow it; nothing is imported."""
    await Run(CheckpointSaver(cp)).put(plan=types.Plan("go"))
    name = types.__name__

    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, name)

        with pytest.raises(TypeRefused, match=r"Plan is not allowed: import"):
            await values(CheckpointSaver(cp), thread())

        assert name not in sys.modules

    await Run(CheckpointSaver(cp), "u").put(call=types.Callable())

    with pytest.raises(TypeRefused, match="Callable"):
        await values(CheckpointSaver(cp), thread("u"))

    assert types.called == []
    assert caplog.records == []


async def test_strict_mode_loads_allowed_types_only(
    cp: MemoryCheckpointer[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LangGraph's setting leaves the types that the graph or the caller allows."""
    Plan = types.Plan
    await Run(CheckpointSaver(cp)).put(plan=Plan("go"))
    monkeypatch.setenv("LANGGRAPH_STRICT_MSGPACK", "true")

    with pytest.raises(TypeRefused):
        await values(CheckpointSaver(cp), thread())

    allowing = JsonPlusSerializer(allowed_msgpack_modules=[Plan])

    for saver in (
        CheckpointSaver(cp, serde=allowing),
        CheckpointSaver(cp).with_allowlist([(Plan.__module__, "Plan")]),
    ):
        there = await saver.aget_tuple(thread())
        assert there is not None
        assert there.checkpoint["channel_values"] == {"plan": Plan("go")}


class _Xor:
    """A toy cipher."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "xor", bytes(byte ^ 1 for byte in plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return bytes(byte ^ 1 for byte in ciphertext)


async def test_values_can_be_encrypted(cp: MemoryCheckpointer[Any]) -> None:
    """LangGraph's EncryptedSerializer works, also for growing lists."""
    saver = CheckpointSaver(cp, serde=EncryptedSerializer(_Xor()))
    run = Run(saver)
    await run.put(log=["secret"] * 9)
    await run.put(log=["secret"] * 10)
    assert await values(saver, thread()) == {"log": ["secret"] * 10}


class _Secret(JsonPlusSerializer):
    """A program's own serializer, derived from LangGraph's, that encrypts."""

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        kind, data = super().dumps_typed(obj)
        return f"xor-{kind}", _Xor().encrypt(data)[1]

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        plain = _Xor().decrypt("xor", data[1])
        return super().loads_typed((data[0].removeprefix("xor-"), plain))


async def test_a_derived_serializer_sees_every_value(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Small values, too, are stored as it says, and never as plain JSON."""
    saver = CheckpointSaver(cp, serde=_Secret(pickle_fallback=False))
    await Run(saver).put(password="hunter2", n=1, log=["hunter2"])
    assert await values(saver, thread()) == {
        "password": "hunter2",
        "n": 1,
        "log": ["hunter2"],
    }
    data = await cp.load(store_thread_id("t"))
    assert data is not None
    assert "hunter2" not in repr(data.messages)


@pytest.mark.parametrize(
    "text",
    [
        "plain " * 200,
        "long " * 2000,
        "ünïcödé " * 200,
        "漢字" * 300,
        "\0\1\2" * 300,
        '"\\\n' * 300,
        bytes(range(256)) * 4,
        random.Random(0).randbytes(2000),
        "",
    ],
)
async def test_text_and_bytes_are_loaded_exactly(url: str, text: str | bytes) -> None:
    """Small texts are plain JSON, mostly ASCII data is text, and other is base64."""
    state = {"one": text, "some": [text, {"deep": (text,)}], "many": [text] * 9}

    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        config = await Run(saver).put(**state)
        await saver.aput_writes(config, [*state.items()], "task")
        there = await CheckpointSaver(cp).aget_tuple(config)
        assert there is not None
        assert there.checkpoint["channel_values"]["one"] == text
        assert there.checkpoint["channel_values"]["some"][0] == text
        assert [write[2] for write in there.pending_writes or ()][0] == text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"type": "checkpoint", "ns": "", "size": 0},
        {"type": "writes", "ns": "", "size": 0, "checkpoint_id": "1"},
        {"type": "later", "size": 0},
    ],
)
async def test_a_foreign_message_is_an_error(
    cp: MemoryCheckpointer[Any], message: dict[str, Any]
) -> None:
    """The error names the thread and the position."""
    saver = CheckpointSaver(cp)
    await Run(saver).put(n=1)
    await cp.append(store_thread_id("t"), [message])

    for _ in range(2):
        with pytest.raises(CorruptThread, match="message 1"):
            await saver.aget_tuple(thread())
