"""Clients of a killed or paused server: untyped errors, lost writes, endless waits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from conformance.harness import Harness, find
from cpkit import (
    BackendUnavailable,
    CheckpointData,
    Durability,
    Survives,
    VersionConflict,
)
from tests.broken.store import Broken, breaks


@dataclass
class ServedHarness(Harness):
    """Opens a `Served`, or a subclass, and kills or pauses its simulated server."""

    kind: str
    folder: str

    options = Harness.options | {"timeout"}

    def open(self, **options: Any) -> Served:
        opened: Served = find(self.kind)(**options)
        return opened

    def elsewhere(self) -> Harness | None:
        return None

    async def kill(self) -> None:
        find(self.kind).server_dies()

    async def start(self) -> None:
        find(self.kind).up = True

    async def pause(self) -> None:
        find(self.kind).paused = True

    async def resume(self) -> None:
        find(self.kind).paused = False


class Served(Broken):
    """The reference behind a simulated server, which keeps its data when killed."""

    up: ClassVar[bool] = True
    paused: ClassVar[bool] = False
    down: ClassVar[Exception] = BackendUnavailable("broken", "connection refused")

    def __init__(self, *, timeout: float = 30, **options: Any) -> None:
        super().__init__(**options)
        self._timeout: float | None = timeout

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self._reach()
        self._check_usable()
        return self

    async def _begin(self) -> None:
        await self._reach()
        await super()._begin()

    async def _reach(self) -> None:
        """Wait for a paused server, until the timeout."""
        try:
            async with asyncio.timeout(self._timeout):
                while self.paused:  # noqa: ASYNC110  # a flag for the loops of all clauses
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise BackendUnavailable("broken", "late", maybe_applied=True) from None

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


@breaks("server.handle-comes-back", harness=ServedHarness, raises="BackendUnavailable")
class NeverReconnects(Served):
    """Stays disconnected after the first operation that found the server down."""

    _disconnected = False

    def _check_usable(self) -> None:
        self._disconnected = self._disconnected or not self.up
        super()._check_usable()

        if self._disconnected:
            raise self.down


@breaks("server.paused-is-unavailable", harness=ServedHarness, hangs=True)
class HasNoTimeout(Served):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._timeout = None


@breaks("server.paused-handle-closes", harness=ServedHarness, hangs=True)
class ClosesOnlyOnARunningServer(Served):
    """Waits for the server to answer before its connections are closed."""

    async def aclose(self) -> None:
        while self.paused:  # noqa: ASYNC110  # a flag for the loops of all clauses
            await asyncio.sleep(0.005)

        await super().aclose()


class AppliesAfterThePause(Served):
    """A correct store whose server applies a late append after its next answer."""

    received: ClassVar[list[tuple[Any, Any]]] = []

    async def append(self, *args: Any, **options: Any) -> int:
        try:
            version = await super().append(*args, **options)
        except BackendUnavailable:
            self.received.append((args, options))
            raise

        await self._apply_received()
        return version

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)
        await self._apply_received()
        return loaded

    async def _apply_received(self) -> None:
        while self.received:
            args, options = self.received.pop()

            with suppress(VersionConflict):
                await super().append(*args, **options)


@breaks("server.paused-is-honest", harness=ServedHarness)
class SaysThatNothingWasWritten(AppliesAfterThePause):
    """Calls an append that timed out not applied."""

    async def append(self, *args: Any, **options: Any) -> int:
        try:
            return await super().append(*args, **options)
        except BackendUnavailable:
            raise BackendUnavailable("broken", "late") from None


@breaks(
    "server.paused-handle-comes-back",
    harness=ServedHarness,
    raises="BackendUnavailable",
)
class StaysTimedOut(Served):
    """Does not replace a connection whose operation timed out."""

    async def _reach(self) -> None:
        try:
            await super()._reach()
        except BackendUnavailable:
            self._timeout = -1
            raise

        if self._timeout == -1:
            raise BackendUnavailable("broken", "late", maybe_applied=True)
