"""Operations in two steps; other tasks can run between them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cpkit import CallRecord, CheckpointData, JsonValue, ToolCall, VersionConflict
from tests.broken.store import AtOnce, Broken, breaks, pause


@breaks("concurrent.appends-are-all-there", "linearizable.threads-in-tasks")
class RewritesTheThread(Broken):
    """Reads the thread, adds to it, and writes it back."""

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        write = self._codec.append(thread_id, messages, None)
        thread = self._store.touch(thread_id)
        bodies = [*thread.bodies, *write.bodies]
        await pause()
        thread.bodies = bodies
        return len(bodies)


@breaks("concurrent.one-wins-a-version", "linearizable.threads-in-handles")
class ChecksThenAppends(Broken):
    async def append(
        self,
        thread_id: str,
        messages: Any,
        *,
        expected_version: int | None = None,
        **options: Any,
    ) -> int:
        thread = self._store.threads.get(thread_id)
        version = len(thread.bodies) if thread else 0

        if expected_version not in (None, version):
            raise VersionConflict(thread_id, expected_version or 0, version)

        await pause()
        return await super().append(thread_id, messages, **options)


@breaks("concurrent.merges-are-not-lost")
class RewritesExtra(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        write = self._codec.merge(thread_id, extra)
        thread = self._store.touch(thread_id)
        merged = {**thread.extra, **dict(write.items)}
        await pause()
        thread.extra = merged


@breaks("concurrent.merges-are-atomic")
class MergesKeyByKey(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        for key, value in extra.items():
            await super().save_extra(thread_id, {key: value})
            await pause()


@breaks("concurrent.loads-are-snapshots")
class AppendsInView(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        version = 0

        for message in messages:
            version = await super().append(thread_id, [message])
            await pause()

        return version


@breaks(
    "concurrent.same-call-claims-once",
    "linearizable.keys-in-tasks",
    "linearizable.keys-in-handles",
)
class ChecksThenClaims(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        known = (thread_id, call.call_id) in self._store.calls
        holder = await self.find_call(call.idempotency_key)
        await pause()
        record = await super().record_issued(thread_id, call)
        return record if known or holder else None


@breaks("concurrent.loads-are-of-one-moment")
class LoadsInTwoSteps(Broken):
    """Reads the messages first; extra and pending calls are newer."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        first = await super().load(thread_id)
        await pause()
        second = await super().load(thread_id)

        if first is None or second is None:
            return second

        return self._joined(first, second)

    def _joined(
        self, first: CheckpointData[Any], second: CheckpointData[Any]
    ) -> CheckpointData[Any]:
        return replace(second, messages=first.messages, version=first.version)


@breaks("concurrent.loads-are-of-one-moment")
class LoadsMessagesLast(LoadsInTwoSteps):
    """Reads the messages last; extra is older."""

    def _joined(
        self, first: CheckpointData[Any], second: CheckpointData[Any]
    ) -> CheckpointData[Any]:
        return replace(second, extra=first.extra)


@breaks("concurrent.a-slow-load-is-of-one-moment")
class LoadsWithoutASnapshot(LoadsInTwoSteps, AtOnce):
    """As `LoadsInTwoSteps`, and no other task of its event loop can write between."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        first = await super(LoadsInTwoSteps, self).load(thread_id)
        second = await super(LoadsInTwoSteps, self).load(thread_id)

        if first is None or second is None:
            return second

        return self._joined(first, second)


@breaks("concurrent.threads-make-progress", hangs=True)
class WaitsForIdleReaders(Broken):
    """Appends only after no load of any thread has happened for some time."""

    loads: ClassVar[int] = 0

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        WaitsForIdleReaders.loads += 1
        return await super().load(thread_id)

    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        seen = -1

        while seen != self.loads:
            seen = self.loads

            for _ in range(50):
                await pause()

        return await super().append(thread_id, *args, **options)


@breaks("concurrent.event-loops-share-the-store")
class LocksOneEventLoop(Broken):
    """Checks, then writes: nothing comes between in one event loop, but in two."""

    async def append(
        self,
        thread_id: str,
        messages: Any,
        *,
        expected_version: int | None = None,
        **options: Any,
    ) -> int:
        self._check_usable()
        self._codec.append(thread_id, messages, expected_version, options.get("extra"))
        await super().append(thread_id, [], expected_version=expected_version)
        time.sleep(0.0002)  # noqa: ASYNC251  # only other threads may run
        return await super().append(thread_id, messages, **options)
