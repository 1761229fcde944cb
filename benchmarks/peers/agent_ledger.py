"""agent-ledger on Postgres: the cycle of a call by begin and commit, and its `run`."""

from __future__ import annotations

from typing import Any

from agent_ledger import EffectLedger, EffectLedgerOptions, ToolCall
from agent_ledger.stores.postgres import SCHEMA_SQL, PostgresStore
from agent_ledger.types import CommitSucceeded
from agent_ledger.utils import compute_idem_key
from psycopg_pool import AsyncConnectionPool

from cpkit import JsonValue
from cpkit.tools.benchmark.contender import CALL_ARGS, CALL_RESULT, Contender

__all__ = ["AgentLedger"]


class AgentLedger(Contender):
    """A replay is a `begin` that finds the finished effect and returns its result."""

    abilities = frozenset({"calls", "open"})
    durability = "machine: synchronous_commit=on, the server's default"

    def __init__(self, where: str, name: str, *, tables: bool = True) -> None:
        super().__init__("postgres", name)
        self.where = where
        self._tables = tables
        self._pool: AsyncConnectionPool[Any]
        self._ledger: EffectLedger[Any]

    def another(self) -> AgentLedger:
        return AgentLedger(self.where, self.name, tables=False)

    async def open(self) -> None:
        self._pool = AsyncConnectionPool(self.where, min_size=1, max_size=8, open=False)
        await self._pool.open(wait=True)  # else it connects in the background

        if self._tables:
            async with self._pool.connection() as connection:
                await connection.execute(SCHEMA_SQL)

        store = PostgresStore(self._pool)
        self._ledger = EffectLedger(EffectLedgerOptions(store=store))

    async def close(self) -> None:
        await self._pool.close()

    async def fill(self, thread: str, messages: Any) -> None:
        """Do nothing: agent-ledger has no messages."""

    async def cycle(self, thread: str, name: str) -> JsonValue:
        call = _call(thread, name)
        begun = await self._ledger.begin(call)
        await self._ledger.commit(begun.effect.id, CommitSucceeded(result=CALL_RESULT))
        found = await self._ledger.find_by_idem_key(compute_idem_key(call))
        return None if found is None else found.result

    async def replay(self, thread: str, name: str) -> JsonValue:
        return (await self._ledger.begin(_call(thread, name))).cached_result

    async def once(self, name: str) -> JsonValue:
        """Run a handler for the call of this name; it has no decorator."""

        async def charge(_: object) -> JsonValue:
            return CALL_RESULT

        result: JsonValue = await self._ledger.run(_call("once", name), charge)
        return result


def _call(thread: str, name: str) -> ToolCall:
    return ToolCall(workflow_id=thread, tool="charge", args={**CALL_ARGS, "name": name})
