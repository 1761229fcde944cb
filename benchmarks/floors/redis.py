"""The floor of Redis: redis.asyncio without options, one command for each write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json
from redis.asyncio import Redis

from benchmarks.floors.decoding import decoded
from cpkit import JsonValue
from cpkit.tools.benchmark.contender import CALL_ARGS, CALL_RESULT, Contender

__all__ = ["RedisFloor"]


class RedisFloor(Contender):
    """RPUSH, LRANGE, HSET; a call is a key with ``SET NX``, its result a ``SET XX``."""

    kind = "floor"
    abilities = frozenset({"append", "load", "tail", "calls", "extra", "open"})

    def __init__(self, driver: str, url: str, name: str) -> None:
        super().__init__(driver, name)
        self.url = url
        self._redis: Any  # execute_command has no types

    def another(self) -> RedisFloor:
        return RedisFloor(self.driver, self.url, self.name)

    async def open(self) -> None:
        # More than the tasks of any workload; the default raises above a hundred.
        self._redis = Redis.from_url(self.url, max_connections=1000)
        await self._redis.ping()
        self.durability = {
            "redis": "process: appendfsync everysec",
            "redis-always": "machine: appendfsync always",
        }[self.driver]

    async def close(self) -> None:
        await self._redis.aclose()

    async def append(self, thread: str, message: Any) -> None:
        await self._redis.execute_command(
            "RPUSH", f"cpkit-floor:{thread}", to_json(message)
        )

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        for start in range(0, len(messages), 2000):
            bodies = map(to_json, messages[start : start + 2000])
            await self._redis.execute_command("RPUSH", f"cpkit-floor:{thread}", *bodies)

    async def load(self, thread: str) -> list[Any]:
        return await self._range(thread, 0)

    async def tail(self, thread: str, count: int) -> list[Any]:
        return await self._range(thread, -count)

    async def cycle(self, thread: str, name: str) -> JsonValue:
        key = f"cpkit-floor:call:{thread}:{name}"
        claim = to_json({"tool": "charge", "args": CALL_ARGS})
        await self._redis.execute_command("SET", key, claim, "NX")
        record = to_json({"tool": "charge", "args": CALL_ARGS, "result": CALL_RESULT})
        await self._redis.execute_command("SET", key, record, "XX")
        return await self.replay(thread, name)

    async def replay(self, thread: str, name: str) -> JsonValue:
        text = await self._redis.execute_command(
            "GET", f"cpkit-floor:call:{thread}:{name}"
        )
        result: JsonValue = from_json(text)["result"]
        return result

    async def merge(self, thread: str, values: Mapping[str, JsonValue]) -> None:
        fields = [
            part for key, value in values.items() for part in (key, to_json(value))
        ]
        await self._redis.execute_command(
            "HSET", f"cpkit-floor:{thread}:extra", *fields
        )

    async def extra(self, thread: str) -> Mapping[str, JsonValue]:
        found = await self._redis.hgetall(f"cpkit-floor:{thread}:extra")
        return {key.decode(): from_json(value) for key, value in found.items()}

    async def _range(self, thread: str, first: int) -> list[Any]:
        bodies = await self._redis.execute_command(
            "LRANGE", f"cpkit-floor:{thread}", first, -1
        )
        return decoded(b",".join(bodies))
