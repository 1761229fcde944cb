"""cubeloop's checkpointers on SQLite and Postgres, with cubeloop's message types."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cubeloop.checkpointer.postgres import PostgresCheckpointer
from cubeloop.checkpointer.sqlite import SQLiteCheckpointer
from cubeloop.providers.base import (
    AssistantMessage,
    TextContent,
    ToolCall,
    ToolResultMessage,
)

from cpkit import JsonValue
from cpkit.tools.benchmark.contender import Contender
from tests.servers.cubeloop import create_tables

__all__ = ["Cubeloop"]


class Cubeloop(Contender):
    """``where`` is a SQLite file or the URL of a Postgres database."""

    abilities = frozenset({"append", "load", "extra", "open"})

    def __init__(
        self, driver: str, where: str, name: str, *, tables: bool = True
    ) -> None:
        super().__init__(driver, name)
        self.where = where
        self._tables = tables and driver == "postgres"
        self._inner: Any
        self.durability = {
            "sqlite": "machine: a rollback journal, synchronous=FULL",
            "postgres": "machine: synchronous_commit=on, the server's default",
        }[driver]

    def another(self) -> Cubeloop:
        return Cubeloop(self.driver, self.where, self.name, tables=False)

    async def open(self) -> None:
        if self._tables:
            await create_tables(self.where)

        make = SQLiteCheckpointer if self.driver == "sqlite" else PostgresCheckpointer
        self._inner = make(self.where)
        await self._inner.__aenter__()

    async def close(self) -> None:
        await self._inner.__aexit__(None, None, None)

    def native(self, messages: Sequence[Any]) -> list[Any]:
        return list(map(_native, messages))

    async def append(self, thread: str, message: Any) -> None:
        await self._inner.append(thread, [message])

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        for start in range(0, len(messages), 2000):
            await self._inner.append(thread, list(messages[start : start + 2000]))

    async def load(self, thread: str) -> list[Any]:
        return list((await self._inner.load(thread)).messages)

    async def merge(self, thread: str, values: Mapping[str, JsonValue]) -> None:
        await self._inner.save_extra(thread, dict(values))

    async def extra(self, thread: str) -> Mapping[str, JsonValue]:
        found: Mapping[str, JsonValue] = (await self._inner.load(thread)).extra
        return found


def _native(message: Any) -> Any:
    content: list[Any] = [TextContent(text=message["content"])]

    if message["role"] == "tool":
        return ToolResultMessage(
            tool_call_id=message["tool_call_id"],
            tool_name=message["name"],
            content=content,
        )

    calls = [
        ToolCall(
            id=call["id"],
            name=call["function"]["name"],
            arguments=json.loads(call["function"]["arguments"]),
        )
        for call in message["tool_calls"]
    ]
    return AssistantMessage(content=[*content, *calls])
