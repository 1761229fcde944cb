"""How the saver writes: one append for each put, and what is stored."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.base import (
    ChannelVersions,
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
    composing,
    store_thread_id,
)
from cpkit.integrations.langgraph.records import View
from tests.integrations.langgraph_runs import Recorder, Run, found, thread, values


async def test_each_put_is_one_append(cp: MemoryCheckpointer[Any]) -> None:
    """Only the first one reads the thread's end, if nothing was read before."""
    recorder = Recorder(cp)
    saver = CheckpointSaver(recorder)
    config = await Run(saver).put(a=1, b=[1], c=None)
    assert recorder.reads == 1
    await saver.aput_writes(config, [("a", 1), ("b", 2)], "task")
    await saver.aput_writes(config, [], "task")
    assert [len(messages) for messages in recorder.appends] == [1, 1]
    assert recorder.reads == 1


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
    """They are of one append; what names a blob of the refused write is stored too."""

    class Refusing(Recorder):
        async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
            if any(one.get("task_id") == "refused" for one in messages):
                raise SerializationError((), "refused")

            return await super().append(thread_id, messages, **options)

    run = Run(CheckpointSaver(Refusing(cp)))
    plan = {"text": "x" * 10_000}
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
        patch.setattr(View, "extend", _fail)

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
    """The checkpoint names the blobs of the write."""
    recorder = Recorder(cp)
    run = Run(CheckpointSaver(recorder))
    config = await run.put(plan={"text": ""}, log=["x" * 500] * 20)

    for n in range(30):
        plan, log = {"text": f"{n} " * 3000}, [str(n) * 500] * 20
        writes = run.saver.aput_writes(config, [("plan", plan), ("log", log)], "task")

        if together:
            _, config = await asyncio.gather(writes, run.put(plan=plan, log=log))
        else:
            await writes
            config = await run.put(plan=plan, log=log)

    assert len(json.dumps(recorder.appends[-1][-1])) < 1000
    assert len(json.dumps(recorder.appends)) < 40 * (len(json.dumps([plan, log])))
    reader = Recorder(cp)
    assert await values(CheckpointSaver(reader), thread()) == {"plan": plan, "log": log}
    assert reader.returned <= 6
    listed = [one async for one in CheckpointSaver(cp).alist(thread())]
    texts = [one.checkpoint["channel_values"]["plan"]["text"] for one in listed]
    assert texts == [*(f"{n} " * 3000 for n in range(29, -1, -1)), ""]


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
    messages = [AIMessage("x" * 100, id=str(n)) for n in range(1000)]
    run = Run(CheckpointSaver(recorder))

    for length in range(10, 1000, 10):
        if length == 500:
            run.saver = CheckpointSaver(recorder)
            await run.saver.aget_tuple(thread())

        await run.put(messages=messages[:length])

    sizes = [len(json.dumps(one)) for one in recorder.appends]
    assert sum(sizes) < 8 * sizes[2] * len(sizes)
    assert (await values(run.saver, thread()))["messages"] == messages[:990]
    assert (await values(CheckpointSaver(cp), thread()))["messages"] == messages[:990]


async def test_a_first_read_is_two_reads_however_far_the_values_are(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The newest checkpoint says where a reader must begin."""
    run = Run(CheckpointSaver(cp))
    rng = random.Random(1)
    messages = [AIMessage(rng.randbytes(2000).hex(), id=str(n)) for n in range(60)]

    for length in range(30, 57):
        await run.put(messages=messages[:length])

    records = await cp.read(store_thread_id("t"))
    whole = max(n for n, one in enumerate(records) if one.get("whole"))
    # The blob of the whole list stands before the checkpoint.
    assert len(records) - whole > 8
    recorder = Recorder(cp)
    saver = CheckpointSaver(recorder)
    assert await values(saver, thread()) == run.values
    assert recorder.reads == 2
    assert recorder.returned == len(records) - whole + 1


@pytest.mark.parametrize("count", [6, 40])
@pytest.mark.parametrize("is_owned", [False, True])
async def test_a_first_read_behind_writes_is_two_reads(
    cp: MemoryCheckpointer[Any], count: int, is_owned: bool
) -> None:
    """Records of writes say where a reader of their checkpoint must begin, too."""
    run = Run(CheckpointSaver(cp))
    plan = {"text": random.Random(1).randbytes(400_000).hex()}
    config = await run.put(plan=plan)
    await run.saver.aput_writes(config, [("n", 1)], "task")
    await run.put(plan=plan)

    for n in range(30):
        config = await run.put(n=n)

    if is_owned:
        config = await run.saver.aclaim(config)

    tasks = [
        run.saver.aput_writes(config, [("n", n)], f"task {n}", f"{n}")
        for n in range(count)
    ]
    await asyncio.gather(*tasks)
    recorder = Recorder(cp)
    last = await found(CheckpointSaver(recorder), thread())
    assert last.checkpoint["channel_values"] == {"plan": plan, "n": 29}
    assert last.pending_writes is not None
    assert len(last.pending_writes) == count
    assert recorder.reads == 2
    assert recorder.returned < count + 55


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


@pytest.mark.parametrize("is_whole", [False, True])
async def test_a_value_changed_in_place_is_not_stored_before_its_next_version(
    cp: MemoryCheckpointer[Any], monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """A graph changes the set of a join in place while a checkpoint still waits."""
    monkeypatch.setattr(composing, "_REPEATED", 100 if is_whole else 0)
    run = Run(CheckpointSaver(cp))
    joined, long = {"left"}, {"text": "x" * 9000}
    await run.put(joined=joined, long=long)
    joined.add("right")
    long["text"] = "changed"

    for n in range(2):
        await run.put(n=n)

    before = {"joined": {"left"}, "long": {"text": "x" * 9000}, "n": 1}
    [*_, record] = await cp.read(store_thread_id("t"))
    assert record["whole"] == is_whole

    for saver in (run.saver, CheckpointSaver(cp)):
        assert await values(saver, thread()) == before

    await run.put(joined=joined)
    assert await values(run.saver, thread()) == before | {"joined": {"left", "right"}}


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
    """A whole checkpoint is not the first record that a reader needs."""
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


async def test_every_reader_waits_for_a_cancelled_put() -> None:
    """Also a second one, and one that comes after a reader that was cancelled."""

    class Slow(MemoryCheckpointer[Any]):
        may_end = asyncio.Event()

        async def append(self, *args: Any, **options: Any) -> int:
            await self.may_end.wait()
            return await super().append(*args, **options)

    async with Slow() as cp:
        cp.may_end.set()
        run = Run(CheckpointSaver(cp))
        await run.put(n=0)
        cp.may_end.clear()
        put = asyncio.create_task(run.put(n=1))
        await asyncio.sleep(0.01)
        put.cancel()
        await asyncio.wait([put])
        reads = [asyncio.create_task(values(run.saver, thread())) for _ in range(3)]
        await asyncio.sleep(0.01)
        reads[0].cancel()
        await asyncio.wait([reads[0]])
        reads.append(asyncio.create_task(values(run.saver, thread())))
        await asyncio.sleep(0.01)
        assert not any(read.done() for read in reads[1:])
        cp.may_end.set()
        assert await asyncio.gather(*reads[1:]) == [{"n": 1}] * 3


async def test_an_error_that_cannot_be_copied_reaches_every_caller() -> None:
    """A store's own class may take other arguments than it passes on."""

    class Odd(Exception):
        def __init__(self, code: int, place: str) -> None:
            super().__init__(f"{code} at {place}")

    class Broken(MemoryCheckpointer[Any]):
        is_broken = False

        async def append(self, *args: Any, **options: Any) -> int:
            if self.is_broken:
                raise Odd(7, "home")

            return await super().append(*args, **options)

    async with Broken() as cp:
        run = Run(CheckpointSaver(cp))
        config = await run.put(n=0)
        cp.is_broken = True
        outcomes = await asyncio.gather(
            *(run.saver.aput_writes(config, [("n", n)], f"{n}") for n in range(3)),
            return_exceptions=True,
        )
        assert [str(one) for one in outcomes] == ["7 at home"] * 3
