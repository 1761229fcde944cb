"""LangGraph's savers on SQLite and Postgres, with whole states and with deltas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessage, ToolMessage
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from cpkit.tools.benchmark.contender import Contender

__all__ = ["LangGraph"]

CHANNEL = "messages"

# DeltaChannel's own default for snapshot_frequency.
SNAPSHOT_EACH = 100


class _State:
    """The state of a thread that a running graph has in memory."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.messages: list[Any] = []
        self.config: Any = None
        self.version: Any = None
        self.since_snapshot = 0


class LangGraph(Contender):
    """``where`` is a SQLite file or the URL of a Postgres database.

    The messages are LangChain's, as in every graph that adds messages. With ``plain``
    they are dicts, which the serializer stores without conversion.
    """

    def __init__(
        self,
        driver: str,
        where: str,
        name: str,
        *,
        delta: bool = False,
        plain: bool = False,
    ) -> None:
        super().__init__(driver, name)
        self.plain = plain

        if plain:
            self.abilities = frozenset({"load"})

        self.where = where
        self.delta = delta
        self._states: dict[str, _State] = {}
        self._stack = AsyncExitStack()
        self._saver: Any
        self.durability = {
            "sqlite": "machine: WAL with synchronous=FULL, SQLite's default",
            "postgres": "machine: synchronous_commit=on, the server's default",
        }[driver]

    def another(self) -> LangGraph:
        return LangGraph(
            self.driver, self.where, self.name, delta=self.delta, plain=self.plain
        )

    async def open(self) -> None:
        if self.driver == "sqlite":
            self._saver = await self._stack.enter_async_context(
                AsyncSqliteSaver.from_conn_string(self.where)
            )
        else:
            pool = AsyncConnectionPool(
                self.where,
                min_size=1,
                max_size=8,
                open=False,
                kwargs={
                    "autocommit": True,
                    "prepare_threshold": 0,
                    "row_factory": dict_row,
                },
            )
            self._saver = AsyncPostgresSaver(
                await self._stack.enter_async_context(pool)  # type: ignore[arg-type]  # the row factory is passed in kwargs
            )

        await self._saver.setup()

    async def close(self) -> None:
        await self._stack.aclose()

    def native(self, messages: Sequence[Any]) -> list[Any]:
        return list(messages) if self.plain else list(map(_native, messages))

    async def append(self, thread: str, message: Any) -> None:
        state = self._states.setdefault(thread, _State())

        async with state.turn:
            await self._step(thread, state, message)

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        state = self._states.setdefault(thread, _State())
        state.messages += messages
        await self._put(thread, state, list(state.messages))

    async def forget(self, threads: Sequence[str]) -> None:
        for thread in threads:
            self._states.pop(thread, None)

    async def load(self, thread: str) -> list[Any]:
        config = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        found = await self._saver.aget_tuple(config)
        values = found.checkpoint["channel_values"]

        if not self.delta:
            return list(values[CHANNEL])

        if CHANNEL in values and isinstance(values[CHANNEL], _DeltaSnapshot):
            return list(values[CHANNEL].value)

        histories = await self._saver.aget_delta_channel_history(
            config=found.config, channels=[CHANNEL]
        )
        seed = histories[CHANNEL]["seed"]
        messages = list(seed.value if isinstance(seed, _DeltaSnapshot) else seed)

        for _, _, value in histories[CHANNEL]["writes"]:
            messages += value

        return messages

    async def _step(self, thread: str, state: _State, message: Any) -> None:
        state.messages.append(message)

        if not self.delta or state.config is None:
            await self._put(thread, state, list(state.messages))
            return

        state.since_snapshot += 1
        writes = [(CHANNEL, [message])]
        await self._saver.aput_writes(state.config, writes, str(uuid4()))

        if state.since_snapshot < SNAPSHOT_EACH:
            await self._put(thread, state, None)
        else:
            state.since_snapshot = 0
            await self._put(thread, state, list(state.messages))

    async def _put(self, thread: str, state: _State, whole: list[Any] | None) -> None:
        checkpoint: Checkpoint = empty_checkpoint()
        checkpoint["id"] = str(uuid6())
        state.version = self._saver.get_next_version(state.version, None)
        checkpoint["channel_versions"] = {CHANNEL: state.version}

        if whole is not None:
            value = _DeltaSnapshot(whole) if self.delta else whole
            checkpoint["channel_values"] = {CHANNEL: value}

        config = state.config or {
            "configurable": {"thread_id": thread, "checkpoint_ns": ""}
        }
        state.config = await self._saver.aput(
            config,
            checkpoint,
            {"source": "loop", "step": len(state.messages), "parents": {}},
            {CHANNEL: state.version},
        )


def _native(message: Any) -> Any:
    if message["role"] == "tool":
        return ToolMessage(
            content=message["content"],
            tool_call_id=message["tool_call_id"],
            name=message["name"],
        )

    calls = [
        {
            "id": call["id"],
            "name": call["function"]["name"],
            "args": json.loads(call["function"]["arguments"]),
        }
        for call in message["tool_calls"]
    ]
    return AIMessage(content=message["content"], tool_calls=calls)
