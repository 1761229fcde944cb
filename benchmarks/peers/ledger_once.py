"""ledger-once on SQLite: an async function behind its decorator, with replay.

Its module is called ``ledger``. It calls SQLite in the event loop's thread.
"""

from __future__ import annotations

from typing import Any

from ledger import Guard

from cpkit import JsonValue
from cpkit.tools.benchmark.contender import CALL_RESULT, Contender

__all__ = ["LedgerOnce"]


class LedgerOnce(Contender):
    """A replay is a claim that finds the finished call."""

    abilities: frozenset[str] = frozenset()
    durability = "process: WAL with synchronous=NORMAL, set by the library"

    def __init__(self, where: str, name: str) -> None:
        super().__init__("sqlite", name)
        self.where = where
        self._guard: Any

    def another(self) -> LedgerOnce:
        return LedgerOnce(self.where, self.name)

    async def open(self) -> None:
        self._guard = Guard().persist(self.where).quiet()

        async def charge(name: str) -> JsonValue:
            return CALL_RESULT

        self._charge = self._guard.once(replay=True)(charge)

    async def close(self) -> None:
        """Do nothing: the library keeps a connection for each thread."""

    async def once(self, name: str) -> JsonValue:
        result: JsonValue = await self._charge(name)
        return result
