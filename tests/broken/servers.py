"""Clients of a killed server: untyped errors, lost writes, no reconnect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from conformance.harness import Harness, find
from cpkit import BackendUnavailable, Durability, Survives
from tests.broken.store import Broken, breaks


@dataclass
class ServedHarness(Harness):
    """Opens a `Served`, or a subclass, and kills its simulated server."""

    kind: str
    folder: str

    def open(self, **options: Any) -> Served:
        opened: Served = find(self.kind)(**options)
        return opened

    def elsewhere(self) -> Harness | None:
        return None

    async def kill(self) -> None:
        find(self.kind).server_dies()

    async def start(self) -> None:
        find(self.kind).up = True


class Served(Broken):
    """The reference behind a simulated server, which keeps its data when killed."""

    up: ClassVar[bool] = True
    down: ClassVar[Exception] = BackendUnavailable("broken", "connection refused")

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._check_usable()
        return self

    def _check_usable(self) -> None:
        super()._check_usable()

        if not self.up:
            raise self.down

    @property
    def durability(self) -> Durability:
        return Durability(Survives.PROCESS, {"kept": "as long as this test"})

    @classmethod
    def server_dies(cls) -> None:
        cls.up = False


@breaks("server.writes-survive", "server.claims-survive", harness=ServedHarness)
class LosesItsData(Served):
    @classmethod
    def server_dies(cls) -> None:
        super().server_dies()
        cls()._store.clear()


@breaks("server.down-is-unavailable", harness=ServedHarness)
class RaisesUntypedErrors(Served):
    down = ConnectionRefusedError("connection refused")


@breaks("server.handle-comes-back", harness=ServedHarness)
class NeverReconnects(Served):
    """Stays disconnected after the first operation that found the server down."""

    _disconnected = False

    def _check_usable(self) -> None:
        self._disconnected = self._disconnected or not self.up
        super()._check_usable()

        if self._disconnected:
            raise self.down
