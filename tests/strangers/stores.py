"""Adapters from the stores of other projects to the contract.

An adapter adds nothing: it checks nothing, translates no error and keeps no state. So
what the suite finds is the behaviour of the store, with four exceptions:

- No store takes an expected version. So the adapter compares the version before it
  appends; another writer can append between these two steps.
- No store writes messages and extra in one step. So an append with extra raises.
- No store records calls. So the three call methods raise.
- cubeloop's messages are models. So a message is stored as the ``metadata`` of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from agents import SQLiteSession
from agents.extensions.memory import RedisSession
from cubeloop.checkpointer.memory import MemoryCheckpointer
from cubeloop.checkpointer.sqlite import SQLiteCheckpointer
from cubeloop.providers.base import UserMessage

from cpkit import CallRecord, CheckpointData, JsonValue, ToolCall, VersionConflict

__all__ = [
    "AgentsRedis",
    "AgentsSQLite",
    "CubeloopMemory",
    "CubeloopPostgres",
    "CubeloopSQLite",
]

Message = dict[str, Any]


def _check_no_extra(extra: object) -> None:
    if extra is not None:
        raise NotImplementedError("the store does not write extra with messages")


class _NoCalls:
    """A store that keeps no record of calls."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        raise NotImplementedError("the store keeps no record of calls")

    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, *, success: bool = True
    ) -> CallRecord:
        raise NotImplementedError("the store keeps no record of calls")

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        raise NotImplementedError("the store keeps no record of calls")


class _Cubeloop(_NoCalls):
    """cubeloop 0.15.3: ``load``, ``append`` and ``save_extra`` call its own methods."""

    inner: Any

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.inner.__aexit__(*exc_info)

    async def load(self, thread_id: str) -> CheckpointData[Message] | None:
        data = await self.inner.load(thread_id)

        if data is None:
            return None

        messages = [one.metadata for one in data.messages]
        return CheckpointData(messages, data.extra, [], len(messages))

    async def append(
        self,
        thread_id: str,
        messages: Sequence[Message],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        _check_no_extra(extra)
        data = await self.inner.load(thread_id)
        version = 0 if data is None else len(data.messages)

        if expected_version not in (None, version):
            raise VersionConflict(thread_id, expected_version, version)

        models = [UserMessage(content=[], metadata=message) for message in messages]
        await self.inner.append(thread_id, models)
        return version + len(models)

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await self.inner.save_extra(thread_id, dict(extra))


class CubeloopMemory(_Cubeloop):
    """cubeloop's checkpointer in memory."""

    def __init__(self) -> None:
        self.inner = MemoryCheckpointer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Do nothing: the store has no close method."""


class CubeloopSQLite(_Cubeloop):
    """cubeloop's checkpointer on SQLite."""

    def __init__(self, path: str) -> None:
        self.inner = SQLiteCheckpointer(path)


class CubeloopPostgres(_Cubeloop):
    """cubeloop's checkpointer on Postgres; the tables exist already."""

    def __init__(self, dsn: str) -> None:
        # It imports SQLAlchemy: half a second for each process that collects the tests.
        from cubeloop.checkpointer.postgres import PostgresCheckpointer

        self.inner = PostgresCheckpointer(dsn)


class _Agents(_NoCalls):
    """A session of the OpenAI Agents SDK for each thread, without extra."""

    def __init__(self) -> None:
        self.sessions: dict[str, Any] = {}

    def session(self, thread_id: str) -> Any:
        raise NotImplementedError("a subclass must define session()")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for session in self.sessions.values():
            await self.close(session)

    async def close(self, session: Any) -> None:
        session.close()

    def of(self, thread_id: str) -> Any:
        if thread_id not in self.sessions:
            self.sessions[thread_id] = self.session(thread_id)

        return self.sessions[thread_id]

    async def load(self, thread_id: str) -> CheckpointData[Message] | None:
        items = await self.of(thread_id).get_items()
        return CheckpointData(items, {}, [], len(items)) if items else None

    async def append(
        self,
        thread_id: str,
        messages: Sequence[Message],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        _check_no_extra(extra)
        version = len(await self.of(thread_id).get_items())

        if expected_version not in (None, version):
            raise VersionConflict(thread_id, expected_version, version)

        await self.of(thread_id).add_items(list(messages))
        return version + len(messages)

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        raise NotImplementedError("the store keeps no extra")


class AgentsSQLite(_Agents):
    """The SDK's SQLite session."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def session(self, thread_id: str) -> Any:
        return SQLiteSession(thread_id, self.path)


class AgentsRedis(_Agents):
    """The SDK's Redis session."""

    def __init__(self, url: str, prefix: str) -> None:
        super().__init__()
        self.url = url
        self.prefix = prefix

    def session(self, thread_id: str) -> Any:
        return RedisSession.from_url(thread_id, url=self.url, key_prefix=self.prefix)

    async def close(self, session: Any) -> None:
        await session.close()
