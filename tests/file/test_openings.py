"""Which file an operation opens, and that it is closed and unlocked afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cpkit import BackendUnavailable, CorruptThread, ToolCall
from cpkit.driver import StoreFailure
from cpkit_file import FileCheckpointer
from tests.file.conftest import open_files
from tests.processes import Workers

Store = FileCheckpointer[Any]

needs_proc = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="needs /proc"
)


async def test_a_log_that_another_process_replaced_is_found(
    home: Path, workers: Workers
) -> None:
    """Writes and reads go to the file that has the log's name now."""
    (worker,) = workers(1)

    async with Store(home) as cp:
        for use in (cp.load, cp.read, lambda t: cp.append(t, [])):
            await cp.append("t", [{"old": 1}] * 3)
            assert await asyncio.to_thread(worker.ask, "begin_again", str(home)) == 1
            await use("t")
            assert await cp.append("t", [{"new": 1}], expected_version=1) == 2
            assert await cp.read("t") == [{"by": worker.process.pid}, {"new": 1}]


async def test_a_log_deleted_by_another_handle_is_created_again(home: Path) -> None:
    """With and without calls that were kept."""
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
    """The folder's name counts, not its inode."""
    async with Store(home) as cp:
        await cp.append("t", [{"old": 1}])
        (home / "threads").rename(home / "moved")
        (home / "threads").mkdir()
        assert await cp.load("t") is None
        assert await cp.append("t", [{"new": 1}]) == 1
        assert await cp.read("t") == [{"new": 1}]

    (moved,) = (home / "moved").iterdir()
    assert b"new" not in moved.read_bytes()


async def test_a_folder_that_is_missing_is_unavailable(home: Path) -> None:
    """It was unmounted or moved away: that says nothing of a thread or a key."""
    away = home.with_name("away")

    async with Store(home) as cp:
        await cp.record_issued("t", ToolCall("c", "pay", {}, "key"))
        paid = await cp.record_result("t", "c", 1)
        home.rename(away)

        async def watch() -> None:
            async with cp.watch("t"):
                pass

        for use in (
            lambda: cp.load("t"),
            lambda: cp.read("t"),
            lambda: cp.find_completed("key"),
            lambda: cp.find_call("never claimed"),
            lambda: cp.list_calls("t"),
            lambda: cp.dump_thread("t"),
            lambda: cp.list_threads(),
            lambda: cp.append("t", [{}]),
            lambda: cp.record_issued("u", ToolCall("c", "pay", {}, "key")),
            lambda: cp.delete_thread("t"),
            lambda: watch(),
        ):
            with pytest.raises(BackendUnavailable, match="No such file"):
                await use()

        away.rename(home)
        assert await cp.find_completed("key") == paid
        assert await cp.load("u") is None


async def test_a_listener_whose_folder_is_moved_raises_the_error_of_the_driver_kit(
    home: Path,
) -> None:
    """So it is logged in one line, and the handle listens again."""
    async with Store(home) as cp:
        store: Any = cp.store
        heard = asyncio.Event()
        listening = asyncio.create_task(store.listen(lambda _: heard.set()))
        await heard.wait()
        (home / "threads").rename(home / "moved")

        with pytest.raises(StoreFailure, match="No such file"):
            await listening

        with pytest.raises(StoreFailure, match="No such file"):
            await store.listen(lambda _: None)


@needs_proc
async def test_no_file_stays_open_after_an_operation(home: Path, log: Path) -> None:
    """Not after one that failed either, so that no lock is left."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))
        await cp.load("t")
        assert not open_files(home)

        with log.open("ab") as file:
            file.write(b"no line\n")

        for use in (cp.append("t", [{}]), cp.load("t")):
            with pytest.raises(CorruptThread):
                await use

            assert not open_files(home)


# From Python 3.12 on, because other threads are running; the child only waits.
@pytest.mark.filterwarnings("ignore:.*fork")
async def test_a_child_forked_during_a_write_does_not_keep_the_lock(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It inherits the open log; the lock is released explicitly."""
    sync = os.fdatasync
    children: list[int] = []

    def fork_and_sync(fd: int) -> None:
        children.append(os.fork())

        if children[-1] == 0:
            signal.pause()

        sync(fd)

    async with Store(home) as cp, Store(home) as other:
        monkeypatch.setattr(os, "fdatasync", fork_and_sync)

        try:
            assert await cp.append("t", [{}]) == 1
            monkeypatch.undo()
            assert await other.append("t", [{}]) == 2
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                await asyncio.to_thread(os.waitpid, child, 0)
