"""Appends that lose or repeat messages, or skip a check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpkit import CheckpointData, VersionConflict
from tests.broken.store import Broken, breaks


class _WithVersion(Broken):
    """Adds a method that returns the version of a thread."""

    def version(self, thread_id: str) -> int:
        thread = self._store.threads.get(thread_id)
        return 0 if thread is None else len(thread.bodies)


@breaks("append.returns-version")
class ReturnsTheCount(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        await super().append(thread_id, messages, **options)
        return len(messages)


@breaks("sizes.long-thread")
class TruncatesBatches(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        return await super().append(thread_id, messages[:1000], **options)


@breaks("append.keeps-duplicates")
class DropsDuplicates(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        unique = [m for i, m in enumerate(messages) if m not in messages[:i]]
        return await super().append(thread_id, unique, **options)


@breaks("append.takes-tuples", raises="TypeError")
class RequiresLists(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        if not isinstance(messages, list):
            raise TypeError("messages must be a list")

        return await super().append(thread_id, messages, **options)


@breaks("append.nothing-changes-nothing")
class CreatesThreadOnEmptyAppend(Broken):
    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        version = await super().append(thread_id, *args, **options)
        self._store.touch(thread_id)
        return version


@breaks("append.nothing-checks-version")
class SkipsCheckOnEmptyAppend(_WithVersion):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        if not messages:
            return self.version(thread_id)

        return await super().append(thread_id, messages, **options)


@breaks("append.expected-version-writes", raises="VersionConflict")
class RefusesVersionZero(_WithVersion):
    async def append(
        self,
        thread_id: str,
        *args: Any,
        expected_version: int | None = None,
        **options: Any,
    ) -> int:
        if expected_version == 0:
            raise VersionConflict(thread_id, 0, 0)

        return await super().append(
            thread_id, *args, expected_version=expected_version, **options
        )


@breaks("append.expected-version-counts-messages", raises="VersionConflict")
class CountsExtraInVersion(Broken):
    async def append(
        self,
        thread_id: str,
        *args: Any,
        expected_version: int | None = None,
        **options: Any,
    ) -> int:
        thread = self._store.threads.get(thread_id)

        if thread and thread.extra and expected_version == len(thread.bodies):
            actual = len(thread.bodies) + len(thread.extra)
            raise VersionConflict(thread_id, expected_version, actual)

        return await super().append(
            thread_id, *args, expected_version=expected_version, **options
        )


@breaks("append.conflict-writes-nothing", "append.conflict-makes-no-thread")
class WritesThenChecks(_WithVersion):
    async def append(
        self,
        thread_id: str,
        *args: Any,
        expected_version: int | None = None,
        **options: Any,
    ) -> int:
        before = self.version(thread_id)
        version = await super().append(thread_id, *args, **options)

        if expected_version not in (None, before):
            raise VersionConflict(thread_id, expected_version or 0, before)

        return version


@breaks("append.conflict-ahead")
class AcceptsLaterVersions(_WithVersion):
    async def append(
        self,
        thread_id: str,
        *args: Any,
        expected_version: int | None = None,
        **options: Any,
    ) -> int:
        if expected_version is not None and expected_version > self.version(thread_id):
            expected_version = None

        return await super().append(
            thread_id, *args, expected_version=expected_version, **options
        )


@breaks("append.conflict-tells-the-facts")
class SwapsConflictFields(Broken):
    async def append(self, *args: Any, **options: Any) -> int:
        try:
            return await super().append(*args, **options)
        except VersionConflict as exc:
            raise VersionConflict(exc.thread_id, exc.actual, exc.expected) from None


@breaks("append.retry-cannot-duplicate")
class TreatsZeroAsNone(Broken):
    async def append(
        self, *args: Any, expected_version: int | None = None, **options: Any
    ) -> int:
        return await super().append(
            *args, expected_version=expected_version or None, **options
        )


@breaks("append.all-or-none")
class AppendsOneByOne(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        version = await super().append(thread_id, [], **options)

        for message in messages:
            version = await super().append(thread_id, [message])

        return version


@breaks("append.copies-its-input")
class KeepsTheCallersMessages(Broken):
    _kept: dict[str, Sequence[Any]]

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        self._kept = {thread_id: messages}
        return await super().append(thread_id, messages, **options)

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is not None:
            loaded.messages[:] = self._kept[thread_id]

        return loaded


@breaks("append.leaves-the-rest")
class ClearsExtra(Broken):
    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        version = await super().append(thread_id, *args, **options)
        self._store.threads[thread_id].extra.clear()
        return version


@breaks("append.takes-a-sequence-only")
class AcceptsAnyIterable(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        return await super().append(thread_id, list(messages or ()), **options)


@breaks("append.expected-version-is-a-count")
class AcceptsAnyVersion(Broken):
    async def append(
        self, *args: Any, expected_version: Any = None, **options: Any
    ) -> int:
        version = None if expected_version is None else abs(int(expected_version))
        return await super().append(*args, expected_version=version, **options)
