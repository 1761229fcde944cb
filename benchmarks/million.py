"""Operations in a store of a million threads: ``python -m benchmarks.million``.

Threads are created through the public API by concurrent appends of one message each;
every hundredth thread has a finished call. Their ids are scattered like random ids, so
each insertion goes to another page of the index. The same operations are timed at a
thousand threads and at all of them. The output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
from collections.abc import Awaitable, Callable
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import asyncpg
from redis.asyncio import Redis

from benchmarks.place import private_place
from cpkit import ListsThreads, ToolCall, open_checkpointer
from cpkit.registry import redacted
from cpkit.tools.benchmark.messages import message

__all__ = ["simulate"]

T = TypeVar("T")

FEW = 1_000
WRITERS = 512
THREADS_PER_CALL = 100
TENANTS = 8
OPERATIONS = 100
PAGE = 100


def main() -> None:
    """Run the simulation that the arguments ask for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.million", description=__doc__
    )
    add = parser.add_argument
    add("--url", action="append", help="an empty store (default: private ones)")
    add("--only", default="sqlite,postgres", help="which private stores; also redis")
    add("--threads", type=int, default=1_000_000)
    add("--folder", help="where the SQLite store is created, and removed")
    options = parser.parse_args()

    if options.threads <= FEW:
        parser.error(f"--threads is more than {FEW:,}")

    drivers = [] if options.url else options.only.split(",")

    with private_place(drivers, options.folder) as place:
        urls = {
            "sqlite": f"sqlite:///{place.file('million.db')}",
            "postgres": place.postgres,
            "redis": place.redis,
        }
        found = []

        for url in options.url or [urls[driver] for driver in drivers]:
            found.append(asyncio.run(simulate(url, options.threads)))
            sys.stderr.write(f"{redacted(url)}: done\n")

    sys.stdout.write(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


async def simulate(url: str, threads: int) -> dict[str, Any]:
    """Fill an empty store, and measure it at a thousand threads and at all of them."""
    async with open_checkpointer(url) as cp:
        if isinstance(cp, ListsThreads) and await cp.list_threads(limit=1):
            raise ValueError(f"{redacted(url)} is not empty")

        await _fill(cp, 0, FEW)
        few = await _measured(cp, FEW)
        took = await _fill(cp, FEW, threads)
        many = await _measured(cp, threads)

    size = await _bytes(url)
    return {
        "store": redacted(url),
        "threads": threads,
        "threads made a second": round((threads - FEW) / took),
        "bytes": size,
        "bytes per thread": None if size is None else round(size / threads),
        f"microseconds at {FEW} threads": few,
        f"microseconds at {threads} threads": many,
        "ratio": {name: round(many[name] / few[name], 2) for name in few},
    }


async def _fill(cp: Any, first: int, end: int) -> float:
    """Create the threads with these numbers, and return the seconds that it took."""
    start = perf_counter()
    numbers = iter(range(first, end))

    # Each worker takes the next number when it is free.
    async def work() -> None:
        for number in numbers:
            thread = _thread(number)
            await cp.append(thread, [message(number)])

            if number % THREADS_PER_CALL == 0:
                call = ToolCall("call", "charge", {"amount": number}, _key(number))
                await cp.record_issued(thread, call)
                await cp.record_result(thread, "call", {"charge": number})

    await asyncio.gather(*(work() for _ in range(WRITERS)))
    return perf_counter() - start


async def _measured(cp: Any, threads: int) -> dict[str, float]:
    """Return the median microseconds of each operation."""
    chance = random.Random(threads)
    ids = [_thread(chance.randrange(threads)) for _ in range(OPERATIONS)]
    called = [chance.randrange(0, threads, THREADS_PER_CALL) for _ in range(OPERATIONS)]
    tenants = [f"tenant-{chance.randrange(TENANTS)}/" for _ in range(OPERATIONS)]
    fresh = [f"fresh/{threads}/{number}" for number in range(OPERATIONS)]

    async def appended(thread: str) -> None:
        await cp.append(thread, [message(1)])

    async def loaded(thread: str) -> None:
        assert await cp.load(thread) is not None

    async def found(number: int) -> None:
        record = await cp.find_completed(_key(number))
        assert record.result == {"charge": number}

    async def first_page(_: str) -> None:
        assert len(await cp.list_threads(limit=PAGE)) == PAGE

    async def page_after(thread: str) -> None:
        await cp.list_threads(after=thread, limit=PAGE)

    async def page_near_the_end(_: str) -> None:
        await cp.list_threads(after=f"tenant-{TENANTS - 1}/ff", limit=PAGE)

    async def page_of_tenant(tenant: str) -> None:
        page = await cp.list_threads(prefix=tenant, limit=PAGE)
        assert all(info.thread_id.startswith(tenant) for info in page)

    figures = {
        "append": await _timed(appended, ids),
        "append-first": await _timed(appended, fresh),
        "load": await _timed(loaded, ids),
        "find_completed": await _timed(found, called),
    }

    if isinstance(cp, ListsThreads):
        figures |= {
            f"list_threads, first {PAGE}": await _timed(first_page, ids),
            f"list_threads, {PAGE} after": await _timed(page_after, ids),
            f"list_threads, {PAGE} near the end": await _timed(page_near_the_end, ids),
            f"list_threads, {PAGE} of a prefix": await _timed(page_of_tenant, tenants),
        }

    return figures


async def _timed(operation: Callable[[T], Awaitable[None]], values: list[T]) -> float:
    took = []

    for value in values:
        start = perf_counter()
        await operation(value)
        took.append(perf_counter() - start)

    # Skip the first tenth: its caches and connections are cold.
    return round(median(took[len(took) // 10 :]) * 1e6, 1)


def _thread(number: int) -> str:
    scattered = hashlib.sha256(b"%d" % number).hexdigest()[:24]
    return f"tenant-{number % TENANTS}/{scattered}"


def _key(number: int) -> str:
    return hashlib.sha256(b"charge %d" % number).hexdigest()


async def _bytes(url: str) -> int | None:
    """Return the size of the store, in memory for Redis, or None if it is unknown."""
    if url.startswith("sqlite:///"):
        return await asyncio.to_thread(os.path.getsize, url[len("sqlite:///") :])

    if url.startswith("redis://"):
        async with Redis.from_url(url.partition("?")[0]) as client:
            return int((await client.info("memory"))["used_memory"])

    if url.startswith("postgres") and "?" not in url:
        connection = await asyncpg.connect(url)

        try:
            size: int = await connection.fetchval(
                "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class "
                "WHERE relnamespace = 'cpkit'::regnamespace AND relkind = 'r'"
            )
            return size
        finally:
            await connection.close()

    return None


if __name__ == "__main__":
    main()
