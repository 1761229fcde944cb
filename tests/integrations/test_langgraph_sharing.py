"""Several savers on one store, and threads that are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.serde.types import INTERRUPT
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from cpkit import (
    MemoryCheckpointer,
    open_checkpointer,
)
from cpkit.integrations.langgraph import CheckpointSaver
from cpkit.integrations.langgraph.names import store_thread_id
from tests.integrations.langgraph_runs import Recorder, Run, found, thread, values

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


@pytest.mark.parametrize("more", [0, 100])  # more than a saver reads before a put
@pytest.mark.parametrize("is_cold", [False, True])
async def test_a_higher_id_of_another_saver_is_the_newest(
    url: str, is_cold: bool, more: int
) -> None:
    """It stands before a full checkpoint of a saver that has not read it."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        run = Run(CheckpointSaver(one))

        for n in range(40):
            await run.put(text=f"{n} " * 900)

        if is_cold:  # it has read the end of the thread, and knows no positions
            run.saver = CheckpointSaver(one)
            await run.saver.aget_tuple(thread())

        later = empty_checkpoint() | {
            "id": "f" * 36,
            "channel_values": {"text": "later"},
            "channel_versions": {"text": "9"},
        }
        other = Run(CheckpointSaver(two))
        await other.saver.aput(thread(), later, {}, {"text": "9"})

        for n in range(more):
            await other.put(count=n)

        for n in range(40):
            await run.put(text=f"{n} " * 9000)

        reader = CheckpointSaver(two)
        [newest] = [one async for one in reader.alist(thread(), limit=1)]
        assert newest.checkpoint["id"] == "f" * 36
        assert await values(CheckpointSaver(two), thread()) == {"text": "later"}


async def test_a_run_behind_many_records_stores_full_checkpoints_again(
    cp: MemoryCheckpointer[Any],
) -> None:
    """It reads the thread again before its second checkpoint, and not more often."""
    recorder = Recorder(cp)
    run = await behind_many_records(cp, recorder)
    reads = recorder.reads

    for n in range(12):
        await run.put(text=f"{n} " * 9000)

    puts = await cp.read(store_thread_id("t"), -12)
    full = [n for n, record in enumerate(puts) if "newest" in record]
    assert full[0] == 1
    assert len(full) > 3
    assert recorder.reads - reads < 12
    assert await values(CheckpointSaver(cp), thread()) == {"text": "11 " * 9000}


async def test_a_run_behind_many_records_remembers_writes_that_are_queued(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The thread is read again before these writes of a later checkpoint are stored."""
    config = thread()
    checkpoint = empty_checkpoint() | {
        "id": "e" * 36,
        "channel_values": {"text": "last " * 9000},
        "channel_versions": {"text": "9"},
    }
    config["configurable"]["checkpoint_id"] = checkpoint["id"]
    may_store = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    class Slow:
        """Reads while writes are queued, and stores these when it may."""

        def __getattr__(self, name: str) -> Any:
            return getattr(cp, name)

        async def read(self, *args: Any) -> list[Any]:
            if is_behind and not tasks:
                writes = run.saver.aput_writes(config, [(INTERRUPT, "why?")], "task")
                tasks.append(asyncio.create_task(writes))
                await turns()

            return await cp.read(*args)

        async def append(self, name: str, messages: Any, **options: Any) -> int:
            if any(one["type"] == "writes" for one in messages):
                await may_store.wait()

            return await cp.append(name, messages, **options)

    is_behind = False
    run = await behind_many_records(cp, Slow())
    is_behind = True
    await run.put(text="first " * 9000)
    put = run.saver.aput(run.config, checkpoint, {}, {"text": "9"})
    tasks.append(asyncio.create_task(put))  # type: ignore[arg-type]  # of a config
    await turns()
    may_store.set()
    await asyncio.gather(*tasks)

    for saver in (run.saver, CheckpointSaver(cp)):
        newest = await found(saver, thread())
        assert newest.checkpoint["id"] == checkpoint["id"]
        assert newest.pending_writes == [("task", INTERRUPT, "why?")]


async def turns() -> None:
    """Let the other tasks run until they wait."""
    for _ in range(100):
        await asyncio.sleep(0)


async def behind_many_records(cp: MemoryCheckpointer[Any], store: Any) -> Run:
    """Return a run on ``store`` that has not read the newest 100 records of ``cp``."""
    first = Run(CheckpointSaver(cp))

    for n in range(40):
        await first.put(text=f"{n} " * 900)

    # It knows the end of the thread, and no positions.
    run = Run(CheckpointSaver(store))
    await run.saver.aget_tuple(thread())
    other = Run(CheckpointSaver(cp))

    for n in range(100):
        await other.put(count=n)

    return run


async def test_a_put_is_stored_if_its_thread_is_deleted_while_it_is_appended() -> None:
    """Another saver has appended, so the put reads; then the thread is replaced."""
    async with MemoryCheckpointer[Any]() as cp:
        refused: list[int | None] = []

        class Replacing:
            def __getattr__(self, name: str) -> Any:
                return getattr(cp, name)

            async def append(self, name: str, messages: Any, **options: Any) -> int:
                if options.get("expected_version") is not None:
                    refused.append(options["expected_version"])

                    if len(refused) == 2:
                        await cp.delete_thread(name)
                        await Run(CheckpointSaver(cp)).put(text="another thread")

                return await cp.append(name, messages, **options)

        other: Any = Replacing()
        run = Run(CheckpointSaver(other))
        run.config = await Run(run.saver).put(text="first")
        await Run(CheckpointSaver(cp)).put(text="second")
        refused.clear()
        await run.put(text="third " * 9000)

        assert len(refused) == 2
        assert refused[0] != refused[1]
        third = await values(CheckpointSaver(cp), run.config)
        assert third == {"text": "third " * 9000}


async def test_writes_of_another_saver_stand_before_their_checkpoint(url: str) -> None:
    """The saver of the checkpoint, which would be a full one, has not read them."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        run = Run(CheckpointSaver(one))

        for n in range(40):
            await run.put(text=f"{n} " * 900)

        checkpoint_id = "f" * 36
        config: Any = thread()
        config["configurable"]["checkpoint_id"] = checkpoint_id
        await CheckpointSaver(two).aput_writes(config, [("text", "early")], "task")
        later = empty_checkpoint() | {
            "id": checkpoint_id,
            "channel_values": {"text": "later " * 90_000},
            "channel_versions": {"text": "9"},
        }
        await run.saver.aput(run.config, later, {}, {"text": "9"})

        for n in range(40):
            await run.put(count=n)

        for reader in (CheckpointSaver(two), run.saver):
            there = await found(reader, thread())
            assert there.checkpoint["id"] == checkpoint_id
            assert there.pending_writes == [("task", "text", "early")]


async def test_a_list_of_all_threads_is_newest_first(url: str, tmp_path: Path) -> None:
    """As with LangGraph's own saver, the threads' checkpoints are interleaved."""
    async with (
        open_checkpointer(url) as cp,
        AsyncSqliteSaver.from_conn_string(str(tmp_path / "own.db")) as own,
    ):
        for turn, thread_id in enumerate("bcaacb" * 9):
            checkpoint = empty_checkpoint()
            checkpoint["id"] = str(uuid6())

            for saver in (own, CheckpointSaver(cp)):
                config = thread(thread_id, "child" if turn % 5 == 0 else "")
                await saver.aput(config, checkpoint, {"step": turn % 4}, {})

        for limit in (None, 0, 1, 5):
            for filter in (None, {"step": 1}):
                listed = [
                    [
                        (one.config["configurable"]["thread_id"], one.checkpoint["id"])
                        async for one in saver.alist(None, limit=limit, filter=filter)
                    ]
                    for saver in (own, CheckpointSaver(cp))
                ]
                assert listed[0] == listed[1]


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
