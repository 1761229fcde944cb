"""The calls of the saver to the store, and its cache."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    Checkpoint,
    empty_checkpoint,
)
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.serde.types import INTERRUPT, RESUME

from cpkit import (
    BackendUnavailable,
    MemoryCheckpointer,
    SerializationError,
    open_checkpointer,
)
from cpkit.integrations.langgraph import (
    CheckpointSaver,
    Unsupported,
    store_thread_id,
)
from cpkit.integrations.langgraph.thread import Thread
from tests.integrations.langgraph_runs import Run, found, thread, values
from tests.sessions.spy import RangeSpy


class Recorder:
    """A store that reads ranges and counts its calls."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.appends: list[list[Any]] = []
        self.reads = 0
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
        self.reads += 1
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


async def test_concurrent_writes_are_one_append(cp: MemoryCheckpointer[Any]) -> None:
    """So are the writes of parallel tasks and the checkpoint that follows them."""
    recorder = Recorder(cp)
    run = Run(CheckpointSaver(recorder))
    config = await run.put(n=1)
    await asyncio.gather(
        *(run.saver.aput_writes(config, [("n", n)], f"task {n}") for n in range(3)),
        run.put(n=2),
    )
    assert [len(messages) for messages in recorder.appends] == [1, 4]
    writes = (await found(run.saver, config)).pending_writes
    assert writes == [(f"task {n}", "n", n) for n in range(3)]
    assert await values(CheckpointSaver(cp), thread()) == {"n": 2}


async def test_a_refused_write_leaves_the_others(cp: MemoryCheckpointer[Any]) -> None:
    """They are of one append; what refers to the refused write is stored completely."""

    class Refusing(Recorder):
        async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
            if any(one.get("task_id") == "refused" for one in messages):
                raise SerializationError((), "refused")

            return await super().append(thread_id, messages, **options)

    run = Run(CheckpointSaver(Refusing(cp)))
    plan = {"text": "x" * 1000}
    config = await run.put(n=1)
    refused, *others = await asyncio.gather(
        run.saver.aput_writes(config, [("plan", plan)], "refused"),
        run.saver.aput_writes(config, [("n", 2)], "task"),
        run.put(plan=plan),
        return_exceptions=True,
    )
    assert isinstance(refused, SerializationError)
    assert others == [None, run.config]
    assert (await found(run.saver, config)).pending_writes == [("task", "n", 2)]
    assert await values(CheckpointSaver(cp), thread()) == {"n": 1, "plan": plan}


async def test_an_error_after_the_append_reaches_the_caller(
    cp: MemoryCheckpointer[Any],
) -> None:
    """It is not taken for a cancellation, and the next put goes on."""
    run = Run(CheckpointSaver(cp))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Thread, "add_own", _fail)

        with pytest.raises(RuntimeError, match="broken"):
            await run.put(n=1)

    await run.put(n=2)
    assert await values(run.saver, thread()) == {"n": 2}


def _fail(*_: object) -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize("together", [True, False])
async def test_a_value_that_a_task_wrote_is_stored_once(
    cp: MemoryCheckpointer[Any], together: bool
) -> None:
    """The checkpoint refers to the write, also from a full checkpoint."""
    recorder = Recorder(cp)
    run = Run(CheckpointSaver(recorder))
    config = await run.put(plan={"text": ""}, log=["x" * 500] * 9)

    for n in range(30):
        plan, log = {"text": f"{n} " * 1000}, [str(n) * 500] * 9
        writes = run.saver.aput_writes(config, [("plan", plan), ("log", log)], "task")

        if together:
            _, config = await asyncio.gather(writes, run.put(plan=plan, log=log))
        else:
            await writes
            config = await run.put(plan=plan, log=log)

    last = recorder.appends[-1][-1]
    assert "needs" in last
    assert len(json.dumps(last)) < 1000
    assert len(json.dumps(recorder.appends)) < 40 * (len(json.dumps([plan, log])))
    reader = Recorder(cp)
    assert await values(CheckpointSaver(reader), thread()) == {"plan": plan, "log": log}
    assert reader.returned <= 6
    listed = [one async for one in CheckpointSaver(cp).alist(thread())]
    texts = [one.checkpoint["channel_values"]["plan"]["text"] for one in listed]
    assert texts == [*(f"{n} " * 1000 for n in range(29, -1, -1)), ""]


async def test_a_cancelled_put_is_ordered_before_the_next_read(url: str) -> None:
    """The next read of the saver waits for it, and later reads return the same."""
    async with open_checkpointer(url) as cp:
        run = Run(CheckpointSaver(cp))
        await run.put(n=0)

        for turns in range(12):
            put = asyncio.create_task(run.put(n=turns + 1))

            for _ in range(turns):
                await asyncio.sleep(0)

            put.cancel()
            await asyncio.wait([put])
            seen = await values(run.saver, thread())
            assert await values(CheckpointSaver(cp), thread()) == seen


async def test_bytes_grow_with_the_new_items(cp: MemoryCheckpointer[Any]) -> None:
    """Now and then the list is stored completely. Another process may go on."""
    recorder = Recorder(cp)
    messages = [AIMessage("x" * 100, id=str(n)) for n in range(2000)]
    run = Run(CheckpointSaver(recorder))

    for length in range(10, 2000, 10):
        if length == 1000:
            run.saver = CheckpointSaver(recorder)
            await run.saver.aget_tuple(thread())

        await run.put(messages=messages[:length])

    sizes = [len(json.dumps(one)) for one in recorder.appends]
    assert sum(sizes) < 3 * sizes[1] * len(sizes)
    assert (await values(run.saver, thread()))["messages"] == messages[:1990]
    assert (await values(CheckpointSaver(cp), thread()))["messages"] == messages[:1990]


async def test_a_first_read_is_two_reads_however_far_the_values_are(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The newest checkpoint says how far back the last full one is."""
    run = Run(CheckpointSaver(cp))
    rng = random.Random(1)
    messages = [AIMessage(rng.randbytes(2000).hex(), id=str(n)) for n in range(60)]

    for length in range(30, 60):
        await run.put(messages=messages[:length])

    records = await cp.read(store_thread_id("t"))
    full = max(n for n, one in enumerate(records) if "newest" in one)
    distance = len(records) - full
    assert distance > 8
    recorder = Recorder(cp)
    saver = CheckpointSaver(recorder)
    assert (await values(saver, thread()))["messages"] == messages[:59]
    assert recorder.reads == 2
    assert recorder.returned <= distance + 10


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
    # Those since a full checkpoint.
    before = recorder.returned
    assert before < 20

    for _ in range(3):
        await reader.aget_tuple(thread())

    assert recorder.returned == before + 3
    await run.put(n=50)
    assert await values(reader, thread()) == {"n": 50}
    # The position of the last known record is not known yet.
    before = recorder.returned - 5
    # A list needs all records, and the next read does not.
    assert len([one async for one in reader.alist(thread())]) == 51
    assert recorder.returned == before + 5 + 51
    assert await values(reader, thread()) == {"n": 50}
    assert recorder.returned == before + 5 + 52
    await run.put(n=51)
    assert await values(reader, thread()) == {"n": 51}
    assert recorder.returned == before + 5 + 54


@pytest.mark.parametrize("shape", ["dict", "list", "chat"])
async def test_a_cold_read_costs_the_newest_checkpoint(
    cp: MemoryCheckpointer[Any], shape: str
) -> None:
    """Its bytes do not grow with the number of checkpoints of a state."""
    run = Run(CheckpointSaver(cp))
    costs = []

    for n in range(200):
        text = "".join(random.Random(n).choices("abcdefgh", k=2000))
        states: dict[str, Any] = {
            "dict": {"plan": {"text": text}},
            "list": {"log": [*(f"{i} " * 500 for i in range(19)), text]},
            "chat": {"log": [f"{i} " * 500 for i in range(n % 100 + 1)]},
        }
        state = states[shape]
        await run.put(**state)

        if n >= 100 and n % 7 == 0:
            recorder = Recorder(cp)
            assert await values(CheckpointSaver(recorder), thread()) == state
            costs.append(recorder.returned)

    # Records, of more than 100.
    assert max(costs) <= 40


async def test_a_cold_read_of_a_growing_list_reads_few_records(
    cp: MemoryCheckpointer[Any],
) -> None:
    """A full checkpoint comes before the rest is half of the state."""
    run = Run(CheckpointSaver(cp))
    log: list[str] = []
    costs = []

    for n in range(400):
        log.append(f"{n} " * 300)
        await run.put(log=[*log])

        if n >= 300:
            recorder = Recorder(cp)
            assert await values(CheckpointSaver(recorder), thread()) == {"log": log}
            costs.append(recorder.returned)

    # A state of a quarter of a megabyte, and six kilobytes for each record.
    assert max(costs) <= 6 + 44


async def test_a_cold_read_finds_a_full_checkpoint_that_is_farther_back(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Many tasks wrote at once, and the checkpoint did not know of all of them."""
    run = Run(CheckpointSaver(cp))
    full: dict[str, Any] = {"log": ["x" * 1000] * 1200}

    for n in range(150):
        await run.put(log=[n])

    # The second one is stored with its values.
    for _ in range(2):
        await run.put(**full)

    for count, saver in ((30, run.saver), (12, CheckpointSaver(cp))):
        for n in range(count):
            await saver.aput_writes(run.config, [("log", n)], f"{count} {n}")

    other = empty_checkpoint() | {
        "id": str(uuid6()),
        "channel_values": full,
        "channel_versions": {"log": run.versions["log"]},
    }
    await run.saver.aput(run.config, other, {}, {})
    recorder = Recorder(cp)
    assert await values(CheckpointSaver(recorder), thread()) == full
    assert recorder.reads == 3
    assert recorder.returned <= 6 + 36 + 60


async def test_a_value_without_a_version_is_kept(
    cp: MemoryCheckpointer[Any],
) -> None:
    """It belongs to its checkpoint alone, as with LangGraph's own savers."""
    saver = CheckpointSaver(cp)
    run = Run(saver)
    await run.put(n=1)
    checkpoint = empty_checkpoint() | {
        "id": str(uuid6()),
        "channel_values": {"key": "value", "large": ["x"] * 999, "n": 1},
        "channel_versions": {"n": run.versions["n"]},
    }
    run.config = await saver.aput(run.config, checkpoint, {"source": "loop"}, {})
    assert await values(saver, thread()) == checkpoint["channel_values"]
    await run.put(n=2, large=["x"] * 1000)

    for reader in (saver, CheckpointSaver(cp)):
        newest, loose, _ = [one async for one in reader.alist(thread())]
        assert newest.checkpoint["channel_values"] == {"n": 2, "large": ["x"] * 1000}
        assert loose.checkpoint == checkpoint
        assert await reader.aget_tuple(loose.config) == loose


async def test_a_filter_may_name_a_path(cp: MemoryCheckpointer[Any]) -> None:
    """As with LangGraph's SQLite saver; a key with a dot in it comes first."""
    saver = CheckpointSaver(cp)
    first: Any = {"user": {"name": "a", "deep": {"x": 1}}}
    second: Any = {"user.name": "a", "user": "text"}

    for metadata in (first, second):
        checkpoint = empty_checkpoint() | {"id": str(uuid6())}
        await saver.aput(thread(), checkpoint, metadata, {})

    cases: list[tuple[dict[str, Any], int]] = [
        ({"user.name": "a"}, 2),
        ({"user.deep.x": 1}, 1),
        ({"user.deep": {"x": 1}}, 1),
        ({"user.name.more": "a"}, 0),
    ]

    for filter, count in cases:
        found = [one async for one in saver.alist(thread(), filter=filter)]
        assert len(found) == count


async def test_a_list_with_a_limit_costs_what_it_returns(
    cp: MemoryCheckpointer[Any],
) -> None:
    """So does time travel. Nothing before the checkpoints is read."""
    run = Run(CheckpointSaver(cp))
    configs = [await run.put(plan={"n": n}) for n in range(500)]
    complete = CheckpointSaver(cp)
    every = [one async for one in complete.alist(thread())]

    for place, limit in [(500, 1), (500, 7), (490, 7), (300, 1)]:
        recorder = Recorder(cp)
        reader = CheckpointSaver(recorder)
        before = configs[place] if place < 500 else None
        config: Any = {"configurable": {"thread_id": "t"}}

        for wanted in (config, thread()):
            listed = [
                one async for one in reader.alist(wanted, before=before, limit=limit)
            ]
            assert listed == every[500 - place :][:limit]

        assert recorder.returned <= 40 + 8 * (500 - place + limit)
        recorder.returned = 0
        there = await CheckpointSaver(recorder).aget_tuple(configs[place - 1])
        assert there == every[500 - place]
        assert recorder.returned <= 40 + 6 * (500 - place)


async def test_a_cold_read_finds_a_higher_id_before_a_full_checkpoint(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The clock of another process may be ahead: the highest id is the newest."""
    run = Run(CheckpointSaver(cp))
    await run.put(text="x" * 9000)
    later = empty_checkpoint() | {
        "id": "f" * 36,
        "channel_values": {"text": "later"},
        "channel_versions": {"text": "9"},
    }
    await run.saver.aput(thread(), later, {}, {"text": "9"})

    for n in range(30):
        await run.put(text=f"{n} " * 9000)

    assert await values(CheckpointSaver(cp), thread()) == {"text": "later"}


async def test_a_higher_id_that_is_put_at_the_same_time_is_the_newest(
    cp: MemoryCheckpointer[Any],
) -> None:
    """It stands before a full checkpoint, which is made before it is stored."""
    run = Run(CheckpointSaver(cp))
    await run.put(text="x" * 9000)

    later = empty_checkpoint() | {
        "id": "f" * 36,
        "channel_values": {"text": "later"},
        "channel_versions": {"text": "9"},
    }
    await asyncio.gather(
        run.saver.aput(thread(), later, {}, {"text": "9"}),
        run.put(text="y" * 90_000),
    )

    for n in range(60):
        await run.put(count=n)

    assert await values(CheckpointSaver(cp), thread()) == {"text": "later"}


async def test_a_subgraph_is_read_between_a_write_and_its_checkpoint(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The window of the subgraph lacks a write that a later full checkpoint needs."""
    recorder = Recorder(cp)
    run, child = (Run(CheckpointSaver(recorder)) for _ in range(2))
    child.saver, child.config = run.saver, thread(ns="child")
    config = await run.put(plan="")

    for n in range(9):
        plan = {"text": f"{n} " * 9000}
        await run.saver.aput_writes(config, [("plan", plan)], "task")
        await child.put(n=n)
        config = await run.put(plan=plan)

    assert "needs" in recorder.appends[-1][-1]
    reader = CheckpointSaver(cp)
    assert await values(reader, thread(ns="child")) == {"n": 8}
    assert await values(reader, thread()) == {"plan": plan}


async def put_early_write(saver: CheckpointSaver, config: RunnableConfig) -> Checkpoint:
    """Put a write to a checkpoint that is put later; return that checkpoint.

    The config names the checkpoint from then on.
    """
    checkpoint = empty_checkpoint() | {"id": "f" * 36}
    config["configurable"]["checkpoint_id"] = checkpoint["id"]
    await saver.aput_writes(config, [(INTERRUPT, "why?")], "task")
    return checkpoint


async def test_a_list_of_all_namespaces_has_writes_before_their_checkpoint(
    cp: MemoryCheckpointer[Any],
) -> None:
    """A window that begins at a subgraph's checkpoint may lack writes of the graph."""
    saver = CheckpointSaver(cp)
    child, run = Run(saver), Run(saver)
    child.config = thread(ns="child")

    for n in range(9):
        await child.put(n=n)

    checkpoint = await put_early_write(saver, thread())

    for n in range(12):
        await child.put(n=n)

    await saver.aput(run.config, checkpoint, {}, {})
    every: Any = {"configurable": {"thread_id": "t"}}
    (listed,) = [one async for one in CheckpointSaver(cp).alist(every, limit=1)]
    assert listed == await found(saver, thread())
    assert listed.pending_writes == [("task", INTERRUPT, "why?")]


async def test_a_read_after_one_of_another_namespace_has_the_pending_writes(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The cached window may begin behind the writes, and before their checkpoint."""
    saver = CheckpointSaver(cp)
    child, run = Run(saver), Run(saver)
    child.config = thread(ns="child")
    await child.put(n=1)

    for n in range(9):
        await run.put(n=n)

    config = thread(ns="child")
    checkpoint = await put_early_write(saver, config)

    for n in range(9):
        await run.put(n=n)

    await saver.aput(child.config, checkpoint, {}, {})

    for wanted in (config, thread(ns="child")):
        reader = CheckpointSaver(cp)
        assert await values(reader, thread()) == {"n": 8}
        there = await found(reader, wanted)
        assert there.pending_writes == [("task", INTERRUPT, "why?")]


async def test_a_large_value_is_stored_in_parts(url: str) -> None:
    """LangGraph's own savers take it too."""
    big = random.Random(0).randbytes(13 * 1024 * 1024)

    async with open_checkpointer(url) as cp:
        run = Run(CheckpointSaver(cp))

        for n in range(10):
            await run.put(n=n)

        config = await run.put(big=big, n=10)
        await run.saver.aput_writes(config, [("big", big)], "task")

    async with open_checkpointer(url) as cp:
        there = await found(CheckpointSaver(cp), thread())

    assert there.checkpoint["channel_values"] == {"big": big, "n": 10}
    assert there.pending_writes == [("task", "big", big)]


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


@pytest.mark.parametrize(
    "between", ["evicted", "a child's checkpoint", "an earlier one"]
)
async def test_a_new_reader_finds_writes_before_their_checkpoint(between: str) -> None:
    """The next full checkpoint is not the first record that a reader needs."""
    async with open_checkpointer("memory://") as cp:
        saver = CheckpointSaver(cp, cached_threads=1)
        run = Run(saver)

        for _ in range(9):
            await run.put(a="a")

        early, late = (empty_checkpoint() for _ in range(2))

        for checkpoint in (early, late):
            checkpoint["id"] = str(uuid6())

        config = thread()
        config["configurable"]["checkpoint_id"] = late["id"]
        await saver.aput_writes(config, [(INTERRUPT, "why?")], "task")

        if between == "evicted":
            await saver.aget_tuple(thread("another"))
            await saver.aget_tuple(thread())
        elif between == "a child's checkpoint":
            child = empty_checkpoint()
            child["id"] = str(uuid6())
            await saver.aput(thread(ns="child"), child, {}, {})
        else:
            await saver.aput(run.config, early, {}, {})

        config = await saver.aput(run.config, late, {}, {})

        for reader in (saver, CheckpointSaver(cp)):
            for asked in (thread(), config):
                pending = (await found(reader, asked)).pending_writes
                assert pending == [("task", INTERRUPT, "why?")]


async def test_a_thread_stays_in_the_cache_while_it_is_appended_to(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Otherwise the next checkpoint would be full, behind a write of its own."""
    spy = RangeSpy(cp)
    saver = CheckpointSaver(spy, cached_threads=1)
    run = Run(saver)

    for _ in range(9):
        await run.put(a="a")

    checkpoint = empty_checkpoint() | {"id": str(uuid6())}
    config = thread()
    config["configurable"]["checkpoint_id"] = checkpoint["id"]
    spy.waiting.clear()
    spy.gate.clear()
    write = asyncio.create_task(saver.aput_writes(config, [("ch", 1)], "task"))
    await spy.waiting.wait()
    await saver.aget_tuple(thread("another"))
    await saver.aget_tuple(thread())
    spy.gate.set()
    await write
    await saver.aput(run.config, checkpoint, {}, {})
    pending = (await found(CheckpointSaver(cp), thread())).pending_writes
    assert pending == [("task", "ch", 1)]


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
