"""What a watch of SQLite compares."""

from __future__ import annotations

import dataclasses
from typing import Any

from cpkit_sqlite import SQLiteCheckpointer
from tests.sqlite.inside import store_of

Store = SQLiteCheckpointer[Any]


async def test_a_thread_that_was_replaced_by_an_edited_dump_has_another_marker(
    path: str,
) -> None:
    """The version and both times are the same as before."""
    async with Store(path) as cp:
        await cp.append("t", [{"secret": "1234"}])
        seen = {(await store_of(cp).markers(["t"]))["t"]}

        for count in (2, 3, 4):
            dump = await cp.dump_thread("t")
            assert dump is not None
            edited = dataclasses.replace(dump, messages=[{"secret": f"no {count}"}])
            await cp.delete_thread("t")
            await cp.restore_thread(edited)
            seen |= {(await store_of(cp).markers(["t"]))["t"]}
            assert len(seen) == count
            assert await cp.dump_thread("t") == edited


async def test_each_thread_of_many_has_its_marker(path: str) -> None:
    """Named threads have the same markers as in a look at all of them."""
    async with Store(path) as cp:
        for thread_id in ("a", "b", "c"):
            await cp.append(thread_id, [{}])

        every = await store_of(cp).markers(None)
        assert sorted(every) == ["a", "b", "c"]
        some = await store_of(cp).markers(["c", "missing", "a"])
        assert some == {one: every[one] for one in "ac"}
