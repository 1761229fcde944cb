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
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    MemoryCheckpointer,
    open_checkpointer,
)
from cpkit.integrations.langgraph import CheckpointSaver
from cpkit.integrations.langgraph.names import store_thread_id
from tests.integrations.langgraph_runs import Recorder, Run, found, thread, values
from tests.sessions.spy import Spy

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


async def test_the_last_checkpoint_is_the_newest_whatever_the_clocks_say(
    url: str,
) -> None:
    """The clock of one of two processes is ahead."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        runs = [Run(CheckpointSaver(cp)) for cp in (one, two)]

        for n in range(12):
            run = runs[n // 3 % 2]
            ahead = "f" if run is runs[0] else "0"
            await run.put(f"{ahead}{n:035}", text=f"{n} " * 900)

            for saver in (runs[0].saver, runs[1].saver, CheckpointSaver(two)):
                assert await values(saver, thread()) == {"text": f"{n} " * 900}
                [newest] = [found async for found in saver.alist(thread(), limit=1)]
                assert newest.config == run.config


async def test_a_saver_far_behind_reads_the_end_of_the_thread(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Its checkpoint is stored whole, behind what others have appended."""
    recorder = Recorder(cp)
    run, other = Run(CheckpointSaver(recorder)), Run(CheckpointSaver(cp))
    await run.put(text="first " * 900, n=0)

    for n in range(1000):
        await other.put(text=str(n))

    await run.put(n=1)
    # What is new up to a limit, and the end.
    assert recorder.returned <= 64 + 4
    [record] = (await cp.read(store_thread_id("t")))[-1:]
    assert record["whole"]

    for saver in (run.saver, other.saver):
        assert await values(saver, thread()) == {"text": "first " * 900, "n": 1}


@pytest.mark.parametrize("fault", ["lost before", "lost after"])
async def test_an_append_without_an_answer_is_stored_once(
    cp: MemoryCheckpointer[Any], fault: Any
) -> None:
    """It is repeated at the version that the saver knows."""
    spy = Spy(cp)
    run = Run(CheckpointSaver(spy))
    await run.put(log=["a"] * 9)
    spy.faults += ["", fault, fault]
    config = await run.put(log=["a"] * 10)
    await run.saver.aput_writes(config, [("log", "b")], "task")

    for saver in (run.saver, CheckpointSaver(cp)):
        assert await values(saver, thread()) == {"log": ["a"] * 10}
        assert (await found(saver, config)).pending_writes == [("task", "log", "b")]

    assert len(await cp.read(store_thread_id("t"))) == 3


async def test_a_put_that_never_gets_an_answer_is_found_by_the_next_read(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Nothing builds on what may not be stored."""
    spy = Spy(cp)
    run = Run(CheckpointSaver(spy))
    await run.put(log=["a"] * 9)
    spy.faults += ["lost after", "lost before", "lost before"]

    with pytest.raises(BackendUnavailable) as caught:
        await run.put(log=["a"] * 10)

    assert caught.value.maybe_applied
    assert await values(run.saver, thread()) == {"log": ["a"] * 10}
    await run.put(log=["a"] * 11)
    assert await values(CheckpointSaver(cp), thread()) == {"log": ["a"] * 11}


async def test_writes_of_another_saver_stand_before_their_checkpoint(url: str) -> None:
    """The saver of the checkpoint has not read them."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        run = Run(CheckpointSaver(one))
        await run.put(text="first")
        config: Any = thread()
        config["configurable"]["checkpoint_id"] = "e" * 36
        await CheckpointSaver(two).aput_writes(config, [("text", "early")], "task")
        await run.put("e" * 36, text="later " * 90_000)

        for reader in (CheckpointSaver(two), run.saver):
            there = await found(reader, thread())
            assert there.checkpoint["id"] == "e" * 36
            assert there.pending_writes == [("task", "text", "early")]


async def test_a_foreign_thread_ends_no_list(cp: MemoryCheckpointer[Any]) -> None:
    """Another program has a thread with this prefix; damage of one's own raises."""
    saver = CheckpointSaver(cp)
    await Run(saver).put(n=1)
    await cp.append("cpkit:langgraph:a-note", [{"role": "user"}])
    assert len([one async for one in saver.alist(None)]) == 1
    await saver.adelete_for_runs(["run"])
    await cp.append(store_thread_id("t"), [{"role": "user"}])

    with pytest.raises(CorruptThread):
        [one async for one in CheckpointSaver(cp).alist(None)]


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


async def test_a_run_of_a_deleted_thread_goes_on_in_the_new_one(
    pair: tuple[CheckpointSaver, CheckpointSaver],
) -> None:
    """As with LangGraph's own savers: its checkpoint is stored whole, and the newest.

    The new thread is longer than the writer's copy of the old one.
    """
    first, second = pair
    await second.adelete_thread("t")
    new = Run(second)

    for n in range(6):
        await new.put(log=["new"] * (n + 1))

    late = await Run(first).put(log=["old"] * 6)

    for saver in (first, second):
        assert await values(saver, late) == {"log": ["old"] * 6}
        assert await values(saver, thread()) == {"log": ["old"] * 6}
        assert await values(saver, new.config) == {"log": ["new"] * 6}


async def test_a_record_that_builds_on_a_deleted_thread_is_ignored(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The new thread has reached the version that the writer knows, by chance."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        old, new = Run(CheckpointSaver(one)), Run(CheckpointSaver(two))
        await old.put(log=["old " * 9000], n=0)
        await new.saver.adelete_thread("t")
        # The blob of the list, and the checkpoint.
        await new.put(n=1)
        await new.put(n=2)
        late = await old.put(n=3)

        for saver in (CheckpointSaver(one), new.saver):
            assert await saver.aget_tuple(late) is None
            assert await values(saver, thread()) == {"n": 2}

        assert "is ignored: its parent was deleted" in caplog.text
        assert await values(old.saver, thread()) == {"n": 2}


async def test_a_put_is_stored_if_its_thread_is_deleted_while_it_is_appended(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The thread was begun again before the append."""

    class Replacing:
        def __getattr__(self, name: str) -> Any:
            return getattr(cp, name)

        async def append(self, name: str, messages: Any, **options: Any) -> int:
            if messages[-1].get("checkpoint_id") == "third" and not replaced:
                replaced.append(name)
                await cp.delete_thread(name)
                await Run(CheckpointSaver(cp)).put(text="another thread")

            return await cp.append(name, messages, **options)

    replaced: list[str] = []
    other: Any = Replacing()
    run = Run(CheckpointSaver(other))
    await run.put(text="first " * 9000, n=1)
    await run.put(n=2)
    await run.put("third", n=3)
    assert replaced
    third = await values(CheckpointSaver(cp), run.config)
    assert third == {"text": "first " * 9000, "n": 3}


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
