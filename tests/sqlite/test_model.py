"""The store does what the store in memory does, and moves threads exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpkit_sqlite import SQLiteCheckpointer, SQLiteStore
from tests.model import check_moves, check_outcomes
from tests.sweeps import sweep


@pytest.mark.parametrize("seed", sweep(range(20), range(6)))
async def test_every_outcome_is_that_of_the_store_in_memory(
    path: str, seed: int
) -> None:
    """Batches of random writes give equal outcomes, and leave equal states."""
    await check_outcomes(SQLiteStore(path), seed)


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
