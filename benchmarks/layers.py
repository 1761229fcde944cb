"""Where the time of an operation goes, from its floor to the public method.

Each layer does the work of the layer before and one more step. The difference is the
cost of that step. This module calls internals of the drivers.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from statistics import median
from time import perf_counter
from typing import Any

import asyncpg
from pydantic_core import from_json, to_json
from redis.asyncio import Redis

from cpkit.driver.codec import Codec
from cpkit.driver.writes import Append
from cpkit.registry import open_checkpointer
from cpkit.tools.benchmark import Contender, Scale, Stored, Trial
from cpkit.tools.benchmark.messages import messages
from cpkit_postgres import queries
from cpkit_postgres.queries import filled
from cpkit_redis.operations import SHA, operation

__all__ = ["decoding", "layers"]

Operation = Callable[[], Awaitable[object]]
Steps = dict[str, Operation]

_BODY = to_json(messages(7, 1)[0])
_CALL = "finished"
_DECODED = 10_000


class Layer(Trial):
    """One layer of an operation, under its own name."""

    def __init__(
        self, driver: str, workload: str, name: str, operation: Operation, scale: Scale
    ) -> None:
        super().__init__(Contender(driver, name), workload, scale)
        self.operation = operation

    async def measure(self) -> Sequence[float]:
        return await self.timed([self.operation] * self.scale.operations)


async def layers(
    floor: Contender, url: str, scale: Scale, stack: AsyncExitStack
) -> list[Trial]:
    """Return the layers of an append and of a replay, from the bottom up.

    They are on the store of that URL, in a handle that the stack closes.
    """
    driver = floor.driver
    ours = Stored(driver, url)
    cp = await stack.enter_async_context(open_checkpointer(url))
    ours.use(cp)
    thread = ours.thread("layers")
    key = f"{thread}:{_CALL}"
    message = messages(7, 1)[0]

    for contender in (floor, ours):
        await contender.fill(thread, contender.native(messages(0, 100)))
        await contender.cycle(thread, _CALL)

    appends, replays = await _BETWEEN[driver](
        cp, thread, key, url.partition("?")[0], stack
    )
    appends = {
        "floor": lambda: floor.append(thread, message),
        **appends,
        "append()": lambda: cp.append(thread, [message]),
    }
    replays = {
        "floor": lambda: floor.replay(thread, _CALL),
        **replays,
        "find_completed()": lambda: cp.find_completed(key),
    }
    return [
        Layer(driver, workload, name, operation, scale)
        for workload, steps in (("one append", appends), ("one replay", replays))
        for name, operation in steps.items()
    ]


def decoding(rounds: int) -> dict[str, float]:
    """Return seconds per message of ways to decode 10,000 messages."""
    bodies = [to_json(one) for one in messages(0, _DECODED)]
    texts = [body.decode() for body in bodies]
    codec: Codec[Any] = Codec()

    def paused(decode: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            gc.disable()

            try:
                return decode()
            finally:
                gc.enable()

        return run

    def of_text() -> object:
        return from_json("[" + ",".join(texts) + "]")

    def of_bytes() -> object:
        return from_json(b"[" + b",".join(bodies) + b"]")

    ways: dict[str, Callable[[], object]] = {
        "one array of text (the floor of Postgres and SQLite)": of_text,
        "one array of bytes (the floor of Redis and files)": of_bytes,
        "one array of text, collector paused": paused(of_text),
        "one array of bytes, collector paused": paused(of_bytes),
        "cpkit's codec, text": lambda: codec.messages(texts, "thread"),
        "cpkit's codec, bytes": lambda: codec.messages(bodies, "thread"),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}

    for _ in range(rounds):
        for name, decode in ways.items():
            gc.collect()
            start = perf_counter()
            found = decode()
            took[name].append((perf_counter() - start) / _DECODED)
            del found

    return {name: median(times) for name, times in took.items()}


async def _sqlite(
    cp: Any, thread: str, key: str, server: str, stack: AsyncExitStack
) -> tuple[Steps, Steps]:
    store = cp.store
    write = Append(thread, [_BODY], None)
    return {
        "one trip: BEGIN, look-up, INSERT, COMMIT": lambda: store.commit([write])
    }, {"one trip: all columns of the call": lambda: store.holder(key)}


async def _postgres(
    cp: Any, thread: str, key: str, server: str, stack: AsyncExitStack
) -> tuple[Steps, Steps]:
    held = await asyncpg.connect(server)
    stack.push_async_callback(held.close)
    store = cp.store
    append = await held.prepare(filled(queries.APPEND, store._connections.schema))
    find = await held.prepare(filled(queries.HOLDER, store._connections.schema))
    values = (thread, None, 1, _BODY.decode(), None, None)
    return {
        "the statement, prepared, on one connection": lambda: append.fetch(*values),
        "the statement, by the store's connections": lambda: store._connections.fetch(
            queries.APPEND, *values
        ),
    }, {
        "all columns of the call, on one connection": lambda: find.fetch(key),
        "the same, by the store's connections": lambda: store._connections.fetch(
            queries.HOLDER, key
        ),
    }


async def _redis(
    cp: Any, thread: str, key: str, server: str, stack: AsyncExitStack
) -> tuple[Steps, Steps]:
    client: Any = Redis.from_url(server)
    stack.push_async_callback(client.aclose)
    store = cp.store
    write = Append(thread, [_BODY], None)
    await store.commit([write])  # so that the server knows the script
    sha = SHA.decode()
    append = (store._base, *operation(write))
    find = (store._base, b"find", key)
    return {
        "the script, by the client": lambda: client.evalsha(sha, 1, *append),
        "the script, by the store": lambda: store.commit([write]),
    }, {
        "the script, by the client": lambda: client.evalsha(sha, 1, *find),
        "the script, by the store": lambda: store.holder(key),
    }


async def _file(
    cp: Any, thread: str, key: str, server: str, stack: AsyncExitStack
) -> tuple[Steps, Steps]:
    store = cp.store
    write = Append(thread, [_BODY], None)
    return {
        "one trip: locked, looked at, written, synced": lambda: store.commit([write])
    }, {"one trip: key, log, call": lambda: store.holder(key)}


_BETWEEN = {
    "sqlite": _sqlite,
    "postgres": _postgres,
    "redis": _redis,
    "redis-always": _redis,
    "file": _file,
}
