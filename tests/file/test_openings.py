"""Logs that stay open between operations: never a wrong one, never too many."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpkit import CorruptThread, ToolCall
from cpkit_file import FileCheckpointer
from cpkit_file import log as log_module
from tests.file.conftest import open_files
from tests.file.worker import Worker

Store = FileCheckpointer[Any]

needs_proc = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="needs /proc"
)


async def test_a_log_begun_anew_by_another_process_is_found(
    home: Path, workers: Callable[[int], list[Worker]]
) -> None:
    """Writes and reads go to what has the log's name by then, not to what had it."""
    (worker,) = workers(1)

    async with Store(home) as cp:
        for use in (cp.load, cp.read, lambda t: cp.append(t, [])):
            await cp.append("t", [{"old": 1}] * 3)
            assert await asyncio.to_thread(worker.ask, "begin_anew", str(home)) == 1
            await use("t")
            assert await cp.append("t", [{"new": 1}], expected_version=1) == 2
            assert await cp.read("t") == [{"by": worker.process.pid}, {"new": 1}]


async def test_a_log_deleted_by_another_handle_is_made_anew(home: Path) -> None:
    """Also where calls were kept, or where nothing came after the deletion."""
    async with Store(home) as cp, Store(home) as other:
        for forget_keys in (True, False, True):
            await cp.append("t", [{"old": 1}])
            await other.delete_thread("t", forget_keys=forget_keys)
            assert await cp.load("t") is None
            assert await cp.append("t", [{"new": 1}], expected_version=0) == 1
            assert await other.read("t") == [{"new": 1}]
            await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))
            await other.delete_thread("t", forget_keys=forget_keys)
            assert await cp.append("t", [{"new": 2}], expected_version=0) == 1
            await other.delete_thread("t", forget_keys=True)


async def test_a_folder_that_was_moved_away_is_not_written(home: Path) -> None:
    """What is open still has its inode; the name is what counts."""
    async with Store(home) as cp:
        await cp.append("t", [{"old": 1}])
        (home / "threads").rename(home / "moved")
        (home / "threads").mkdir()
        assert await cp.load("t") is None
        assert await cp.append("t", [{"new": 1}]) == 1
        assert await cp.read("t") == [{"new": 1}]

    (moved,) = (home / "moved").iterdir()
    assert b"new" not in moved.read_bytes()


@needs_proc
async def test_no_more_logs_than_a_few_stay_open(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more threads in use than that, at once too, all goes on as ever."""
    monkeypatch.setattr(log_module, "FILES_KEPT_OPEN", 4)

    async with Store(home, durability="normal") as cp:
        for round_ in range(5):
            versions = await asyncio.gather(
                *(cp.append(f"t{i}", [{}]) for i in range(40))
            )
            assert versions == [round_ + 1] * 40
            found = await asyncio.gather(*(cp.read(f"t{i % 5}") for i in range(40)))
            assert found == [[{}] * (round_ + 1)] * 40
            assert len(open_files(home)) <= 4

        # A page of them does not take the place of those that are in use.
        before = open_files(home)
        assert len(await cp.list_threads()) == 40
        assert set(open_files(home)) <= set(before)

    assert not open_files(home)


@needs_proc
async def test_what_is_kept_open_makes_room_where_descriptors_run_out(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody uses is never the reason why an operation has none."""
    original = os.open

    def scarce(*args: Any) -> int:
        if open_files(home):
            raise OSError(errno.EMFILE, "Too many open files")

        return original(*args)

    async with Store(home, durability="normal") as cp:
        for i in range(5):
            await cp.append(f"t{i}", [{}])

        monkeypatch.setattr(os, "open", scarce)
        assert await cp.append("new", [{}]) == 1
        assert await cp.append("t0", [{}]) == 2
        assert len(await cp.read("t1")) == 1


@needs_proc
async def test_a_log_that_is_read_and_written_at_once_is_kept_once(home: Path) -> None:
    """Each has an opening of its own meanwhile, because a lock belongs to one."""
    async with Store(home, durability="normal") as cp:
        await cp.append("t", [{"i": 0}])

        for i in range(1, 20):
            found, *_ = await asyncio.gather(
                cp.read("t"), cp.append("t", [{"i": i}]), cp.load("t"), cp.read("t")
            )
            assert found == [{"i": n} for n in range(len(found))]
            assert len(open_files(home / "threads")) == 1

        assert len(await cp.read("t")) == 20


@needs_proc
async def test_what_was_open_in_an_operation_that_failed_is_closed(
    home: Path, log: Path
) -> None:
    """Nobody goes on with a lock, or with what was thought of a log, after an error."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        assert open_files(log.parent) == [str(log)]

        with log.open("ab") as file:
            file.write(b"no line\n")

        for use in (cp.append("t", [{}]), cp.load("t")):
            with pytest.raises(CorruptThread):
                await use

            assert not open_files(home / "threads")


# From Python 3.12 on, because other threads are running; the child only waits.
@pytest.mark.filterwarnings("ignore:.*fork")
async def test_a_forked_child_that_ends_takes_no_lock_along(
    home: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It inherits what is open between operations, and with it the lock of the next."""
    sync = os.fdatasync

    def end_child_and_sync(fd: int) -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

        with log.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        sync(fd)

    async with Store(home) as cp:
        await cp.append("t", [{}])
        child = os.fork()

        if child == 0:
            signal.pause()

        monkeypatch.setattr(os, "fdatasync", end_child_and_sync)
        assert await cp.append("t", [{}]) == 2
        monkeypatch.undo()

        async with Store(home) as other:
            assert await asyncio.wait_for(other.append("t", [{}]), 10) == 3
