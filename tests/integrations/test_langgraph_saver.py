"""The calls of the saver to the store, its cache, and its stored records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    CheckpointTuple,
    empty_checkpoint,
)
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import INTERRUPT, RESUME

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    InvalidId,
    MemoryCheckpointer,
    WrongEventLoop,
    open_checkpointer,
)
from cpkit.integrations.langgraph import CheckpointSaver, Unsupported, store_thread_id
from cpkit.sync import SyncCheckpointer


class Recorder:
    """A store that reads ranges and counts its calls."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.appends: list[list[Any]] = []
        self.returned = 0
        self.fails = False

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        if self.fails:
            raise BackendUnavailable("recorder", "gone")

        self.appends.append(messages)
        version: int = await self.inner.append(thread_id, messages, **options)
        return version

    async def load(self, thread_id: str) -> Any:
        raise AssertionError("the thread was reloaded")

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> Any:
        found = await self.inner.read(thread_id, start, stop)
        self.returned += len(found)
        return found

    def __getattr__(self, name: str) -> Any:
        if name in ("list_threads", "delete_thread", "durability"):
            raise AttributeError(name)

        return getattr(self.inner, name)


class SixMethods:
    """A store without any optional ability."""

    def __init__(self, inner: Any) -> None:
        for name in (
            "load append save_extra record_issued record_result find_completed"
        ).split():
            setattr(self, name, getattr(inner, name))


def thread(thread_id: Any = "t", ns: str = "") -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ns}}


class Run:
    """A run that puts one checkpoint after the other."""

    def __init__(self, saver: CheckpointSaver, thread_id: Any = "t") -> None:
        self.saver = saver
        self.config = thread(thread_id)
        self.versions: ChannelVersions = {}

    async def put(self, /, **values: Any) -> RunnableConfig:
        """Put a checkpoint with these channels, which are all new."""
        new: ChannelVersions = {
            name: self.saver.get_next_version(str(self.versions.get(name, 0)), None)
            for name in values
        }
        self.versions |= new
        checkpoint = empty_checkpoint() | {
            "id": str(uuid6()),
            "channel_values": values,
            "channel_versions": dict(self.versions),
        }
        self.config = await self.saver.aput(
            self.config, checkpoint, {"source": "loop", "step": 1}, new
        )
        return self.config


@pytest.fixture
async def cp() -> AsyncIterator[MemoryCheckpointer[Any]]:
    async with MemoryCheckpointer[Any]() as opened:
        yield opened


async def found(saver: CheckpointSaver, config: RunnableConfig) -> CheckpointTuple:
    there = await saver.aget_tuple(config)
    assert there is not None
    return there


async def values(saver: CheckpointSaver, config: RunnableConfig) -> dict[str, Any]:
    return (await found(saver, config)).checkpoint["channel_values"]


# Writing


async def test_each_put_is_one_append(cp: MemoryCheckpointer[Any]) -> None:
    """It reads nothing."""
    recorder = Recorder(cp)
    saver = CheckpointSaver(recorder)
    config = await Run(saver).put(a=1, b=[1], c=None)
    await saver.aput_writes(config, [("a", 1), ("b", 2)], "task")
    await saver.aput_writes(config, [], "task")
    assert [len(messages) for messages in recorder.appends] == [1, 1]
    assert recorder.returned == 0


async def test_bytes_do_not_grow_with_the_list(cp: MemoryCheckpointer[Any]) -> None:
    """This holds for a saver of another process that has read the thread."""
    recorder = Recorder(cp)
    messages = [AIMessage("x" * 100, id=str(n)) for n in range(2000)]
    run = Run(CheckpointSaver(recorder))

    for length in range(10, 2000, 10):
        if length == 1000:
            run.saver = CheckpointSaver(recorder)
            await run.saver.aget_tuple(thread())

        await run.put(messages=messages[:length])

    sizes = [len(json.dumps(one)) for one in recorder.appends]
    assert max(sizes) < 1.3 * sizes[1]
    assert (await values(run.saver, thread()))["messages"] == messages[:1990]
    assert (await values(CheckpointSaver(cp), thread()))["messages"] == messages[:1990]


async def test_unchanged_channels_are_not_written_again(
    cp: MemoryCheckpointer[Any],
) -> None:
    """A value is stored once for each version."""
    recorder = Recorder(cp)
    saver = CheckpointSaver(recorder)
    run = Run(saver)
    await run.put(big={"text": "x" * 10_000}, small=1)
    checkpoint = (await found(saver, thread())).checkpoint
    version: ChannelVersions = {
        "small": saver.get_next_version(str(run.versions["small"]), None)
    }
    checkpoint["id"] = str(uuid6())
    checkpoint["channel_values"]["small"] = 2
    checkpoint["channel_versions"] |= version
    await saver.aput(run.config, checkpoint, {}, version)
    assert len(json.dumps(recorder.appends[-1])) < 2000
    assert await values(saver, thread()) == {"big": {"text": "x" * 10_000}, "small": 2}


async def test_an_item_changed_in_place_is_stored(cp: MemoryCheckpointer[Any]) -> None:
    """Items are compared by content, at any depth."""
    saver = CheckpointSaver(cp)
    run = Run(saver)
    messages = [
        AIMessage(f"long {n} " * 9, id=str(n), additional_kwargs={"deep": {"n": [n]}})
        for n in range(9)
    ]
    await run.put(messages=messages)
    messages[7].content = "changed"
    second = await run.put(messages=messages)
    messages[8].additional_kwargs["deep"]["n"].append("changed")
    await run.put(messages=messages)

    for reader in (saver, CheckpointSaver(cp)):
        last = (await values(reader, thread()))["messages"]
        assert last[7].content == "changed"
        assert last[8].additional_kwargs == {"deep": {"n": [8, "changed"]}}
        assert (await values(reader, second))["messages"][8].additional_kwargs == {
            "deep": {"n": [8]}
        }


async def test_a_result_is_a_copy(cp: MemoryCheckpointer[Any]) -> None:
    """Changing it changes neither stored data nor the next result."""
    saver = CheckpointSaver(cp)
    await Run(saver).put(messages=[{"a": [1]}, {"b": [2]}])
    first = await found(saver, thread())
    first.checkpoint["channel_values"]["messages"][0]["a"].append("changed")
    first.checkpoint["channel_versions"]["messages"] = "changed"
    second = await found(saver, thread())
    assert second.checkpoint["channel_values"]["messages"] == [{"a": [1]}, {"b": [2]}]
    assert second.checkpoint["channel_versions"]["messages"] != "changed"


async def test_no_record_builds_on_a_failed_put(cp: MemoryCheckpointer[Any]) -> None:
    """The next checkpoint is stored completely."""
    recorder = Recorder(cp)
    run = Run(CheckpointSaver(recorder))
    items = [str(n) * 9 for n in range(20)]
    await run.put(log=items[:10])
    recorder.fails = True

    with pytest.raises(BackendUnavailable):
        await run.put(log=items[:19])

    recorder.fails = False
    await run.put(log=items)
    assert (await values(CheckpointSaver(cp), thread()))["log"] == items


# Reading


async def test_only_new_records_are_read(cp: MemoryCheckpointer[Any]) -> None:
    """The last known record is read too, to detect a deleted thread."""
    recorder = Recorder(cp)
    reader = CheckpointSaver(recorder)
    run = Run(CheckpointSaver(cp))

    for n in range(50):
        await run.put(n=n)

    await reader.aget_tuple(thread())
    assert recorder.returned == 50

    for _ in range(3):
        await reader.aget_tuple(thread())

    assert recorder.returned == 53
    await run.put(n=50)
    assert await values(reader, thread()) == {"n": 50}
    assert recorder.returned == 55
    assert len([one async for one in reader.alist(thread())]) == 51
    assert recorder.returned == 56


async def test_the_threads_used_last_are_cached(cp: MemoryCheckpointer[Any]) -> None:
    """Other threads are read again, with the same result."""
    recorder = Recorder(cp)
    saver = CheckpointSaver(recorder, cached_threads=2)
    runs = [Run(saver, n) for n in range(3)]

    for turn in range(1, 4):
        for n, run in enumerate(runs):
            assert (await saver.aget_tuple(thread(n)) is None) == (turn == 1)
            await run.put(log=[str(n)] * turn)
            assert await values(saver, thread(n)) == {"log": [str(n)] * turn}

    before = recorder.returned
    await saver.aget_tuple(thread(2))
    assert recorder.returned == before + 1
    await saver.aget_tuple(thread(0))
    assert recorder.returned == before + 4

    with pytest.raises(ValueError, match="at least 1"):
        CheckpointSaver(cp, cached_threads=0)


async def test_six_methods_are_enough(cp: MemoryCheckpointer[Any]) -> None:
    """A graph runs; methods that need more raise Unsupported."""
    six: Any = SixMethods(cp)
    saver = CheckpointSaver(six)
    run = Run(saver)
    await run.put(log=["a", "b"])
    await run.put(log=["a", "b", "c"])
    assert await values(saver, thread()) == {"log": ["a", "b", "c"]}
    assert len([one async for one in saver.alist(thread())]) == 2
    await saver.acopy_thread("t", "u")
    await saver.aprune(["u"])
    assert len([one async for one in saver.alist(thread("u"))]) == 1

    with pytest.raises(Unsupported, match="delete_thread"):
        await saver.adelete_thread("t")

    with pytest.raises(NotImplementedError, match="list_threads"):
        await saver.adelete_for_runs(["run"])

    with pytest.raises(Unsupported, match="list_threads"):
        [one async for one in saver.alist(None)]


# Writes


async def test_a_write_may_be_stored_before_its_checkpoint(
    cp: MemoryCheckpointer[Any],
) -> None:
    """It is pending as soon as the checkpoint is stored."""
    saver = CheckpointSaver(cp)
    checkpoint = empty_checkpoint()
    config = thread()
    early = {**config["configurable"], "checkpoint_id": checkpoint["id"]}
    await saver.aput_writes({"configurable": early}, [("ch", 1)], "task")
    assert await saver.aget_tuple(config) is None
    await saver.aput(config, checkpoint, {}, {})
    assert (await found(saver, config)).pending_writes == [("task", "ch", 1)]


async def test_a_task_writes_once(url: str) -> None:
    """The first write counts; an interrupt or a resumption is replaced."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        first, second = CheckpointSaver(one), CheckpointSaver(two)
        config = await Run(first).put(a=1)
        assert await second.aget_tuple(config) is not None
        await first.aput_writes(config, [("ch", "first"), (RESUME, 1)], "task", "b")
        await second.aput_writes(config, [("ch", "late"), (RESUME, 2)], "task", "b")
        await second.aput_writes(config, [("x", 0), (INTERRUPT, "why")], "other", "a")

        for saver in (first, second):
            assert (await found(saver, config)).pending_writes == [
                ("other", INTERRUPT, "why"),
                ("other", "x", 0),
                ("task", RESUME, 2),
                ("task", "ch", "first"),
            ]


# Several savers


async def test_two_savers_take_turns(url: str) -> None:
    """Each builds on lists of the other."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        savers = [CheckpointSaver(one), CheckpointSaver(two)]
        log: list[str] = []
        run = Run(savers[0])

        for turn in range(12):
            run.saver = savers[turn % 2]

            if log:
                assert await values(run.saver, thread()) == {"log": log}

            log.append(f"turn {turn}")
            await run.put(log=log)

        for saver in savers:
            history = [one.checkpoint async for one in saver.alist(thread())]
            assert [one["channel_values"]["log"] for one in history] == [
                log[:turn] for turn in range(12, 0, -1)
            ]


async def test_concurrent_puts_are_all_stored(url: str) -> None:
    """They are of one saver or several, each with its own known lists."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        runs = [Run(CheckpointSaver(cp)) for cp in (one, one, two, two)]
        base = [f"base {n}" for n in range(9)]
        start = await runs[0].put(log=base)

        async def go(number: int, run: Run) -> list[RunnableConfig]:
            run.config = start
            run.versions = {"log": 1}
            await run.saver.aget_tuple(start)
            log = [*base]
            configs = []

            for turn in range(5):
                log.append(f"{number} {turn}")
                configs.append(await run.put(log=log))

            return configs

        forks = await asyncio.gather(*(go(*each) for each in enumerate(runs)))

        for saver in (runs[0].saver, runs[3].saver):
            for number, configs in enumerate(forks):
                for turn, config in enumerate(configs):
                    log = [*base, *(f"{number} {n}" for n in range(turn + 1))]
                    assert await values(saver, config) == {"log": log}


# Deleted threads


@pytest.fixture
async def pair(url: str) -> AsyncIterator[tuple[CheckpointSaver, CheckpointSaver]]:
    """Two savers on one store; the first has read a thread of five records."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        first, second = CheckpointSaver(one), CheckpointSaver(two)
        run = Run(first)

        for n in range(5):
            await run.put(log=["old"] * (n + 1), other="old")

        assert await values(first, thread()) == {"log": ["old"] * 5, "other": "old"}
        yield first, second


@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 9])
async def test_a_deleted_thread_is_forgotten(
    pair: tuple[CheckpointSaver, CheckpointSaver], length: int
) -> None:
    """The new thread may be longer than the old one."""
    first, second = pair
    await second.adelete_thread("t")
    run = Run(second)

    for n in range(length):
        await run.put(log=["new"] * (n + 1))

    assert len([one async for one in first.alist(thread())]) == length

    if length:
        assert await values(first, thread()) == {"log": ["new"] * length}
    else:
        assert await first.aget_tuple(thread()) is None


async def test_concurrent_readers_detect_a_deletion(
    pair: tuple[CheckpointSaver, CheckpointSaver],
) -> None:
    """One reader detects it, and those that waited use its result."""
    first, second = pair
    await second.adelete_thread("t")
    new = await Run(second).put(log=["new"])
    found = await asyncio.gather(*(first.aget_tuple(thread()) for _ in range(9)))
    assert found == [await second.aget_tuple(new)] * 9


async def test_a_run_continues_after_its_thread_is_deleted(
    pair: tuple[CheckpointSaver, CheckpointSaver],
) -> None:
    """Its next checkpoint is stored completely."""
    first, second = pair
    run = Run(first)
    checkpoint = (await found(first, thread())).checkpoint
    await second.adelete_thread("t")
    log = checkpoint["channel_values"]["log"] = ["old"] * 5 + ["more"]
    version = first.get_next_version(None, None)
    checkpoint["channel_versions"]["log"] = version
    await first.aput(run.config, checkpoint, {}, {"log": version})

    for saver in (first, second):
        assert await values(saver, thread()) == {"log": log, "other": "old"}


async def test_a_record_for_a_deleted_thread_is_ignored(
    pair: tuple[CheckpointSaver, CheckpointSaver],
) -> None:
    """The new thread is longer than the writer's copy of the old one."""
    first, second = pair
    await second.adelete_thread("t")
    new = Run(second)

    for n in range(6):
        await new.put(log=["new"] * (n + 1))

    late = await Run(first).put(log=["old"] * 6)
    await first.aput_writes(new.config, [("ch", "late")], "task")

    for saver in (first, second):
        assert await values(saver, thread()) == {"log": ["new"] * 6}
        assert await saver.aget_tuple(late) is None
        assert (await found(saver, thread())).pending_writes == []

    # The saver has read the new thread, and writes into it.
    await Run(first).put(log=["new"] * 7)
    assert await values(second, thread()) == {"log": ["new"] * 7}


async def test_no_record_builds_on_a_record_that_was_never_read(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The thread may be deleted between the write and the first read."""
    first, second = CheckpointSaver(cp), CheckpointSaver(cp)
    log = [str(n) * 9 for n in range(10)]
    await Run(first).put(log=log[:9])
    await second.adelete_thread("t")
    new = Run(second)

    for n in range(3):
        await new.put(other=n)

    assert await values(first, thread()) == {"other": 2}
    last = await Run(first).put(log=log)
    assert await values(second, last) == {"log": log}


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
    await Run(saver).put(n=1)
    store_id = store_thread_id("t")
    (record,) = await cp.read(store_id)
    record["values"]["n"]["data"][0] = "pickle"
    await cp.delete_thread(store_id)
    await cp.append(store_id, [record])

    with pytest.raises(NotImplementedError, match="pickle"):
        await CheckpointSaver(cp).aget_tuple(thread())


async def test_types_are_allowed_by_name(cp: MemoryCheckpointer[Any]) -> None:
    """A type that is not allowed is loaded as plain data."""
    from tests.integrations.langgraph_types import Plan

    await Run(CheckpointSaver(cp)).put(plan=Plan("go"))
    assert await values(CheckpointSaver(cp), thread()) == {"plan": {"text": "go"}}
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


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"type": "checkpoint", "id": "1", "first": None},
        {"type": "later", "id": "1", "first": None},
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
