"""The store does what the store in memory does, and moves threads exactly."""

from __future__ import annotations

import asyncio
import random

import asyncpg
import pytest

from cpkit import KeyTaken, ToolCall, VersionConflict
from cpkit_postgres import PostgresStore
from cpkit_postgres.options import PostgresOptions
from tests.model import check_moves, check_outcomes
from tests.postgres.conftest import MakeStore
from tests.servers.postgres import shared_postgres
from tests.sweeps import sweep


@pytest.mark.parametrize("seed", sweep(range(20), range(2)))
async def test_every_outcome_is_that_of_the_store_in_memory(
    url: str, schema: str, seed: int
) -> None:
    """Batches of random writes give equal outcomes, and leave equal states."""
    options = PostgresOptions(schema=schema)
    await check_outcomes(PostgresStore(shared_postgres(), options), seed)


async def test_a_thread_is_moved_exactly(
    store: MakeStore, raw: asyncpg.Connection
) -> None:
    """Times, attempts, status, erasure and the order of claims come back."""
    try:
        async with store() as there, store(schema="third store") as third:
            await check_moves(there, third)
    finally:
        await raw.execute('DROP SCHEMA "third store" CASCADE')


async def test_one_of_many_restores_succeeds(store: MakeStore) -> None:
    """The others find the thread; an append that is faster makes all of them fail."""
    async with store() as cp, store() as other:
        for turn in range(20):
            thread = f"t{turn}"
            await cp.append(thread, [{"n": 1}], extra={"a": 1})
            await cp.record_issued(thread, ToolCall("c", "x", {}, f"k{turn}"))
            dump = await cp.dump_thread(thread)
            assert dump is not None
            await cp.delete_thread(thread, forget_keys=True)
            outcomes = await asyncio.gather(
                *(each.restore_thread(dump) for each in (cp, other) * 3),
                cp.append(thread, [{"n": 2}]),
                return_exceptions=True,
            )
            refused = [one for one in outcomes if isinstance(one, VersionConflict)]
            version = outcomes[-1]
            assert (len(refused), version) in ((5, 2), (6, 1))


async def test_restores_race_with_claims(store: MakeStore) -> None:
    """Of a key only the newest attempt can be not failed, whatever comes first."""
    async with store() as cp, store() as other:
        await cp.record_issued("from", ToolCall("c1", "x", {}, "k"))
        await cp.record_result("from", "c1", None, success=False)
        await cp.record_issued("from", ToolCall("c2", "x", {}, "k"))
        await cp.record_result("from", "c2", None, success=False)
        dump = await cp.dump_thread("from")
        assert dump is not None
        await cp.delete_thread("from", forget_keys=True)
        order = random.Random(3)

        for turn in range(40):
            call = ToolCall(f"c{turn}", "x", {}, "k")

            async def restore() -> None:
                for _ in range(order.randrange(6)):
                    await asyncio.sleep(0)

                await other.restore_thread(dump)

            restored, _ = await asyncio.gather(
                restore(), cp.record_issued("t", call), return_exceptions=True
            )
            calls = [*await cp.list_calls("from"), *await cp.list_calls("t")]
            calls.sort(key=lambda one: one.attempt)
            statuses = [one.status for one in calls]

            if isinstance(restored, KeyTaken):
                assert statuses == ["issued"]
            else:
                assert restored is None
                assert statuses == ["failed", "failed", "issued"]

            await cp.delete_thread("t", forget_keys=True)
            await cp.delete_thread("from", forget_keys=True)
