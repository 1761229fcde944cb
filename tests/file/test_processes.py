"""Many processes in one folder: they open and write it, are stopped and killed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, CallRecord, CheckpointData, ToolCall
from cpkit_file import FileCheckpointer
from cpkit_file.schema import claim_stem
from tests.processes import Workers

Store = FileCheckpointer[Any]


def loaded(home: Path, thread_id: str) -> CheckpointData[dict[str, Any]]:
    async def load() -> CheckpointData[Any] | None:
        async with Store(home) as cp:
            return await cp.load(thread_id)

    data = asyncio.run(load())
    assert data is not None
    return data


def on_record(home: Path, thread_id: str) -> list[CallRecord]:
    async def calls() -> list[CallRecord]:
        async with Store(home) as cp:
            return await cp.list_calls(thread_id)

    return asyncio.run(calls())


@pytest.mark.long
def test_eight_processes_open_a_new_folder_at_once(
    tmp_path: Path, workers: Workers
) -> None:
    """One of them creates the store, and the writes of all are stored."""
    eight = workers(8)

    for round_ in range(6):
        home = tmp_path / f"new {round_}" / "store"

        for worker in eight:
            worker.tell("append_one", str(home))

        assert sorted(worker.answer() for worker in eight) == list(range(1, 9))
        assert sorted(path.name for path in home.iterdir()) == [
            "claims",
            "cpkit.json",
            "threads",
        ]


@pytest.mark.long
def test_processes_write_one_thread(home: Path, workers: Workers) -> None:
    """Versions have no gap, no merge is lost, and each key has one holder."""
    four, count = workers(4), 40

    for number, worker in enumerate(four):
        worker.tell("mixed", str(home), f"w{number}", count)

    answers = [worker.answer() for worker in four]
    data = loaded(home, "shared")
    versions = [version for answer in answers for version in answer["versions"]]
    won = Counter(key for answer in answers for key in answer["won"])

    assert (
        sorted(versions)
        == list(range(1, 4 * count + 1))
        == [*range(1, data.version + 1)]
    )
    assert won == Counter({f"key {i}": 1 for i in range(count)})
    assert len(data.extra) == 4 * count + 1
    assert len(data.pending) == count

    for number in range(4):
        mine = [m["i"] for m in data.messages if m["by"] == f"w{number}"]
        assert mine == list(range(count))


def test_attempts_at_one_key_are_counted_across_processes(
    home: Path, workers: Workers
) -> None:
    """Each attempt has one holder, and the numbers have no gap."""
    three, count = workers(3), 20

    for number, worker in enumerate(three):
        worker.tell("contend", str(home), f"w{number}", count)

    attempts = [attempt for worker in three for attempt in worker.answer()]
    assert sorted(attempts) == list(range(1, 3 * count + 1))


@pytest.mark.long
def test_a_killed_writer_loses_nothing_that_it_acknowledged(
    home: Path, workers: Workers
) -> None:
    """After SIGKILL at any instant every acknowledged write can be read."""
    chance = random.Random(5)

    for round_, worker in enumerate(workers(4)):
        worker.tell("write_for_ever", str(home), f"w{round_}")
        said = [
            worker.answer() for _ in range(chance.randrange(1, 120))
        ] + worker.kill()
        data = loaded(home, "t")
        appended = [line[1] for line in said if line[0] == "append"]
        merged = [line[2] for line in said if line[0] == "extra"]
        issued = {line[1] for line in said if line[0] == "issued"}
        completed = {line[1] for line in said if line[0] == "completed"}
        status = {r.call.call_id: r.status for r in on_record(home, "t")}

        # One write can be stored without an answer.
        assert data.version - max(appended) in (0, 2)
        assert [m["half"] for m in data.messages] == [0, 1] * (data.version // 2)
        assert not merged or data.extra["i"] - max(merged) in (0, 1)
        assert issued <= status.keys()
        assert {status[call_id] for call_id in completed} <= {"completed"}


def test_a_write_that_a_kill_cut_short_is_skipped_and_set_aside(
    home: Path, log: Path, workers: Workers
) -> None:
    """The acknowledged lines before it can be read, and appends work."""
    for worker in workers(3):
        worker.tell("append_big_for_ever", str(home))
        worker.answer()
        last = max([worker.answer(), *worker.kill()])
        torn = not log.read_bytes().endswith(b"\n")
        version = loaded(home, "t").version
        assert version - last in (0, 1)

        (second,) = workers(1)
        assert second.ask("append_one", str(home)) == 1
        second.tell("append_big_for_ever", str(home))
        assert second.answer() == version + 1
        second.kill()
        assert log.with_name(f"{log.name}.torn").exists() or not torn

        for file in log.parent.iterdir():
            file.unlink()


def test_a_stopped_process_blocks_only_writes_to_its_thread(
    home: Path, log: Path
) -> None:
    """Writes and reads of other threads work; the waiting writes are done later."""

    async def use() -> None:
        async with Store(home) as cp:
            await cp.append("t", [{}])
            # A lock of another file description acts as one of another process.
            stopped = log.open("rb")
            fcntl.flock(stopped, fcntl.LOCK_EX)
            waiting = [
                asyncio.create_task(cp.append("t", [{"n": n}])) for n in range(20)
            ]
            others = await asyncio.gather(
                *(cp.append(f"other {n}", [{}]) for n in range(200))
            )
            assert others == [1] * 200
            assert await cp.load("other 7") is not None
            assert not any(task.done() for task in waiting)
            stopped.close()
            assert await asyncio.gather(*waiting) == list(range(2, 22))

    asyncio.run(use())
    assert loaded(home, "t").version == 21


async def test_no_operation_waits_longer_than_the_timeout(
    home: Path, log: Path
) -> None:
    """Nothing was written, and the handle works when the lock is released."""
    call = ToolCall("c", "tool", {}, "key")
    shard = home / "claims" / claim_stem("key")[0]

    async with Store(home, timeout=0.1 * slowdown()) as cp:
        await cp.append("t", [{}])
        dump = await cp.dump_thread("t")
        assert dump is not None

        for path, uses in {
            log: (
                lambda: cp.append("t", [{}]),
                lambda: cp.save_extra("t", {"a": 1}),
                lambda: cp.record_result("t", "c", 1),
                lambda: cp.record_issued("t", call),
                lambda: cp.delete_thread("t"),
                lambda: cp.restore_thread(dump),
                lambda: cp.load("t"),
                lambda: cp.read("t"),
                lambda: cp.list_calls("t"),
                lambda: cp.list_threads(),
                lambda: cp.dump_thread("t"),
            ),
            shard: (lambda: cp.record_issued("u", call),),
        }.items():
            stopped = os.open(path, os.O_RDONLY)
            fcntl.flock(stopped, fcntl.LOCK_EX)

            for use in uses:
                with pytest.raises(BackendUnavailable, match="the lock of") as raised:
                    await use()

                assert raised.value.maybe_applied is False
                assert str(path) in str(raised.value)

            assert await cp.find_call("other") is None
            os.close(stopped)

        assert await cp.dump_thread("t") == dump
        assert await cp.record_issued("t", call) is None


# From Python 3.12 on, because other threads are running; the child only waits.
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_forked_during_a_write_keeps_no_lock(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It inherits the descriptor and so the lock, which is released explicitly."""
    children = []
    sync = os.fdatasync

    def fork_and_sync(fd: int) -> None:
        child = os.fork()

        if child == 0:
            signal.pause()

        children.append(child)
        sync(fd)

    async def use() -> None:
        async with Store(home) as cp:
            await cp.append("t", [{}])
            monkeypatch.setattr(os, "fdatasync", fork_and_sync)
            await cp.append("t", [{}])
            monkeypatch.undo()
            assert await asyncio.wait_for(cp.append("t", [{}]), 10) == 3

    try:
        asyncio.run(use())
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    assert len(children) == 1
