"""The store does what the store in memory does, and moves threads exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpkit.driver import Append, Claim, Erase, Restore, StoredCall, Write
from cpkit.memory import MemoryStore
from cpkit_sqlite import SQLiteCheckpointer, SQLiteStore
from tests.model import check_moves, check_outcomes, without_times
from tests.sweeps import sweep


@pytest.mark.parametrize("seed", sweep(range(20), range(3)))
async def test_every_outcome_is_that_of_the_store_in_memory(
    path: str, seed: int
) -> None:
    """Batches of random writes give equal outcomes, and leave equal states."""
    await check_outcomes(SQLiteStore(path), seed)


APPEND = Append("t", [b"{}"], None)
CALL = StoredCall("t", "c", "tool", b"{}", "key", "issued", 1, 9, None, None, False)


@pytest.mark.parametrize(
    "between",
    [
        Erase("t", forget_keys=True),
        Claim("t", "c", "tool", b"{}", "key"),
        Restore("t", [], [], [CALL], 8, 9),
    ],
)
@pytest.mark.parametrize("before", [APPEND, Append("t", [], None)])
async def test_the_writes_of_a_batch_see_each_other(
    path: str, before: Append, between: Write
) -> None:
    """A thread that is created or deleted between two appends is looked at again."""
    store, model = SQLiteStore(path), MemoryStore()
    await store.open()

    try:
        batches: list[list[Write]] = [
            [Append("u", [b"{}"], None)],  # numbers of threads and calls differ
            [before, between, APPEND],
            [APPEND, Erase("t", False), APPEND],
        ]

        for batch in batches:
            assert await store.commit(batch) == await model.commit(batch)
            found, expected = await store.dump("t"), await model.dump("t")
            assert without_times([found]) == without_times([expected])
    finally:
        await store.close()


async def test_a_thread_is_moved_exactly(path: str, tmp_path: Path) -> None:
    """Times, attempts, status, erasure and the order of claims come back."""
    async with (
        SQLiteCheckpointer[Any](path) as there,
        SQLiteCheckpointer[Any](tmp_path / "third.db") as third,
    ):
        await check_moves(there, third)


async def test_the_engine_lowers_the_limits(path: str) -> None:
    """A row of SQLite has 1,000,000,000 bytes by default, for two values and ids."""
    async with SQLiteCheckpointer[Any](path, max_payload=2**40) as cp:
        assert 2**20 < cp.limits.max_value < 2**30
