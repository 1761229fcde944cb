"""What an operation costs, counted: trips to the thread, commits, fsyncs, bytes."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from conformance.operations import LATER
from cpkit import ToolCall
from cpkit_sqlite import SQLiteCheckpointer, queries
from tests.sqlite.inside import on, reader, writer
from tests.sqlite.syncs import counted

Store = SQLiteCheckpointer[Any]
Operation = Callable[[Store], Coroutine[Any, Any, Any]]

CALL = ToolCall("c", "tool", {}, "key")
OPERATIONS: dict[str, Operation] = {
    "append": lambda cp: cp.append("t", [{}], expected_version=1),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 1, "b": 2}),
    "record_issued": lambda cp: cp.record_issued("t", CALL),
    "record_result": lambda cp: cp.record_result("t", "c", {"ok": True}),
    "trim": lambda cp: cp.trim("t", 1),
    "erase_calls": lambda cp: cp.erase_calls("t", LATER),
    "delete_thread": lambda cp: cp.delete_thread("t"),
    "load": lambda cp: cp.load("t"),
    "read": lambda cp: cp.read("t", -1),
    "find_completed": lambda cp: cp.find_completed("key"),
    "find_call": lambda cp: cp.find_call("key"),
    "list_calls": lambda cp: cp.list_calls("t"),
    "list_threads": lambda cp: cp.list_threads(prefix="t"),
}
CALLS = {"record_issued", "record_result"}
WRITES = {"append", "save_extra", *CALLS, "trim", "erase_calls", "delete_thread"}


@pytest.fixture
async def trips(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The answers of worker threads to the event loop, each the end of one trip."""
    made: list[object] = []
    loop = asyncio.get_running_loop()
    answer = loop.call_soon_threadsafe

    def count(callback: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(callback)
        return answer(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    return made


@pytest.fixture
async def statements(path: str) -> Any:
    """An open store, and the statements that its writer runs."""
    ran: list[str] = []

    async with Store(path) as cp:
        await cp.append("t", [{}])
        await on(writer(cp), lambda db: db.set_trace_callback(ran.append))
        yield cp, ran
        await on(writer(cp), lambda db: db.set_trace_callback(None))


async def test_each_operation_is_one_trip_to_the_worker_thread(
    path: str, trips: list[object]
) -> None:
    """A transaction with several statements is one trip too."""
    async with Store(path) as cp:
        await cp.append("t", [{}])

        for name, operation in OPERATIONS.items():
            trips.clear()
            await operation(cp)
            assert len(trips) == 1, name


async def test_a_lone_append_is_four_statements(
    statements: tuple[Store, list[str]],
) -> None:
    """BEGIN, one look, INSERT, COMMIT, and no query that only looks for damage."""
    cp, ran = statements
    await cp.append("t", [{}], expected_version=1)
    words = [statement.split()[0] for statement in ran]
    assert words == ["BEGIN", "SELECT", "INSERT", "COMMIT"]


async def test_a_load_without_messages_looks_for_none(path: str) -> None:
    """BEGIN, the thread, its extra, its pending calls, ROLLBACK."""
    ran: list[str] = []

    async with Store(path) as cp:
        await cp.append("t", [{}], extra={"a": 1})
        await on(reader(cp), lambda db: db.set_trace_callback(ran.append))
        assert await cp.load_range("t", stop=0) is not None
        await on(reader(cp), lambda db: db.set_trace_callback(None))

    words = [statement.split()[0] for statement in ran]
    assert words == ["BEGIN", *["SELECT"] * 3, "ROLLBACK"]


async def test_a_lone_write_is_one_commit_and_one_sync(
    statements: tuple[Store, list[str]],
) -> None:
    """A write has one COMMIT and one fsync, and a read has none."""
    cp, ran = statements

    with counted(writer(cp).db) as syncs:
        for name, operation in OPERATIONS.items():
            ran.clear()
            await operation(cp)
            assert ran.count("COMMIT") == syncs.take() == (name in WRITES), name


async def test_a_write_that_changes_nothing_syncs_nothing(
    statements: tuple[Store, list[str]],
) -> None:
    """A repeated call, an empty append and a missing thread cost no fsync."""
    cp, _ = statements
    await cp.record_issued("t", CALL)
    await cp.record_result("t", "c", 1)

    with counted(writer(cp).db) as syncs:
        await cp.append("t", [], expected_version=1)
        await cp.record_issued("t", CALL)
        await cp.record_issued("t", ToolCall("other", "tool", {}, "key"))
        await cp.record_result("t", "c", 2)
        await cp.delete_thread("not there")
        await cp.trim("t", 0)
        await cp.trim("not there", 1)
        assert syncs.take() == 0


async def test_a_trim_is_one_delete_and_one_update(
    statements: tuple[Store, list[str]],
) -> None:
    """It finds the messages by a range of keys, however many there are."""
    cp, ran = statements
    await cp.append("t", [{}] * 500)
    ran.clear()
    assert await cp.trim("t", 400) == 400
    words = [statement.split()[0] for statement in ran]
    assert words == ["BEGIN", "SELECT", "DELETE", "UPDATE", "COMMIT"]


async def test_a_thread_of_the_last_messages_takes_the_same_pages(
    path: str, raw: sqlite3.Connection
) -> None:
    """SQLite reuses the pages of messages that were trimmed."""

    async def pages(cp: Store) -> int:
        for _ in range(20):
            version = await cp.append("t", [{"pad": "x" * 1000}] * 20)
            await cp.trim("t", max(0, version - 50))

        return int(raw.execute("PRAGMA page_count").fetchone()[0])

    async with Store(path) as cp:
        first = await pages(cp)
        assert await pages(cp) <= first
        data = await cp.load("t")
        assert data is not None
        assert (data.first, len(data.messages)) == (750, 50)
        (kept,) = raw.execute("SELECT count(*) FROM cpkit_messages").fetchone()
        assert kept == 50


async def test_durability_normal_does_not_sync(path: str) -> None:
    """An append is acknowledged without an fsync."""
    async with Store(path, durability="normal") as cp:
        await cp.append("t", [{}])

        with counted(writer(cp).db) as syncs:
            await cp.append("t", [{}])
            assert syncs.take() == 0


@pytest.mark.parametrize("threads", [1, 64])
async def test_concurrent_writers_share_commits_and_syncs(
    statements: tuple[Store, list[str]], threads: int
) -> None:
    """64 appends at once, to one thread or to many, are one commit or two."""
    cp, ran = statements

    with counted(writer(cp).db) as syncs:
        versions = await asyncio.gather(
            *(cp.append(f"new {i % threads}", [{"i": i}]) for i in range(64))
        )
        assert 1 <= ran.count("COMMIT") == syncs.take() <= 2

    expected = [1] * 64 if threads == 64 else list(range(1, 65))
    assert versions == expected


async def test_a_refused_write_does_not_fail_its_batch(
    statements: tuple[Store, list[str]],
) -> None:
    """The other writes of the batch are done."""
    cp, ran = statements
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
    assert ran.count("COMMIT") <= 2


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs /proc/self/io")
async def test_what_an_append_writes_does_not_grow_with_the_thread(path: str) -> None:
    """It writes as many bytes at 20,000 messages as at none, checkpoints included."""

    def written() -> int:
        with open("/proc/self/io") as file:
            return int(re.findall(r"wchar: (\d+)", file.read())[0])

    async def cost(cp: Store) -> int:
        before = written()

        for _ in range(300):
            await cp.append("t", [{"pad": "x" * 1000}])

        return written() - before

    async with Store(path, durability="normal") as cp:
        await cp.append("t", [{}])
        short = await cost(cp)

        for _ in range(10):
            await cp.append("t", [{"pad": "x" * 1000}] * 2000)

        await on(writer(cp), lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
        long = await cost(cp)

    assert long <= 1.1 * short
    assert long <= 300 * 8000  # as much as a plain table with a clustered key


def plans(raw: sqlite3.Connection) -> dict[str, str]:
    """Return SQLite's plan for every statement of the store."""
    found = {}

    for name, sql in vars(queries).items():
        if name.startswith("_"):
            continue

        for count in range(10):
            try:
                rows = raw.execute(f"EXPLAIN QUERY PLAN {sql}", [None] * count)
            except sqlite3.ProgrammingError:
                continue  # try another number of parameters

            found[name] = "; ".join(row[3] for row in rows)

    return found


async def test_no_statement_scans_a_table(path: str, raw: sqlite3.Connection) -> None:
    """Every statement finds its rows by an index."""
    async with Store(path):
        found = plans(raw)

    assert len(found) > 15

    for name, plan in found.items():
        assert not re.search(r"SCAN cpkit_", plan), (name, plan)

    assert "(thread_id>? AND thread_id<?)" in found["THREADS"]
    assert "TEMP B-TREE" not in found["THREADS"]
    assert "cpkit_calls_attempt (idempotency_key=?)" in found["ATTEMPTS"]
    assert "cpkit_calls_pending (thread_id=?)" in found["PENDING"]


async def test_a_read_works_no_more_beside_100_000_other_messages(path: str) -> None:
    """SQLite's virtual machine makes steps for the thread's own rows alone."""
    reads = ["load", "read", "find_call", "list_threads", "list_calls"]

    async def steps(cp: Store, name: str) -> int:
        taken = []
        step = lambda: taken.append(1)  # noqa: E731  # it must return None
        await on(reader(cp), lambda db: db.set_progress_handler(step, 1))
        await OPERATIONS[name](cp)
        await on(reader(cp), lambda db: db.set_progress_handler(None, 0))
        return len(taken)

    async with Store(path) as cp:
        await cp.append("t", [{"i": i} for i in range(10)])
        await cp.record_issued("t", CALL)
        alone = {name: await steps(cp, name) for name in reads}
        await cp.append("b before", [{}] * 50_000)
        await cp.append("z after", [{}] * 50_000)
        await asyncio.gather(*(cp.append(f"u {i}", [{}]) for i in range(500)))

        for i in range(300):
            call = ToolCall(f"c {i}", "tool", {}, f"key {i}")
            await cp.record_issued(f"u {i}", call)

        for name in reads:
            assert await steps(cp, name) <= alone[name] + 10, name


def test_no_parameter_has_a_number() -> None:
    """Python 3.12.0 to 3.12.3 warns of ``?1``, which is an error under ``-W error``."""
    statements = [sql for name, sql in vars(queries).items() if name.isupper()]
    assert len(statements) > 15
    assert not [sql for sql in statements if re.search(r"\?\d", sql)]
