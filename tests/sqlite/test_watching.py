"""What a watch of SQLite compares."""

from __future__ import annotations

import dataclasses
import sqlite3
from typing import Any

import pytest

from cpkit import ToolCall
from cpkit_sqlite import SQLiteCheckpointer, store
from tests.sqlite.inside import store_of

Store = SQLiteCheckpointer[Any]


def number(raw: sqlite3.Connection, thread_id: str) -> int:
    sql = "SELECT number FROM cpkit_threads WHERE thread_id = ?"
    return int(raw.execute(sql, (thread_id,)).fetchone()[0])


async def test_a_thread_that_was_replaced_by_an_edited_dump_has_another_marker(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version and both times are the same as before."""
    left_out = iter([5, 9, 5])
    monkeypatch.setattr(store, "randrange", lambda _: next(left_out))

    async with Store(path) as cp:
        await cp.append("t", [{"secret": "1234"}])
        seen = {(await store_of(cp).markers(["t"]))["t"]}

        for count in (2, 3, 3):
            dump = await cp.dump_thread("t")
            assert dump is not None
            edited = dataclasses.replace(dump, messages=[{"secret": f"no {count}"}])
            await cp.delete_thread("t")
            await cp.restore_thread(edited)
            seen |= {(await store_of(cp).markers(["t"]))["t"]}
            assert len(seen) == count
            assert await cp.dump_thread("t") == edited


async def test_an_erased_call_in_the_place_of_another_has_another_marker(
    path: str,
) -> None:
    """A look sees one issued call of a deleted thread before, and one after."""
    seen = set()

    async with Store(path) as cp:
        for call_id in ("a", "b"):
            await cp.record_issued("t", ToolCall(call_id, "x", {}, call_id))
            await cp.delete_thread("t")
            seen.add((await store_of(cp).markers(["t"]))["t"])
            await cp.delete_thread("t", forget_keys=True)

    assert len(seen) == 2


async def test_restores_leave_half_of_all_numbers_for_new_threads(
    path: str, raw: sqlite3.Connection
) -> None:
    """A number has 31 bits."""
    async with Store(path) as cp:
        await cp.append("t", [{}])
        dump = await cp.dump_thread("t")
        assert dump is not None

        for count in range(20):
            await cp.restore_thread(dataclasses.replace(dump, thread_id=f"u {count}"))

        assert 20 < number(raw, "u 19") <= 1 + 20 * 1000
        raw.execute("UPDATE cpkit_threads SET number = 1 << 30 WHERE thread_id = 'u 0'")
        await cp.restore_thread(dataclasses.replace(dump, thread_id="v"))
        assert number(raw, "v") == (1 << 30) + 1
        await cp.append("v", [{"n": 2}])
        assert await cp.read("v") == [{}, {"n": 2}]
