"""What an operation costs, counted and not timed: thread hops, syncs, bytes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from conformance.operations import LATER
from cpkit import ToolCall
from cpkit_file import FileCheckpointer
from cpkit_file.lines import SEAL
from cpkit_file.schema import log_name
from cpkit_file.workers import Workers
from tests.tracing import needs_strace, traced

Store = FileCheckpointer[Any]
Operation = Callable[[Store], Coroutine[Any, Any, Any]]

CALL = ToolCall("c", "tool", {}, "key")
# Each with its syncs: of files, and of the folder where a name is new.
OPERATIONS: dict[str, tuple[int, Operation]] = {
    "append": (1, lambda cp: cp.append("t", [{}], expected_version=1)),
    "first append": (2, lambda cp: cp.append("new", [{}, {}])),
    "save_extra": (1, lambda cp: cp.save_extra("t", {"a": 1, "b": 2})),
    "record_issued": (2, lambda cp: cp.record_issued("t", CALL)),
    "record_result": (1, lambda cp: cp.record_result("t", "c", {"ok": True})),
    "erase_calls": (2, lambda cp: cp.erase_calls("t", LATER)),
    "trim": (2, lambda cp: cp.trim("t", 1)),
    "delete_thread": (2, lambda cp: cp.delete_thread("t")),
    "load": (0, lambda cp: cp.load("new")),
    "read": (0, lambda cp: cp.read("new", -1)),
    "find_completed": (0, lambda cp: cp.find_completed("key")),
    "find_call": (0, lambda cp: cp.find_call("key")),
    "list_calls": (0, lambda cp: cp.list_calls("t")),
    "list_threads": (0, lambda cp: cp.list_threads(prefix="t")),
}


class Counted:
    """Counts of what the store did since the last `take`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs = self.bytes_read = self.bytes_written = self.writes = 0
        fdatasync, fsync, pread, write = os.fdatasync, os.fsync, os.pread, os.write

        def count_fdatasync(fd: int) -> None:
            self.syncs += 1
            fdatasync(fd)

        def count_fsync(fd: int) -> None:
            self.syncs += 1
            fsync(fd)

        def count_pread(fd: int, length: int, offset: int) -> bytes:
            found = pread(fd, length, offset)
            self.bytes_read += len(found)
            return found

        def count_write(fd: int, data: bytes) -> int:
            self.writes += 1
            self.bytes_written += len(data)
            return write(fd, data)

        monkeypatch.setattr(os, "fdatasync", count_fdatasync)
        monkeypatch.setattr(os, "fsync", count_fsync)
        monkeypatch.setattr(os, "pread", count_pread)
        monkeypatch.setattr(os, "write", count_write)

    def take(self) -> Counted:
        """Return the counts, and start again from zero."""
        taken = Counted.__new__(Counted)
        taken.__dict__.update(self.__dict__)
        self.syncs = self.bytes_read = self.bytes_written = self.writes = 0
        return taken


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def trips_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of jobs of each trip to a worker thread."""
    made: list[int] = []
    land = Workers._land

    def count(workers: Workers, done: list[Any]) -> None:
        made.append(len(done))
        land(workers, done)

    monkeypatch.setattr(Workers, "_land", count)
    return made


async def test_each_operation_is_one_call_in_a_worker_thread(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of files that it opens does not matter."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        trips = trips_of(monkeypatch)

        for name, (_, operation) in OPERATIONS.items():
            trips.clear()
            await operation(cp)
            assert trips == [1], name


async def test_a_write_is_one_sync_of_its_log(home: Path, counted: Counted) -> None:
    """A claim is two, and a new name is one more."""
    async with Store(home) as cp:
        await cp.append("t", [{}])

        for name, (syncs, operation) in OPERATIONS.items():
            counted.take()
            await operation(cp)
            taken = counted.take()
            assert taken.syncs == syncs, name
            assert taken.writes == (2 if name == "record_issued" else syncs > 0), name


async def test_a_claim_after_a_failure_in_another_thread_syncs_that_too(
    home: Path, counted: Counted
) -> None:
    """Its writer may have been killed before the sync."""
    async with Store(home) as cp:
        await cp.record_issued("t", CALL)
        await cp.record_result("t", "c", "declined", success=False)
        await cp.append("u", [{}])
        counted.take()
        await cp.record_issued("u", CALL)
        assert counted.take().syncs == 3
        await cp.record_result("u", "c", "declined", success=False)
        counted.take()
        await cp.record_issued("u", ToolCall("d", "tool", {}, "key"))
        assert counted.take().syncs == 2


async def test_a_write_that_changes_nothing_syncs_nothing(
    home: Path, counted: Counted
) -> None:
    """A repeated call costs less than the first one."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", CALL)
        await cp.record_result("t", "c", 1)
        counted.take()

        await cp.append("t", [], expected_version=1)
        await cp.record_issued("t", CALL)
        await cp.record_issued("t", ToolCall("other", "tool", {}, "key"))
        await cp.record_result("t", "c", 2)
        await cp.trim("t", 0)
        await cp.trim("not there", 1)
        taken = counted.take()
        assert (taken.syncs, taken.writes) == (0, 0)

        # A killed process may have removed it, and not synced that.
        await cp.delete_thread("not there")
        taken = counted.take()
        assert (taken.syncs, taken.writes) == (1, 0)


async def test_concurrent_appends_to_one_thread_share_a_sync(
    home: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 at once are one write, one sync and one thread hop, in the order of calls."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        trips = trips_of(monkeypatch)
        counted.take()
        versions = await asyncio.gather(
            *(cp.append("t", [{"i": i}]) for i in range(64))
        )
        taken = counted.take()
        assert (taken.syncs, taken.writes, trips) == (1, 1, [1])
        assert versions == list(range(2, 66))
        assert [m["i"] for m in await cp.read("t", 1)] == list(range(64))


async def test_appends_to_many_threads_share_trips(
    home: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 at once are 4 trips to worker threads, and a sync for each log."""
    async with Store(home) as cp:
        for i in range(200):
            await cp.append(f"t{i}", [{}])

        trips = trips_of(monkeypatch)
        counted.take()
        versions = await asyncio.gather(*(cp.append(f"t{i}", [{}]) for i in range(200)))
        assert versions == [2] * 200
        assert trips == [50] * 4
        assert counted.take().syncs == 200


async def test_a_refused_write_does_not_fail_others_of_its_batch(home: Path) -> None:
    """The other writes of the batch are stored."""
    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}])
        outcomes = await asyncio.gather(
            cp.append("t", [{"n": 2}], expected_version=1),
            cp.append("t", [{"n": 3}], expected_version=1),
            cp.record_result("t", "never issued", 1),
            cp.append("t", [{"n": 4}]),
            return_exceptions=True,
        )
        assert [type(outcome).__name__ for outcome in outcomes] == [
            "int",
            "VersionConflict",
            "UnknownCall",
            "int",
        ]
        assert await cp.read("t", 1) == [{"n": 2}, {"n": 4}]


async def test_two_results_of_a_call_in_one_batch_are_written_once(home: Path) -> None:
    """The second one returns the first, which is not in the log yet."""
    async with Store(home) as cp:
        await cp.record_issued("t", CALL)
        records = await asyncio.gather(
            *(cp.record_result("t", "c", i, success=i > 0) for i in range(5))
        )
        assert {(r.status, r.result) for r in records} == {("failed", 0)}
        assert await cp.list_calls("t") == [records[0]]


# Bytes

MESSAGE = {"role": "assistant", "content": "x" * 990}
SIZE = len(b'{"role":"assistant","content":""}') + 990


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose thread ``t`` has 10,000 messages, and ``short`` two."""
    home = tmp_path_factory.mktemp("long") / "store"

    async def write() -> None:
        async with Store(home) as cp:
            await cp.append("short", [MESSAGE])

            for count in [250] * 39 + [249]:
                await asyncio.gather(*(cp.append("t", [MESSAGE]) for _ in range(count)))

            await cp.append("t", [MESSAGE])
            await cp.append("short", [MESSAGE])

    asyncio.run(write())
    return home


@pytest.fixture
def long(written: Path, home: Path) -> Path:
    """A copy of ``written``."""
    return shutil.copytree(written, home)


async def test_an_append_costs_the_same_in_a_thread_of_any_length(
    long: Path, counted: Counted
) -> None:
    """The first append reads the end of the log.

    A later one reads the seal of the last line that it knows.
    """
    costs = []

    for thread_id in ("short", "t"):
        async with Store(long) as cp:
            counted.take()
            await cp.append(thread_id, [MESSAGE])
            assert counted.take().bytes_read < 4500
            await cp.append(thread_id, [MESSAGE])
            costs.append(counted.take())

    assert [cost.bytes_read for cost in costs] == [SEAL, SEAL]
    # What the floor writes is the message and a newline.
    assert costs[1].bytes_written <= 1.05 * (SIZE + 1)
    assert costs[1].bytes_written - costs[0].bytes_written == len("10002") - len("4")


async def test_reading_a_range_reads_only_that_range(
    long: Path, counted: Counted
) -> None:
    """Anywhere in the thread, once the handle has read the log."""
    async with Store(long) as cp:
        await cp.read("t", -1)
        size = sum(path.stat().st_size for path in (long / "threads").iterdir())
        assert counted.take().bytes_read < 1.1 * size

        for start, stop in [(0, 1), (5_000, 5_003), (-1, None), (-6_000, -5_999)]:
            counted.take()
            found = await cp.load_range("t", start, stop)
            assert found is not None
            assert len(found.messages) == len(range(10_000)[start:stop])
            assert counted.take().bytes_read < 300_000

        counted.take()
        await cp.read("t", 2_000, 3_000)
        assert counted.take().bytes_read < 300_000 + 2 * 1000 * SIZE


async def test_a_trim_costs_what_is_left(long: Path, counted: Counted) -> None:
    """So do a load after it, and a trim after each append, in any handle."""
    async with Store(long) as cp, Store(long) as other:
        await other.read("t", 0, 1)
        assert await cp.trim("t", 9_990) == 9_990
        size = (long / "threads" / log_name("t")).stat().st_size
        assert size < 10 * SIZE + 2000

        for version in range(10_001, 10_011):
            counted.take()
            data = await other.load("t")
            assert data is not None
            assert (data.first, len(data.messages)) == (version - 11, 10)
            assert await cp.append("t", [MESSAGE]) == version
            assert await cp.trim("t", version - 10) == 1
            taken = counted.take()
            assert taken.bytes_read < 5 * size
            assert taken.bytes_written < 1.1 * size + 2 * SIZE


async def test_listing_threads_reads_no_payload(home: Path, counted: Counted) -> None:
    """It reads the first and last lines of each log, and later only of changed logs."""
    async with Store(home) as cp:
        for i in range(20):
            await cp.append(f"u{i}", [{"pad": "x" * 100_000}])
            await cp.append(f"u{i}", [{}])
            await cp.record_issued(f"e{i}", ToolCall("c", "tool", {}, f"key {i}"))
            await cp.delete_thread(f"e{i}")

    async with Store(home) as cp:
        for _ in range(2):
            counted.take()
            assert len(await cp.list_threads()) == 20
            assert counted.take().bytes_read < 40 * 12_000

        assert len(await cp.list_threads(erased=True)) == 40
        counted.take()
        assert len(await cp.list_threads()) == 20
        assert len(await cp.list_threads(erased=True)) == 40
        assert counted.take().bytes_read == 0
        await cp.append("u7", [{}])
        counted.take()
        assert (await cp.list_threads(prefix="u7"))[0].version == 3
        assert counted.take().bytes_read < 12_000


async def test_finding_a_call_reads_only_what_is_new(
    long: Path, counted: Counted
) -> None:
    """A handle reads each line of a log once, also those of other processes."""
    async with Store(long) as cp:
        await cp.record_issued("t", CALL)

    async with Store(long) as cp, Store(long) as other:
        assert await cp.find_call("key") is not None
        counted.take()
        assert await cp.find_call("key") is not None
        assert counted.take().bytes_read < 200
        await other.append("t", [MESSAGE] * 20)
        counted.take()
        record = await cp.record_result("t", "c", {"ok": True})
        # To check that the last write is complete, and to look for calls in it.
        assert counted.take().bytes_read < 80_000
        assert await cp.find_completed("key") == record


async def test_a_load_reads_each_byte_once(home: Path, counted: Counted) -> None:
    """The args and results of calls that are not pending are not read again."""
    async with Store(home) as cp:
        for i in range(10):
            call = ToolCall(f"c{i}", "tool", {"x": "x" * 5000}, f"key {i}")
            await cp.record_issued("t", call)
            await cp.record_result("t", call.call_id, "x" * 5000)

        await cp.record_issued("t", CALL)
        await cp.load("t")
        counted.take()
        data = await cp.load("t")
        assert data is not None
        assert [record.call for record in data.pending] == [CALL]
        (log,) = (home / "threads").iterdir()
        assert counted.take().bytes_read < log.stat().st_size + 1000


async def test_a_load_of_a_new_handle_is_one_pass(home: Path, counted: Counted) -> None:
    """It learns where calls and extra are while it reads the messages."""
    async with Store(home) as cp:
        for _ in range(10):
            await asyncio.gather(*(cp.append("t", [MESSAGE]) for _ in range(100)))

        await cp.append("t", [MESSAGE])

    async with Store(home) as cp:
        counted.take()
        data = await cp.load("t")
        assert data is not None
        assert data.version == 1001
        (log,) = (home / "threads").iterdir()
        assert counted.take().bytes_read < 1.01 * log.stat().st_size + 3000


# Checked by a tracer


@needs_strace
async def test_the_kernel_syncs_before_the_answer(home: Path) -> None:
    """strace shows it: each line is written, synced, and then acknowledged."""
    script = f"""
import asyncio, os
from cpkit import ToolCall
from cpkit_file import FileCheckpointer

async def main():
    async with FileCheckpointer({str(home)!r}) as cp:
        for i in range(3):
            await cp.append("t", [{{"i": i}}])
            os.write(1, b"acknowledged an append")
        await cp.record_issued("t", ToolCall("c", "tool", {{}}, "key"))
        os.write(1, b"acknowledged a claim")

asyncio.run(main())
"""
    lines = await asyncio.to_thread(
        traced, "write,fdatasync,fsync", sys.executable, "-c", script
    )
    steps = re.findall(
        r'write\(1, "(acknowledged \w+ \w+)|(fsync|fdatasync)\(|'
        r'write\(\d+, "\{\\"(thread|add|call|key)',
        "\n".join(lines),
    )
    said = ["".join(step) for step in steps]
    first = said.index("thread")
    assert said[first - 1 :] == [
        *("fsync", "thread", "fdatasync", "acknowledged an append"),
        *("add", "fdatasync", "acknowledged an append"),
        *("add", "fdatasync", "acknowledged an append"),
        *("key", "fdatasync", "call", "fdatasync", "acknowledged a claim"),
    ]
