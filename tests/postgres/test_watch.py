"""LISTEN/NOTIFY, by watches that would poll once a day: only notifications wake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from cpkit_postgres import PostgresCheckpointer, PostgresStore, connections
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
    store: MakeStore, raw: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changed while the listening connection was lost is yielded after it."""
    monkeypatch.setattr(connections, "_LOOK_EVERY", 0.01)

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


async def test_a_pool_of_the_caller(
    store: MakeStore, schema: str, url: str, raw: asyncpg.Connection
) -> None:
    """No connection of it listens: the watch polls, and every operation finds one."""
    async with asyncpg.create_pool(shared_postgres(), min_size=1, max_size=1) as pool:
        async with (
            PostgresCheckpointer[object](pool, schema=schema, poll=0.05) as cp,
            store() as other,
            cp.watch("t") as changes,
        ):
            for n in range(3):
                await cp.append("t", [{"n": n}])
                assert await anext(changes) == "t"
                await other.append("t", [{"n": n}])
                assert await anext(changes) == "t"

            assert not await raw.fetch(LISTENERS)
