"""Many processes in one folder: they open and write it, are stopped and killed."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, CheckpointData, ToolCall
from cpkit_file import FileCheckpointer
from cpkit_file.schema import register_name
from tests.processes import Workers
from tests.sweeps import sweep

Store = FileCheckpointer[Any]


def loaded(home: Path, thread_id: str) -> CheckpointData[dict[str, Any]]:
    async def load() -> CheckpointData[Any] | None:
        async with Store(home) as cp:
            return await cp.load(thread_id)

    data = asyncio.run(load())
    assert data is not None
    return data


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
        assert second.ask("append_one", f"file://{home}") == 1
        second.tell("append_big_for_ever", str(home))
        assert second.answer() == version + 1
        second.kill()
        assert log.with_name(f"{log.name}.torn").exists() or not torn

        for file in log.parent.iterdir():
            file.unlink()


async def load_beside(home: Path, two: list[Any], count: int) -> tuple[Any, Any]:
    """Load the thread while two processes use it, and once after they were killed.

    Returns what they reported, and the loads.
    """
    said, seen = [worker.answer() for worker in two], []

    async with Store(home) as cp:
        for worker in two * count:
            seen += [await cp.load("t"), await cp.load_range("t", -2)]
            said.append(await asyncio.to_thread(worker.answer))

        said += [line for worker in two for line in worker.kill()]
        seen.append(await cp.load("t"))

    return said, seen


@pytest.mark.parametrize("rounds", sweep([1, 5], [1]))
def test_a_trim_beside_appends_and_loads_is_done_or_not_done(
    home: Path, workers: Workers, rounds: int
) -> None:
    """Two processes append and trim, another one loads, and the two are killed.

    Nothing newer than the cut is lost, nothing older comes back, and each message
    stays at its position, whichever file has it.
    """
    first = 0

    for round_ in range(rounds):
        two = workers(2)

        for n, worker in enumerate(two):
            worker.tell("trim_for_ever", f"file://{home}", f"w{round_}.{n}", 5)

        said, seen = asyncio.run(load_beside(home, two, 10 + round_))

        for data in seen:
            assert first <= data.first == data.version - len(data.messages)
            halves = [message["half"] for message in data.messages]
            assert halves == [n % 2 for n in range(data.first, data.version)]

        firsts = [data.first for data in seen if len(data.messages) > 2]
        assert firsts == sorted(firsts)
        # One append and one trim of each process can be stored without an answer.
        first, version = seen[-1].first, seen[-1].version
        last = {kind: max(at for one, at in said if one == kind) for kind, _ in said}
        assert last["append"] <= version <= last["append"] + 4
        assert last["trim"] <= first <= version


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


async def test_a_stopped_writer_does_not_stop_readers(home: Path, log: Path) -> None:
    """Not of its thread either: a read takes no lock."""
    call = ToolCall("c", "tool", {}, "key")

    async with Store(home) as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", call)

    # A lock of another file description acts as one of another process.
    with log.open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)

        async with Store(home) as cp:
            assert await cp.read("t") == [{}]
            assert await cp.find_call("key") is not None
            assert await cp.record_issued("u", ToolCall("d", "tool", {}, "key"))
            assert len(await cp.list_threads()) == 1

            async with cp.watch() as changes:
                await cp.append("other", [{}])
                assert await anext(changes) == "other"


async def test_no_operation_waits_longer_than_the_timeout(
    home: Path, log: Path
) -> None:
    """Nothing was written, and the handle works when the lock is released."""
    call = ToolCall("c", "tool", {}, "key")
    register = home / "used-keys" / register_name("key")

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
            ),
            register: (lambda: cp.record_issued("u", call),),
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
