"""Clients of a server that is killed: untyped errors, lost writes, no way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from conformance.harness import Harness, find
from cpkit import BackendUnavailable, Durability, Survives
from cpkit.driver.lifetime import Lifetime
from tests.broken.store import Broken, breaks


@dataclass
class ServedHarness(Harness):
    """A `Served`, or what is broken of it, with its pretended server."""

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


class _Wire(Lifetime):
    """Checks before each operation whether the server is there."""

    served: type[Served]

    def check(self) -> None:
        super().check()

        if not self.served.up:
            raise self.served.down


class Served(Broken):
    """The reference behind a pretended server, which keeps what it has when killed."""

    up: ClassVar[bool] = True
    down: ClassVar[Exception] = BackendUnavailable("broken", "connection refused")
    wire: ClassVar[type[_Wire]] = _Wire

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        wire = self.wire("broken")
        wire.served = type(self)
        self._lifetime = wire

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._lifetime.check()
        return self

    @property
    def durability(self) -> Durability:
        return Durability(Survives.PROCESS, "as long as this test")

    @classmethod
    def server_dies(cls) -> None:
        cls.up = False


@breaks("server.writes-survive", "server.claims-survive", harness=ServedHarness)
class LosesItsMemory(Served):
    @classmethod
    def server_dies(cls) -> None:
        super().server_dies()
        store = cls()._store
        store.threads.clear()
        store.calls.clear()
        store.calls_of.clear()
        store.attempts.clear()


@breaks("server.down-is-unavailable", harness=ServedHarness)
class RaisesItsClientsErrors(Served):
    down = ConnectionRefusedError("connection refused")


class _Cut(_Wire):
    _cut = False

    def check(self) -> None:
        self._cut = self._cut or not self.served.up
        super().check()

        if self._cut:
            raise self.served.down


@breaks("server.handle-comes-back", harness=ServedHarness)
class NeverComesBack(Served):
    wire = _Cut
