"""Many processes open and write one file, and some are killed or stopped."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CheckpointData,
    open_checkpointer,
)
from cpkit_sqlite import SQLiteCheckpointer
from tests.processes import Workers
from tests.sweeps import sweep


def loaded(url: str, thread_id: str) -> CheckpointData[dict[str, Any]]:
    async def load() -> CheckpointData[Any] | None:
        async with open_checkpointer(url) as cp:
            return await cp.load(thread_id)

    data = asyncio.run(load())
    assert data is not None
    return data


def test_bytes_after_the_last_commit_of_the_log_are_ignored(
    tmp_path: Path, workers: Workers
) -> None:
    """A crash in a write leaves such bytes; no commit is lost."""
    path = tmp_path / "agent.db"
    (worker,) = workers(1)
    worker.tell("write_for_ever", f"sqlite:///{path}", "w")
    acknowledged = [worker.answer() for _ in range(9)] + worker.kill()
    last = max(line[1] for line in acknowledged if line[0] == "append")

    with Path(f"{path}-wal").open("ab") as wal:
        wal.write(b"\x37\x7f\x06\x82" * 2000)

    before = loaded(f"sqlite:///{path}", "t").version
    assert before - last in (0, 2)
    worker.close()
    (second,) = workers(1)
    second.ask("append_one", f"sqlite:///{path}")
    assert loaded(f"sqlite:///{path}", "shared").version == 1
    assert loaded(f"sqlite:///{path}", "t").version == before


@pytest.mark.parametrize("rounds", sweep([1, 5], [1]))
def test_a_trim_of_a_killed_process_is_done_or_not_done(
    tmp_path: Path, workers: Workers, rounds: int
) -> None:
    """Nothing newer than the cut is lost, and nothing older comes back.

    Two processes append and trim one thread meanwhile, and this one loads it.
    """
    url, first = f"sqlite:///{tmp_path}/agent.db", 0

    for round_ in range(rounds):
        both = workers(2)

        for n, worker in enumerate(both):
            worker.tell("trim_for_ever", url, f"w{round_}.{n}", 5)

        said = [worker.answer() for worker in both for _ in range(20 + 7 * round_)]
        seen = [loaded(url, "t")]
        said += [line for worker in both for line in worker.kill()]
        seen.append(loaded(url, "t"))

        for data in seen:
            assert data.version == data.first + len(data.messages)
            assert first <= data.first
            first = data.first
            halves = [message["half"] for message in data.messages]
            assert halves == [n % 2 for n in range(data.first, data.version)]

        # One append and one trim of each process can be stored without an answer.
        last = {kind: max(at for one, at in said if one == kind) for kind, _ in said}
        assert last["append"] <= seen[1].version <= last["append"] + 4
        assert last["trim"] <= first <= seen[1].version


async def test_a_file_locked_too_long_is_unavailable_and_then_works_again(
    path: str,
) -> None:
    """``busy_timeout`` ends the wait, nothing was written, and reads do not wait."""
    async with SQLiteCheckpointer[Any](path, busy_timeout=0.05) as cp:
        await cp.append("t", [{"n": 1}])
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        for write in (
            cp.append("t", [{"n": 2}]),
            cp.save_extra("t", {"k": 1}),
            cp.delete_thread("t"),
        ):
            with pytest.raises(BackendUnavailable, match="busy_timeout") as raised:
                await write

            assert raised.value.maybe_applied is False
            assert isinstance(raised.value.__cause__, sqlite3.OperationalError)

        data = await cp.load("t")
        assert data is not None
        assert (data.messages, data.extra) == ([{"n": 1}], {})

        other.execute("ROLLBACK")
        other.close()
        assert await cp.append("t", [{"n": 2}]) == 2


async def test_a_lock_within_the_timeout_is_waited_for(path: str) -> None:
    """The append waits for the other writer, and reads go on."""
    async with SQLiteCheckpointer[Any](path) as cp:
        await cp.append("t", [{}])
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(cp.append("t", [{}]))
        reads = [await cp.load("t") for _ in range(5)]
        assert [read and read.version for read in reads] == [1] * 5
        assert not waiting.done()

        other.execute("COMMIT")
        other.close()
        assert await waiting == 2


async def test_a_stopped_process_blocks_writes_for_busy_timeout(
    path: str, workers: Workers
) -> None:
    """Every write is refused in time, loads go on, and a kill ends it."""
    async with SQLiteCheckpointer[Any](path, busy_timeout=0.1) as cp:
        await cp.append("t", [{"n": 1}])
        (worker,) = workers(1)
        worker.tell("stop_in_a_commit", path)
        assert await asyncio.to_thread(worker.answer) == "stopping"

        for _ in range(2):
            with pytest.raises(BackendUnavailable, match="busy_timeout") as raised:
                await cp.append("t", [{}])

            assert raised.value.maybe_applied is False
            assert await cp.read("t") == [{"n": 1}]

        worker.kill()
        assert await cp.append("t", [{"n": 2}]) == 2


FORKED = """
import os, sys, warnings
from cpkit.errors import BackendUnavailable
from cpkit.sync import SyncCheckpointer

warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks
path, other = sys.argv[1:]
parent = SyncCheckpointer(f"sqlite:///{path}").__enter__()
parent.append("t", [{}])
child = os.fork()

if child == 0:
    try:
        with SyncCheckpointer(f"sqlite:///{other}") as cp:
            cp.append("t", [{}])

        with SyncCheckpointer(f"sqlite:///{path}"):
            os._exit(1)
    except BackendUnavailable as exc:
        os._exit(0 if "before os.fork()" in str(exc) else 2)
    finally:
        os._exit(3)

assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
parent.close()

# A file that is closed at the fork is as any other one.
child = os.fork()

if child == 0:
    with SyncCheckpointer(f"sqlite:///{path}") as cp:
        os._exit(cp.append("t", [{}]))

assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_does_not_open_a_file_that_its_parent_had_open(
    tmp_path: Path,
) -> None:
    """Its writes would be lost when the parent closes, because SQLite has no lock."""
    paths = [str(tmp_path / "agent.db"), str(tmp_path / "other.db")]
    command = [sys.executable, "-c", FORKED, *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
