"""Handles that ignore that they are closed, or in which event loop they are used."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self, TypeVar

from cpkit import (
    BackendUnavailable,
    CallRecord,
    CheckpointData,
    Closed,
    Durability,
    Survives,
    ThreadDump,
    ThreadInfo,
    VersionConflict,
    WrongEventLoop,
)
from cpkit.driver.ids import check_id
from tests.broken.reference import Reference
from tests.broken.store import AtOnce, Broken, breaks, pause

T = TypeVar("T")


@breaks("handle.is-a-checkpointer")
class LacksAMethod(Broken):
    find_completed = None  # type: ignore[assignment]  # the point


@breaks("handle.closed-after", "handle.closed-before", "handle.closed-comes-first")
class AnswersWhenClosed(Broken):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        return await super().load(thread_id) if self._is_open else None


@breaks("handle.closed-after", "handle.closed-before")
class ReadsWhenClosed(Broken):
    """Answers an optional method."""

    async def read(self, *args: Any, **options: Any) -> list[Any]:
        return await super().read(*args, **options) if self._is_open else []


@breaks("handle.closed-comes-first")
class ChecksTheIdFirst(Broken):
    async def read(self, thread_id: str, *args: Any, **options: Any) -> list[Any]:
        return await super().read(check_id("thread_id", thread_id), *args, **options)


@breaks("handle.close-is-idempotent", raises="Closed")
class RaisesOnSecondClose(Broken):
    async def aclose(self) -> None:
        self._check_usable()
        await super().aclose()


@breaks("handle.close-lets-writes-finish")
class AcknowledgesAtClose(Broken):
    async def append(self, *args: Any, **options: Any) -> int:
        await pause()
        return await super().append(*args, **options) if self._is_open else 1


@breaks("handle.close-leaves-no-task")
class LeavesATask(Broken):
    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(asyncio.sleep(3600))
        return await super().__aenter__()


@breaks(
    "handle.opens-again", "handle.shares-every-write", "typed.misfit-is-told-at-load"
)
class SharesNothing(Reference):
    """Each handle has its own store, although the harness says that it is shared."""

    def __init__(self, **options: Any) -> None:
        super().__init__(None, **options)


@breaks("handle.shares-calls")
class CachesPending(Broken):
    """Returns the pending calls of a thread from a stale cache."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)
        known = self.__dict__.setdefault("_known", {}).setdefault(thread_id, [])
        return loaded and replace(loaded, pending=known)


@breaks("handle.wrong-loop")
class WorksInAnyLoop(Broken):
    def _check_usable(self) -> None:
        if not self._is_open:
            raise Closed("broken")


@breaks("handle.wrong-loop")
class ClosesFromAnyLoop(Broken):
    """Checks the loop of every operation, and closes for any other loop."""

    async def aclose(self) -> None:
        self._loop = asyncio.get_running_loop()
        await super().aclose()


@breaks("handle.wrong-loop-does-no-harm", raises="Closed")
class ClosesInTheWrongLoop(Broken):
    def _check_usable(self) -> None:
        try:
            super()._check_usable()
        except WrongEventLoop:
            self._is_open = False
            raise


@breaks("handle.works-after-refusals", raises="BackendUnavailable")
class BreaksAfterConflicts(Broken):
    _failed = False

    async def append(self, *args: Any, **options: Any) -> int:
        if self._failed:
            raise BackendUnavailable("broken", "in a failed transaction")

        try:
            return await super().append(*args, **options)
        except VersionConflict:
            self._failed = True
            raise


@breaks("handle.lets-others-run")
class NeverYields(AtOnce):
    """Does all of its work in one step, as a store in memory can."""


@breaks("handle.lets-others-run")
class LoadsAtOnce(Broken):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        self._check_usable()
        return self._snapshot(thread_id, 0, None)


@breaks("handle.states-durability")
class StatesNoText(Broken):
    @property
    def durability(self) -> Durability:
        return Durability(Survives.MACHINE)


class RemembersUntilItChanges(Broken):
    """Remembers what it saw, until this handle itself changes something."""

    def _changed(self, thread_id: str, change: str) -> None:
        self.__dict__["_seen"] = {}
        super()._changed(thread_id, change)

    def remembered(self, what: object, fresh: T) -> T:
        seen = self.__dict__.setdefault("_seen", {})
        kept: T = deepcopy(seen.setdefault(repr(what), fresh))
        return kept


@breaks("handle.shares-every-write")
class RemembersMessages(RemembersUntilItChanges):
    async def read(self, *args: Any, **options: Any) -> list[Any]:
        fresh = await super().read(*args, **options)
        return self.remembered(("read", args, options), fresh)


@breaks("handle.shares-every-write")
class RemembersLists(RemembersUntilItChanges):
    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        fresh = await super().list_threads(**options)
        return self.remembered(("list", options), fresh)


@breaks("handle.shares-every-write")
class RemembersDumps(RemembersUntilItChanges):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        fresh = await super().dump_thread(thread_id)
        return self.remembered(("dump", thread_id), fresh)


@breaks("handle.shares-every-write")
class RemembersVersions(RemembersUntilItChanges):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        version = await super().append(thread_id, messages, **options)
        nothing = not messages and not options
        return self.remembered(thread_id, version) if nothing else version


@breaks("handle.shares-calls")
class RemembersReceipts(RemembersUntilItChanges):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        fresh = await super().list_calls(thread_id)
        return self.remembered(("calls", thread_id), fresh)


@breaks("handle.shares-calls")
class RemembersHolders(RemembersUntilItChanges):
    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        fresh = await super().find_call(idempotency_key)
        return self.remembered(("key", idempotency_key), fresh)

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await super().find_call(idempotency_key)
        return record if record and record.status == "completed" else None
