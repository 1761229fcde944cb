"""Stores on disk that lose or tear one kind of write when the power fails."""

from __future__ import annotations

from typing import Any, BinaryIO

from cpkit import CallRecord
from tests.broken.crashes import DiskHarness
from tests.broken.powerloss import Synced, WritesBehindTheTear
from tests.broken.store import breaks


class _Lazy(Synced):
    """Syncs every write but those that a subclass calls lazy."""

    _is_lazy = False

    def _sync(self, log: BinaryIO) -> None:
        if self._is_lazy:
            log.flush()
        else:
            super()._sync(log)

        self._is_lazy = False


@breaks("powerloss.acknowledged-survives", harness=DiskHarness)
class SyncsNoFencedDeletion(_Lazy):
    """Deletes at a version by another path, which does not sync."""

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        self._is_lazy = "expected_version" in options
        await super().delete_thread(thread_id, **options)


@breaks("powerloss.acknowledged-survives", harness=DiskHarness)
class SyncsNoFencedExtra(_Lazy):
    """Takes an append without messages for nothing to sync."""

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        self._is_lazy = not messages
        return await super().append(thread_id, messages, **options)


@breaks("powerloss.acknowledged-survives", harness=DiskHarness)
class SyncsNoResultOfAnErasedCall(_Lazy):
    """Does not sync what is written to a deleted thread."""

    async def record_result(
        self, thread_id: str, *args: Any, **options: Any
    ) -> CallRecord:
        self._is_lazy = thread_id not in self._store.threads
        return await super().record_result(thread_id, *args, **options)


@breaks("powerloss.kill-at-every-call", harness=DiskHarness)
class DeletesAtAVersionInTwoWrites(Synced):
    """Erases a thread at its version, and then frees its keys."""

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        if options.get("expected_version") and options.get("forget_keys"):
            await super().delete_thread(thread_id, **{**options, "forget_keys": False})
            options = {"forget_keys": True}

        await super().delete_thread(thread_id, **options)


class _LeavesTheTear(WritesBehindTheTear):
    """Reads up to a torn line; the next write truncates the log, but for some."""

    _kinds: tuple[str, ...] = ()

    def _write(self, log: BinaryIO, values: list[Any]) -> None:
        if values[0] not in self._kinds:
            log.truncate(self._read)

        super()._write(log, values)


@breaks("powerloss.next-write-works", harness=DiskHarness)
class DeletesBehindTheTear(_LeavesTheTear):
    _kinds = ("delete_thread",)


@breaks("powerloss.next-write-works", harness=DiskHarness)
class RestoresBehindTheTear(_LeavesTheTear):
    _kinds = ("restore_thread",)
