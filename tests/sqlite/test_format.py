"""The stored format, frozen: version 1 is written and read as it was."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpkit import CallRecord, CheckpointData, ThreadInfo, ToolCall
from cpkit_sqlite import SQLiteCheckpointer, store

Store = SQLiteCheckpointer[Any]

# It changes with a new schema version and a migration only.
VERSION_1 = Path(__file__).with_name("version_1.sql")


def at(seconds: int) -> datetime:
    return datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by one second each time it is read."""
    seconds = count(int(at(1).timestamp()))
    tick = SimpleNamespace(time_ns=lambda: next(seconds) * 1_000_000_000)
    monkeypatch.setattr(store, "time", tick)


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
    path: str, raw: sqlite3.Connection, clock: None
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


@pytest.mark.parametrize("gone", [2, 3])
async def test_a_version_counts_messages_that_were_trimmed(
    path: str, raw: sqlite3.Connection, gone: int
) -> None:
    """It follows from the last position, or from where the thread was trimmed."""
    async with Store(path) as cp:
        await cp.append("t", [{"n": n} for n in range(3)])
        raw.execute("DELETE FROM cpkit_messages WHERE key < (1 << 32) + ?", (gone,))
        raw.execute("UPDATE cpkit_threads SET trimmed = ?", (gone,))
        left = [{"n": n} for n in range(gone, 3)]
        data = await cp.load("t")
        assert data is not None
        assert (data.messages, data.version, data.first) == (left, 3, gone)
        assert (await cp.list_threads())[0].version == 3
        assert await cp.append("t", [{"n": 3}], expected_version=3) == 4
        assert await cp.read("t") == [*left, {"n": 3}]
        assert await cp.read("t", 0, 1) == []


async def test_a_trim_leaves_what_the_format_says(
    path: str, raw: sqlite3.Connection
) -> None:
    """The rows are gone, ``trimmed`` is set, and the time of the last message stays."""
    async with Store(path) as cp:
        await cp.append("t", [{"n": n} for n in range(3)])
        (listed,) = await cp.list_threads()
        await cp.trim("t", 2)
        keys = raw.execute("SELECT key & 0xFFFFFFFF FROM cpkit_messages").fetchall()
        assert keys == [(2,)]
        await cp.trim("t", 9)
        assert raw.execute("SELECT count(*) FROM cpkit_messages").fetchone() == (0,)
        assert raw.execute("SELECT trimmed FROM cpkit_threads").fetchone() == (3,)
        assert await cp.list_threads() == [listed]


async def test_any_text_comes_back(path: str) -> None:
    """Lone surrogates are escapes in JSON, and NUL is a character like others."""
    text = "\ud83d \ude00\ud83d \0 é \U0001f600 \\ud83d"

    async with Store(path) as cp:
        call = ToolCall("c", "tool", {text: text}, "key")
        await cp.append("t", [{text: [text]}], extra={text: text})
        await cp.record_issued("t", call)
        await cp.record_result("t", "c", text)
        data = await cp.load("t")
        assert data is not None
        assert (data.messages, data.extra) == ([{text: [text]}], {text: text})
        found = await cp.find_completed("key")
        assert found is not None
        assert (found.call, found.result) == (call, text)
        dump = await cp.dump_thread("t")
        await cp.delete_thread("t", forget_keys=True)
        assert dump is not None
        await cp.restore_thread(dump)
        assert await cp.dump_thread("t") == dump
