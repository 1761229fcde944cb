"""LISTEN/NOTIFY, by watches that would poll once a day: only notifications wake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import pytest

from cpkit import ToolCall
from cpkit_postgres import PostgresCheckpointer, PostgresStore
from tests.postgres.conftest import MakeStore
from tests.servers.postgres import shared_postgres

NEVER = 86_400.0

LISTENERS = """
SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@asynccontextmanager
async def listening(
    cp: PostgresCheckpointer[object], raw: asyncpg.Connection, *threads: str
) -> AsyncIterator[AsyncIterator[str]]:
    """Watch, and begin when the handle listens."""
    before = {row[0] for row in await raw.fetch(LISTENERS)}

    async with cp.watch(*threads) as changes:
        while not {row[0] for row in await raw.fetch(LISTENERS)} - before:
            pass

        yield changes


async def test_a_notification_wakes(store: MakeStore, raw: asyncpg.Connection) -> None:
    """Changes of another handle wake without a poll, of any id."""
    ids = ["t", "a'b\"%", "ü" * 256]

    async with store(poll=NEVER) as cp, store() as other:
        async with listening(cp, raw, *ids) as changes:
            for thread in ids:
                await other.append(thread, [{"n": 1}])
                assert await anext(changes) == thread

                await other.save_extra(thread, {"a": 1})
                assert await anext(changes) == thread


async def test_a_lost_connection_leaves_no_gap(
    store: MakeStore, raw: asyncpg.Connection
) -> None:
    """What changed while the listening connection was lost is yielded after it."""
    async with store(poll=NEVER) as cp, store() as other:
        async with listening(cp, raw, "t") as changes:
            for n in range(3):
                await raw.execute(
                    f"SELECT pg_terminate_backend(pid) FROM ({LISTENERS}) AS l"
                )
                await other.append("t", [{"n": n}])
                assert await anext(changes) == "t"


async def test_only_listeners_are_notified(
    store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """An announcement says whether a process listens to this store."""
    async with store(poll=NEVER) as cp, store() as other:
        announcer = other.store
        assert isinstance(announcer, PostgresStore)
        assert not await announcer.announce(["t"])

        async with listening(cp, raw, "t"):
            assert await announcer.announce(["t"])

            async with store(schema=f"{schema}_b") as stranger:
                assert isinstance(stranger.store, PostgresStore)
                assert not await stranger.store.announce(["t"])

    # The server learns a moment later that the connection was closed.
    while await raw.fetch(LISTENERS):
        pass

    await raw.execute(f"DROP SCHEMA {schema}_b CASCADE")


@pytest.mark.parametrize("size", [1, 3])
async def test_a_pool_of_the_caller(
    store: MakeStore, schema: str, url: str, size: int
) -> None:
    """A connection of the pool listens; with a single one the watch polls."""
    poll = 0.05 if size == 1 else NEVER

    async with asyncpg.create_pool(
        shared_postgres(), min_size=1, max_size=size
    ) as pool:
        async with (
            PostgresCheckpointer[object](pool, schema=schema, poll=poll) as cp,
            store() as other,
            cp.watch("t") as changes,
        ):
            await cp.append("t", [{"n": 1}])
            assert await anext(changes) == "t"

            for n in range(3):
                await other.append("t", [{"n": n}])
                assert await anext(changes) == "t"

        assert pool.get_idle_size() == pool.get_size()


async def test_handles_of_one_pool_share_it(
    schema: str, url: str, raw: asyncpg.Connection
) -> None:
    """One of them listens and the others poll, so operations find a connection."""
    async with (
        asyncpg.create_pool(shared_postgres(), min_size=2, max_size=2) as pool,
        AsyncExitStack() as stack,
    ):
        for n in range(3):
            cp = PostgresCheckpointer[object](pool, schema=schema, poll=0.05, timeout=5)
            await stack.enter_async_context(cp)
            watched = listening(cp, raw, "t") if n == 0 else cp.watch("t")
            changes = await stack.enter_async_context(watched)
            await cp.append("t", [{"n": n}])
            assert await anext(changes) == "t"

        assert len(await raw.fetch(LISTENERS)) == 1

    # The next handle that watches can listen, because the first one is closed.
    async with asyncpg.create_pool(shared_postgres(), min_size=2, max_size=2) as pool:
        for _ in range(2):
            async with (
                PostgresCheckpointer[object](pool, schema=schema) as cp,
                listening(cp, raw, "t"),
            ):
                pass


async def test_an_erased_call_in_the_place_of_another_has_another_marker(
    store: MakeStore,
) -> None:
    """A poll sees one issued call of a deleted thread before, and one after."""
    seen = set()

    async with store() as cp:
        assert isinstance(cp.store, PostgresStore)

        for call_id in ("a", "b"):
            await cp.record_issued("t", ToolCall(call_id, "x", {}, call_id))
            await cp.delete_thread("t")
            seen.add((await cp.store.markers(["t"]))["t"])
            await cp.delete_thread("t", forget_keys=True)

    assert len(seen) == 2
