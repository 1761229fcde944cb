"""A thread that lives for years under a policy stays small, while others use it.

``CPKIT_YEARS_SECONDS=1200 CPKIT_YEARS_MESSAGES=1000000`` is the run of a release; the
sizes go to the file ``CPKIT_YEARS_SAMPLES``, a line of JSON for each twentieth.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from conformance.slowdown import slowdown
from cpkit import open_checkpointer
from cpkit.retention import Retention, prune
from tests.effects.shop import until
from tests.processes import started
from tests.retention.years import message
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.stores import SHARED

# A prune that meets an append begins again, so on a busy machine it needs more time.
SECONDS = float(os.environ.get("CPKIT_YEARS_SECONDS") or 5 * slowdown())
MESSAGES = int(os.environ.get("CPKIT_YEARS_MESSAGES", "10000"))
SAMPLES = os.environ.get("CPKIT_YEARS_SAMPLES")
LEFT = 1_000
PARTS = 20

GROWTH = 1.5
"""What the second half may need more than the second quarter.

A store that keeps what was cut grows evenly: it is twice as large at the end. Others go
up and down, as the engine cleans up now and then, so the peaks are compared.
"""

NOISE = 64 * 2**20
"""Bytes that say nothing: what a machine, busy or not, appends in a minute.

Autovacuum looks once a minute, a prune may wait for the lock of a log for half of one,
and Redis does not rewrite a smaller append-only file.
"""

IS_SHORT = SECONDS < 600
"""Whether servers must clean up more often than by default, to be seen doing so."""

Sizes = dict[str, int]
Measure = Callable[[], Awaitable[Sizes]]
Place = tuple[str, Measure, Callable[[], Awaitable[object]]]
"""A URL, the sizes of its store, and the command that gives dead space back."""


def on_disk(*paths: Path) -> int:
    """Return the bytes that files, and those in folders, take on the disk."""
    total = 0

    for path in paths:
        for one in [path, *path.rglob("*")]:
            with suppress(FileNotFoundError):
                total += one.stat().st_blocks * 512 * (not one.is_dir())

    return total


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[Place]:
    file = folder / "agent.db"

    async def measure() -> Sizes:
        return {"file": on_disk(file), "wal": on_disk(Path(f"{file}-wal"))}

    async def compact() -> None:
        with closing(sqlite3.connect(file)) as db:
            db.execute("VACUUM")

    yield f"sqlite:///{file}", measure, compact


@asynccontextmanager
async def file(folder: Path) -> AsyncIterator[Place]:
    async def measure() -> Sizes:
        return {"folder": on_disk(folder)}

    async def compact() -> None:
        """Nothing to do: a trim has given all bytes back."""

    yield f"file://{folder}/store", measure, compact


@asynccontextmanager
async def postgres(_: Path) -> AsyncIterator[Place]:
    server = PostgresServer(settings={"autovacuum_naptime": "1s"} if IS_SHORT else {})
    server.start()
    db = await asyncpg.connect(server.url)

    async def measure() -> Sizes:
        total = await db.fetchval(
            "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class"
            " WHERE relkind = 'r' AND relnamespace = 'years'::regnamespace"
        )
        return {"tables": total}

    try:
        yield f"{server.url}?schema=years", measure, lambda: db.execute("VACUUM FULL")
    finally:
        await db.close()
        server.close()


@asynccontextmanager
async def redis(_: Path) -> AsyncIterator[Place]:
    rewrite = "auto-aof-rewrite-min-size"
    server = RedisServer(settings={rewrite: "1mb"} if IS_SHORT else {})
    server.start()

    async def measure() -> Sizes:
        found = await db.info("memory")
        return {"memory": found["used_memory"], "aof": on_disk(server.data)}

    async def is_rewritten() -> bool:
        return not (await db.info("persistence"))["aof_rewrite_in_progress"]

    async def compact() -> None:
        await until(is_rewritten, 60.0)  # the server may have begun one by itself
        await db.bgrewriteaof()
        await until(is_rewritten, 60.0)

    try:
        async with Redis.from_url(server.url) as db:
            yield server.url, measure, compact
    finally:
        server.close()


STORES = {"sqlite": sqlite, "file": file, "postgres": postgres, "redis": redis}


async def peak(measure: Measure, end: float) -> Sizes:
    """Return the largest sizes until a time."""
    largest = await measure()

    while time.monotonic() < end:
        found = await measure()
        largest = {name: max(found[name], largest.get(name, 0)) for name in found}
        await asyncio.sleep(SECONDS / PARTS / 20)

    return largest


def note(kind: str, when: str, facts: dict[str, int]) -> None:
    """Print facts of a moment, and add them to the file of samples."""
    line = json.dumps({"store": kind, "when": when, **facts})
    sys.stdout.write(f"{line}\n")

    if SAMPLES:
        with Path(SAMPLES).open("a") as samples:
            samples.write(f"{line}\n")


@pytest.mark.long
@pytest.mark.timeout(120 + 2 * SECONDS + MESSAGES / 1_000)
@pytest.mark.parametrize("kind", SHARED)
async def test_a_thread_under_a_policy_stays_small(kind: str, tmp_path: Path) -> None:
    """One process appends at full speed, one loads, one prunes to the last messages.

    The policy comes through meanwhile, nothing newer is lost, and the store does not
    grow.
    """
    faulthandler.cancel_dump_traceback_later()  # it ends a test of 15 minutes
    async with STORES[kind](tmp_path) as (url, measure, compact):
        opened: Any = open_checkpointer(url)

        async with opened as cp:
            for n in range(0, MESSAGES, 1_000):
                await cp.append("t", [message(n + i) for i in range(1_000)])

            note(kind, "full", await measure())
            await prune(cp, Retention(keep_last=LEFT))

        note(kind, "pruned", await measure())
        await compact()
        note(kind, "compact", await measure())
        opened = open_checkpointer(url)

        async with opened as cp:
            with started("tests.retention.years") as start:
                appends, loads, prunes = start(3)

                for one in (appends, loads, prunes):
                    one.ask("ready")

                appends.tell("append_for", url, SECONDS)
                loads.tell("load_for", url, SECONDS)
                prunes.tell("prune_for", url, SECONDS + 2, LEFT)
                peaks, begin = [], time.monotonic()

                for part in range(1, PARTS + 1):
                    peaks.append(await peak(measure, begin + part * SECONDS / PARTS))
                    data = await cp.load_range("t", stop=0)
                    more = {"version": data.version, "first": data.first}
                    note(kind, f"{part}/{PARTS}", peaks[-1] | more)

                assert data.first > MESSAGES, "nothing of what is new was cut"
                version, count, gone = (
                    one.answer() for one in (appends, loads, prunes)
                )

            note(kind, "end", {"loads": count} | await measure())
            data = await cp.load("t")

    assert (data.version, data.first) == (version, MESSAGES - LEFT + gone)
    assert data.messages == [message(n) for n in range(data.first, version)]
    assert len(data.messages) == LEFT
    assert count

    for name in peaks[0]:
        quarter, half = (
            max(one[name] for one in part)
            for part in (peaks[PARTS // 4 : PARTS // 2], peaks[PARTS // 2 :])
        )
        assert half <= max(GROWTH * quarter, NOISE), name
