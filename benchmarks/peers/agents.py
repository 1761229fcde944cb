"""Sessions of the OpenAI Agents SDK on SQLite and on Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agents import SQLiteSession
from agents.extensions.memory import AsyncSQLiteSession, RedisSession
from redis.asyncio import Redis

from cpkit.tools.benchmark.contender import Contender

__all__ = ["BLOCKING", "AgentsSession"]


BLOCKING = "OpenAI SQLiteSession"


class AgentsSession(Contender):
    """A session for each thread; the sessions on a server share a client.

    The name selects the SDK's session on aiosqlite or the one on the blocking module.
    ``where`` is a SQLite file or a URL.
    """

    abilities = frozenset({"append", "load", "tail", "open"})

    def __init__(self, driver: str, where: str, name: str) -> None:
        super().__init__(driver, name)
        self.where = where
        self._sessions: dict[str, Any] = {}
        self._client: Any = None
        self.durability = {
            "sqlite": "machine: WAL with synchronous=FULL, SQLite's default",
            "redis": "process: appendfsync everysec",
            "redis-always": "machine: appendfsync always",
        }[driver]

    def another(self) -> AgentsSession:
        return AgentsSession(self.driver, self.where, self.name)

    async def open(self) -> None:
        if self.driver != "sqlite":
            self._client = Redis.from_url(self.where)

        # The first session that reads connects and creates the tables.
        await self._of("first").get_items(limit=1)

    async def close(self) -> None:
        while self._sessions:
            await self._close(self._sessions.popitem()[1])

        if self._client is not None:
            await self._client.aclose()

    async def append(self, thread: str, message: Any) -> None:
        await self._of(thread).add_items([message])

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        for start in range(0, len(messages), 2000):
            await self._of(thread).add_items(list(messages[start : start + 2000]))

    async def forget(self, threads: Sequence[str]) -> None:
        for thread in threads:
            if self.driver == "sqlite" and thread in self._sessions:
                await self._close(self._sessions.pop(thread))

    async def load(self, thread: str) -> list[Any]:
        return list(await self._of(thread).get_items())

    async def tail(self, thread: str, count: int) -> list[Any]:
        return list(await self._of(thread).get_items(limit=count))

    async def _close(self, session: Any) -> None:
        if isinstance(session, SQLiteSession):
            await asyncio.to_thread(session.close)
        else:
            await session.close()

    def _of(self, thread: str) -> Any:
        if thread not in self._sessions:
            self._sessions[thread] = self._session(thread)

        return self._sessions[thread]

    def _session(self, thread: str) -> Any:
        if self.driver == "sqlite":
            cls = SQLiteSession if self.name == BLOCKING else AsyncSQLiteSession
            return cls(thread, self.where)

        return RedisSession(thread, redis_client=self._client)
