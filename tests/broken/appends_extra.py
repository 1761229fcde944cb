"""Appends that lose their extra, or merge it in a step of its own."""

from __future__ import annotations

from typing import Any

from tests.broken.store import Broken, breaks, pause


class _TwoSteps(Broken):
    """Appends the messages, then merges the extra; other tasks can run in between."""

    async def append(
        self,
        thread_id: str,
        messages: Any,
        *,
        expected_version: int | None = None,
        extra: Any = None,
    ) -> int:
        self._codec.append(thread_id, messages, expected_version, extra)
        version = await super().append(
            thread_id, messages, expected_version=expected_version
        )
        await self.merge(thread_id, extra or {})
        return version

    async def merge(self, thread_id: str, extra: dict[str, Any]) -> None:
        await pause()
        await super().save_extra(thread_id, extra)


@breaks("append.extra-is-stored")
class IgnoresExtra(Broken):
    async def append(
        self, thread_id: str, messages: Any, *, extra: Any = None, **options: Any
    ) -> int:
        return await super().append(thread_id, messages, **options)


@breaks("append.extra-merges")
class ReplacesExtraOnAppend(_TwoSteps):
    async def merge(self, thread_id: str, extra: dict[str, Any]) -> None:
        if extra and thread_id in self._store.threads:
            self._store.threads[thread_id].extra.clear()

        await self.save_extra(thread_id, extra)


@breaks("append.extra-stores-none")
class TreatsNoneInAppendAsAbsent(_TwoSteps):
    async def merge(self, thread_id: str, extra: dict[str, Any]) -> None:
        given = {key: value for key, value in extra.items() if value is not None}
        await self.save_extra(thread_id, given)


@breaks("append.conflict-writes-no-extra")
class MergesThenChecks(Broken):
    async def append(
        self, thread_id: str, messages: Any, *, extra: Any = None, **options: Any
    ) -> int:
        if messages and extra:
            await self.save_extra(thread_id, extra)

        return await super().append(thread_id, messages, extra=extra, **options)


@breaks("append.extra-is-fenced")
class MergesWithoutAFence(Broken):
    """Checks the expected version only where there are messages or no extra."""

    async def append(
        self,
        thread_id: str,
        messages: Any,
        *,
        expected_version: int | None = None,
        extra: Any = None,
    ) -> int:
        if extra and not messages:
            expected_version = None

        return await super().append(
            thread_id, messages, expected_version=expected_version, extra=extra
        )


@breaks("append.extra-creates-thread")
class MergesIntoExistingThreadsOnly(Broken):
    async def append(
        self, thread_id: str, messages: Any, *, extra: Any = None, **options: Any
    ) -> int:
        if not messages and thread_id not in self._store.threads:
            extra = None

        return await super().append(thread_id, messages, extra=extra, **options)


@breaks("append.empty-extra-changes-nothing")
class CreatesThreadOnEmptyExtra(Broken):
    async def append(
        self, thread_id: str, messages: Any, *, extra: Any = None, **options: Any
    ) -> int:
        version = await super().append(thread_id, messages, extra=extra, **options)

        if extra is not None:
            self._store.touch(thread_id)

        return version


@breaks("append.extra-is-checked-first")
class ChecksExtraAfterTheMessages(Broken):
    async def append(
        self, thread_id: str, messages: Any, *, extra: Any = None, **options: Any
    ) -> int:
        if not messages or not isinstance(extra, dict):
            return await super().append(thread_id, messages, extra=extra, **options)

        version = await super().append(thread_id, messages, **options)
        await self.save_extra(thread_id, extra)
        return version


@breaks("append.extra-is-a-mapping")
class AcceptsPairsInAppend(Broken):
    async def append(
        self, thread_id: str, messages: Any, *, extra: Any = None, **options: Any
    ) -> int:
        extra = None if extra is None else dict(extra or ())
        return await super().append(thread_id, messages, extra=extra, **options)


@breaks("concurrent.append-and-extra-are-one")
class ShowsMessagesBeforeExtra(_TwoSteps):
    """Keeps the contract for a lone task."""


@breaks("cancel.write-is-decided")
class LeavesMessagesWithoutExtra(_TwoSteps):
    """Stops between the two steps when it is cancelled."""
