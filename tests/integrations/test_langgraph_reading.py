"""How the saver reads: its cache, and how little of a thread it asks for."""

from __future__ import annotations

import random
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    Checkpoint,
    empty_checkpoint,
)
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.serde.types import INTERRUPT

from cpkit import (
    CorruptThread,
    MemoryCheckpointer,
    open_checkpointer,
)
from cpkit.integrations.langgraph import (
    CheckpointSaver,
    Unsupported,
    store_thread_id,
)
from tests.integrations.langgraph_runs import Recorder, Run, found, thread, values


class SixMethods:
    """A store without any optional ability."""

    def __init__(self, inner: Any) -> None:
        for name in (
            "load append save_extra record_issued record_result find_completed"
        ).split():
            setattr(self, name, getattr(inner, name))


async def test_only_new_records_are_read(cp: MemoryCheckpointer[Any]) -> None:
    """A read of what the saver has costs one call, which returns no record."""
    recorder = Recorder(cp)
    reader = CheckpointSaver(recorder)
    run = Run(CheckpointSaver(cp))

    for n in range(50):
        await run.put(n=n)

    await reader.aget_tuple(thread())
    # Those since a whole checkpoint.
    before = recorder.returned
    assert before < 20

    for _ in range(3):
        await reader.aget_tuple(thread())

    assert recorder.returned == before
    await run.put(n=50)
    assert await values(reader, thread()) == {"n": 50}
    assert recorder.returned == before + 1
    # A list needs all records: those before the ones that are in memory.
    assert len([one async for one in reader.alist(thread())]) == 51
    assert recorder.returned == 51
    await run.put(n=51)
    assert await values(reader, thread()) == {"n": 51}
    assert recorder.returned == 52


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
    """A whole checkpoint comes before the rest is half of the state."""
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


async def test_a_cold_read_knows_how_far_back_it_must_begin(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Every record says it, however much others wrote in between."""
    run = Run(CheckpointSaver(cp))
    await run.put(log=["x" * 1000] * 1200)

    for count, saver in ((30, run.saver), (12, CheckpointSaver(cp))):
        for n in range(count):
            await saver.aput_writes(run.config, [("n", n)], f"{count} {n}")

    await run.put(n=1)
    recorder = Recorder(cp)
    assert await values(CheckpointSaver(recorder), thread()) == run.values
    # The blob of the list, the first checkpoint, the writes, and the second.
    assert (recorder.reads, recorder.returned) == (2, 1 + 1 + 42 + 1)


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


@pytest.mark.parametrize("size", [1, 9000])
async def test_a_clock_that_steps_back_does_not_hide_the_newest_checkpoint(
    cp: MemoryCheckpointer[Any], size: int
) -> None:
    """LangGraph makes ids of the time; the order of appends decides."""
    run = Run(CheckpointSaver(cp))
    ids = [f"{'f' if n < 5 else '0'}{n:035}" for n in range(40)]

    for n, checkpoint_id in enumerate(ids):
        await run.put(checkpoint_id, text=f"{n} " * size)

    for saver in (run.saver, CheckpointSaver(cp)):
        assert await values(saver, thread()) == run.values
        listed = [one async for one in saver.alist(thread())]
        assert [one.checkpoint["id"] for one in listed] == ids[::-1]
        last = [one async for one in saver.alist(thread(), limit=1)]
        assert last == listed[:1]
        before = [one async for one in saver.alist(thread(), before=listed[3].config)]
        assert before == listed[4:]


async def test_a_subgraph_is_read_between_a_write_and_its_checkpoint(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The window of the subgraph lacks a blob that a later checkpoint names."""
    recorder = Recorder(cp)
    run, child = (Run(CheckpointSaver(recorder)) for _ in range(2))
    child.saver, child.config = run.saver, thread(ns="child")
    config = await run.put(plan="")

    for n in range(9):
        plan = {"text": f"{n} " * 9000}
        await run.saver.aput_writes(config, [("plan", plan)], "task")
        await child.put(n=n)
        config = await run.put(plan=plan)

    assert [one["type"] for one in recorder.appends[-1]] == ["checkpoint"]
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


async def test_a_large_value_is_stored_in_several_records(url: str) -> None:
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


async def test_a_missing_blob_is_damage(cp: MemoryCheckpointer[Any]) -> None:
    """The thread is reported as corrupt, with the message that cannot be read."""
    await Run(CheckpointSaver(cp)).put(big="x" * 5 * 1024 * 1024)
    data = await cp.load(store_thread_id("t"))
    assert data is not None
    await cp.delete_thread(store_thread_id("t"))
    await cp.append(store_thread_id("t"), data.messages[1:])

    with pytest.raises(CorruptThread, match="message 2: .* is missing"):
        await CheckpointSaver(cp).aget_tuple(thread())


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
    assert recorder.returned == before
    await saver.aget_tuple(thread(0))
    assert recorder.returned == before + 3

    with pytest.raises(ValueError, match="at least 1"):
        CheckpointSaver(cp, cached_threads=0)


@pytest.mark.parametrize("cached_bytes", [64 * 1024 * 1024, 400_000])
async def test_a_new_namespace_is_looked_for_once_in_the_whole_thread(
    cp: MemoryCheckpointer[Any], cached_bytes: int
) -> None:
    """Each call of a subgraph has its own, also in a thread that is not kept whole."""
    run = Run(CheckpointSaver(cp))

    for n in range(100):
        await run.put(n=n)

    recorder = Recorder(cp)
    saver = CheckpointSaver(recorder, cached_bytes=cached_bytes)

    for n in range(9):
        assert await saver.aget_tuple(thread(ns=f"child:{n}")) is None

    assert recorder.returned == 100
    inner = Run(saver)
    inner.config = thread(ns="child:1")
    await inner.put(n=1)
    assert await values(saver, inner.config) == {"n": 1}
    assert recorder.returned == 100


async def test_a_state_larger_than_the_cache_is_read_each_time(
    cp: MemoryCheckpointer[Any],
) -> None:
    """As with LangGraph's own savers, nothing of it stays in memory."""
    log = ["x" * 1000] * 100
    await Run(CheckpointSaver(cp)).put(log=log)
    recorder = Recorder(cp)
    run = Run(CheckpointSaver(recorder, cached_bytes=100_000))

    for turn in range(1, 4):
        for _ in range(3):
            before = recorder.returned
            run.config = (await found(run.saver, thread())).config
            assert recorder.returned >= before + 2

        await run.put(log=log * turn)
        assert await values(run.saver, thread()) == {"log": log * turn}


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
