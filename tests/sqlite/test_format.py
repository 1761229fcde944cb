"""The stored format, frozen: version 1 is written and read as it was."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cpkit import CallRecord, CheckpointData, ThreadInfo, ToolCall
from cpkit_sqlite import SQLiteCheckpointer, store

Store = SQLiteCheckpointer[Any]

# It changes with a new schema version and a migration only.
VERSION_1 = Path(__file__).with_name("version_1.sql")

SECOND = 1_000_000


def at(seconds: int) -> datetime:
    return datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that moves by one second each time it is read."""
    now = [int(at(0).timestamp()) * SECOND]

    def tick() -> int:
        now[0] += SECOND
        return now[0]

    monkeypatch.setattr(store, "_now", tick)
    return now


async def write_one_of_each(cp: Store) -> None:
    await cp.append("thread é", [{"role": "user", "content": "é\0'"}, {"n": 10**20}])
    await cp.save_extra("thread é", {"plan": [1.5, None], "": {}})
    await cp.save_extra("only extra", {"k": True})
    await cp.record_issued("thread é", ToolCall("c1", "pay", {"a": 1}, "key 1"))
    await cp.record_issued("thread é", ToolCall("c2", "pay", {}, "key 2"))
    await cp.record_result("thread é", "c1", {"ok": True})
    await cp.record_result("thread é", "c2", "no", success=False)
    await cp.record_issued("thread é", ToolCall("c3", "pay", {}, "key 2"))
    await cp.append("deleted", [{}])
    await cp.record_issued("deleted", ToolCall("c4", "pay", {"b": 2}, "key 3"))
    await cp.delete_thread("deleted")


async def test_the_stored_format_is_unchanged(
    path: str, raw: sqlite3.Connection, clock: list[int]
) -> None:
    """Tables, indexes and rows of each kind are equal byte for byte."""
    async with Store(path) as cp:
        await write_one_of_each(cp)

    assert "\n".join(raw.iterdump()) + "\n" == VERSION_1.read_text()


async def test_a_file_of_version_1_is_read(path: str, raw: sqlite3.Connection) -> None:
    """Messages, extra, calls and times come back."""
    raw.executescript(VERSION_1.read_text())

    async with Store(path) as cp:
        pending = ToolCall("c3", "pay", {}, "key 2")
        assert await cp.load("thread é") == CheckpointData(
            [{"role": "user", "content": "é\0'"}, {"n": 10**20}],
            {"plan": [1.5, None], "": {}},
            [CallRecord("thread é", pending, "issued", 2, at(8), None, None)],
            2,
        )
        assert await cp.list_threads() == [
            ThreadInfo("only extra", 0, at(3), at(3)),
            ThreadInfo("thread é", 2, at(1), at(8)),
        ]
        calls = await cp.list_calls("thread é")
        assert [(c.status, c.attempt, c.result) for c in calls] == [
            ("completed", 1, {"ok": True}),
            ("failed", 1, "no"),
            ("issued", 2, None),
        ]
        erased = await cp.find_call("key 3")
        assert erased == CallRecord(
            "deleted",
            ToolCall("c4", "pay", {}, "key 3"),
            "issued",
            1,
            at(10),
            None,
            None,
            erased=True,
        )


async def test_pages_of_threads_are_cut_by_prefix_and_last_id(path: str) -> None:
    """Pages are what Python's comparison of the ids gives."""
    ids = [
        "a",
        "a\x01",
        "aa",
        "a\x7f",
        "a\x80",
        "b",
        "é",
        "\ud7ff",
        "\ue000",
        "\U0010ffff",
    ]
    ids += ["\U0010ffff\U0010ffff", "a\U0010ffff", "a\U0010ffffb", "A", "%", "_", "a%"]

    async with Store(path) as cp:
        for thread_id in ids:
            await cp.append(thread_id, [{}])

        for prefix in ["", *ids]:
            for after in [None, *ids]:
                page = await cp.list_threads(prefix=prefix, after=after, limit=5)
                assert [thread.thread_id for thread in page] == sorted(
                    i for i in ids if i.startswith(prefix) and (not after or i > after)
                )[:5]
