"""exactly-once on SQLite: an async function behind its decorator."""

from __future__ import annotations

from typing import Any

from exactly_once import Store, once

from cpkit import JsonValue
from cpkit.tools.benchmark.contender import CALL_RESULT, Contender

__all__ = ["ExactlyOnce"]


class ExactlyOnce(Contender):
    """A replay is a claim that finds the finished call, in a worker thread."""

    abilities: frozenset[str] = frozenset()
    durability = "process: WAL with synchronous=NORMAL, set by the library"

    def __init__(self, where: str, name: str) -> None:
        super().__init__("sqlite", name)
        self.where = where
        self._store: Any

    def another(self) -> ExactlyOnce:
        return ExactlyOnce(self.where, self.name)

    async def open(self) -> None:
        self._store = Store.sqlite(self.where)

        async def charge(name: str) -> JsonValue:
            return CALL_RESULT

        self._charge: Any = once(self._store, key=lambda name: name)(charge)

    async def close(self) -> None:
        self._store.close()

    async def once(self, name: str) -> JsonValue:
        result: JsonValue = await self._charge(name)
        return result
