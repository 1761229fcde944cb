"""The store does what the store in memory does, and moves threads exactly."""

from __future__ import annotations

from typing import Any

import pytest

from cpkit_redis import RedisCheckpointer, RedisStore
from cpkit_redis.store import RedisOptions
from tests.model import check_moves, check_outcomes
from tests.sweeps import sweep


@pytest.mark.parametrize("seed", sweep(range(20), range(2)))
async def test_every_outcome_is_that_of_the_store_in_memory(
    url: str, prefix: str, seed: int
) -> None:
    """Batches of random writes give equal outcomes, and leave equal states."""
    await check_outcomes(RedisStore(url, RedisOptions(prefix=prefix)), seed)


async def test_a_thread_is_moved_exactly(url: str, prefix: str) -> None:
    """Times, attempts, status, erasure and the order of claims come back."""
    async with (
        RedisCheckpointer[Any](url, prefix=prefix) as there,
        RedisCheckpointer[Any](url, prefix=f"{prefix}-third") as third,
    ):
        await check_moves(there, third)
