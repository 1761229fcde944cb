"""Stores that one process may hold, and what a refused process does to the holder."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import ClassVar, Self

from conformance.harness import Harness
from cpkit import BackendUnavailable, Durability, Survives
from tests.broken.crashes import Disk, DiskHarness
from tests.broken.store import breaks


@dataclass
class HeldHarness(DiskHarness):
    def elsewhere(self) -> Harness | None:
        return None


class Held(Disk):
    """The reference on disk, which one process may open. It is correct.

    The handles of a process share the lock, until the last of them is closed.
    """

    held: ClassVar[dict[str, tuple[int, int]]] = {}
    """The descriptor of the lock, and the number of handles, by folder."""

    @property
    def durability(self) -> Durability:
        return Durability(Survives.PROCESS)

    async def __aenter__(self) -> Self:
        lock, count = self.held.get(str(self._folder), (-1, 0))

        if not count:
            lock = os.open(self._folder / "holder", os.O_RDWR | os.O_CREAT)

            if not self._take(lock):
                os.close(lock)
                raise BackendUnavailable("broken", "another process has it open")

        self.held[str(self._folder)] = lock, count + 1
        return await super().__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        lock, count = self.held.pop(str(self._folder))

        if count > 1:
            self.held[str(self._folder)] = lock, count - 1
        else:
            self._release(lock)

    def _take(self, lock: int) -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False

        return True

    def _release(self, lock: int) -> None:
        os.close(lock)


@breaks("kill.one-process-at-a-time", harness=HeldHarness)
class OpensTwice(Held):
    """Has no lock, as its engine has none."""

    def _take(self, lock: int) -> bool:
        return True


@breaks("kill.one-process-at-a-time", harness=HeldHarness)
class TruncatesBeforeItLocks(Held):
    """Opens its log for writing, which empties it, and asks for the lock then."""

    def _take(self, lock: int) -> bool:
        taken = super()._take(lock)

        if not taken:
            self._log.write_bytes(b"")

        return taken


@breaks("kill.one-process-at-a-time", harness=HeldHarness)
class MovesTheLogAside(Held):
    """Takes a log that it cannot lock for a damaged one, and moves it aside."""

    def _take(self, lock: int) -> bool:
        taken = super()._take(lock)

        if not taken:
            self._log.rename(self._log.with_name(f"damaged-{os.getpid()}"))

        return taken


@breaks("kill.one-process-at-a-time", harness=HeldHarness)
class RemovesTheLockOfTheHolder(Held):
    """Cleans up after a refused opening: the file of the lock too."""

    def _take(self, lock: int) -> bool:
        taken = super()._take(lock)

        if not taken:
            (self._folder / "holder").unlink()

        return taken


@breaks("kill.one-process-at-a-time", harness=HeldHarness)
class ForgetsToUnlock(Held):
    """Leaves its lock where the last handle is closed."""

    def _release(self, lock: int) -> None:
        return


class LocksByFile(Held):
    """Holds the store by the existence of a file."""

    def _take(self, lock: int) -> bool:
        try:
            os.close(os.open(self._folder / "lock", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False

        return True

    def _release(self, lock: int) -> None:
        super()._release(lock)
        (self._folder / "lock").unlink()


@breaks("kill.one-process-at-a-time", harness=HeldHarness)
class StaysLockedAfterAKill(LocksByFile):
    """Its file stays when the process that made it is killed."""


@breaks("kill.one-process-at-a-time", harness=HeldHarness)
class RefusesWithAnotherError(Held):
    def _take(self, lock: int) -> bool:
        if not super()._take(lock):
            raise BlockingIOError("another process has it open")

        return True


@breaks("kill.one-process-at-a-time", harness=HeldHarness)
class UnlocksWithAnyHandle(Held):
    """Releases the lock when the first of several handles is closed."""

    async def __aexit__(self, *exc: object) -> None:
        lock, _ = self.held[str(self._folder)]
        await super().__aexit__(*exc)

        if str(self._folder) in self.held:
            fcntl.flock(lock, fcntl.LOCK_UN)
