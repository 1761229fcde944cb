"""How the saver reads: its cache, and how little of a thread it asks for."""

from __future__ import annotations

import asyncio
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


async def test_a_missing_part_is_damage(cp: MemoryCheckpointer[Any]) -> None:
    """The thread is reported as corrupt, with the message that cannot be read."""
    await Run(CheckpointSaver(cp)).put(big="x" * 5 * 1024 * 1024)
    data = await cp.load(store_thread_id("t"))
    assert data is not None
    await cp.delete_thread(store_thread_id("t"))
    await cp.append(store_thread_id("t"), data.messages[1:])

    with pytest.raises(CorruptThread, match="parts are stored before it"):
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
