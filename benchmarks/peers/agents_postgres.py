"""The session of the OpenAI Agents SDK on SQLAlchemy: Postgres, through asyncpg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agents.extensions.memory import SQLAlchemySession
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cpkit.tools.benchmark import Contender

__all__ = ["AgentsPostgres"]


class AgentsPostgres(Contender):
    """A session for each thread, on one engine with the default pool."""

    abilities = frozenset({"append", "load", "tail", "open"})
    durability = "machine: synchronous_commit=on, the server's default"

    def __init__(self, driver: str, where: str, name: str) -> None:
        super().__init__(driver, name)
        self.where = where
        self._sessions: dict[str, SQLAlchemySession] = {}
        self._engine: AsyncEngine

    def another(self) -> AgentsPostgres:
        return AgentsPostgres(self.driver, self.where, self.name)

    async def open(self) -> None:
        url = self.where.replace("postgresql:", "postgresql+asyncpg:", 1)
        self._engine = create_async_engine(url)
        # The first session that reads connects and creates the tables.
        await self._of("first").get_items(limit=1)

    async def close(self) -> None:
        await self._engine.dispose()

    async def append(self, thread: str, message: Any) -> None:
        await self._of(thread).add_items([message])

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        for start in range(0, len(messages), 2000):
            await self._of(thread).add_items(list(messages[start : start + 2000]))

    async def load(self, thread: str) -> list[Any]:
        return list(await self._of(thread).get_items())

    async def tail(self, thread: str, count: int) -> list[Any]:
        return list(await self._of(thread).get_items(limit=count))

    def _of(self, thread: str) -> SQLAlchemySession:
        if thread not in self._sessions:
            self._sessions[thread] = SQLAlchemySession(
                thread, engine=self._engine, create_tables=True
            )

        return self._sessions[thread]
