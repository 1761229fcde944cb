"""The harness of each store."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from conformance import Harness
from tests.strangers import stores

__all__ = ["STRANGERS", "Stranger"]

STRANGERS = {
    "cubeloop, in memory": stores.CubeloopMemory,
    "cubeloop, SQLite": stores.CubeloopSQLite,
    "cubeloop, Postgres": stores.CubeloopPostgres,
    "Agents SDK, SQLite": stores.AgentsSQLite,
    "Agents SDK, Redis": stores.AgentsRedis,
}
"""The adapters, by the name of the store on the page."""


@dataclass
class Stranger(Harness):
    """One of `STRANGERS`; ``where`` is what its adapter takes."""

    kind: str
    where: list[str]

    options = frozenset()

    @property
    def name(self) -> str:
        return self.kind

    @property
    def shared(self) -> bool:  # type: ignore[override]  # read-only, because it follows from ``where``
        return bool(self.where)

    def open(self, **options: Any) -> AbstractAsyncContextManager[Any]:
        opened: AbstractAsyncContextManager[Any] = STRANGERS[self.kind](*self.where)
        return opened
