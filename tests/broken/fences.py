"""Deletions at an expected version that delete too much, or do not compare."""

from __future__ import annotations

import asyncio
from typing import Any

from cpkit import VersionConflict
from tests.broken.crashes import Disk, DiskHarness
from tests.broken.races_of_processes import ROUND_TRIP
from tests.broken.reference import Reference
from tests.broken.store import Broken, breaks, pause


@breaks("erase.expected-version-deletes", raises="VersionConflict")
class CountsCallsInAFence(Broken):
    """Compares the version with the number of messages and calls."""

    async def delete_thread(
        self, thread_id: str, *, expected_version: int | None = None, **options: Any
    ) -> None:
        if expected_version and (calls := self._store.of_thread(thread_id)):
            raise VersionConflict(
                thread_id, expected_version, expected_version + len(calls)
            )

        await super().delete_thread(
            thread_id, expected_version=expected_version, **options
        )


@breaks("erase.expected-version-deletes")
class ForgetsKeysBehindAFence(Broken):
    async def delete_thread(
        self, thread_id: str, *, expected_version: int | None = None, **options: Any
    ) -> None:
        if expected_version is not None:
            options["forget_keys"] = True

        await super().delete_thread(
            thread_id, expected_version=expected_version, **options
        )


@breaks("erase.conflict-deletes-nothing", "erase.conflict-tells-the-facts")
class IgnoresTheFence(Broken):
    async def delete_thread(
        self, thread_id: str, *, expected_version: int | None = None, **options: Any
    ) -> None:
        await super().delete_thread(thread_id, **options)


@breaks("erase.conflict-deletes-nothing")
class ErasesCallsThenChecks(Broken):
    """Erases the calls in a step of its own, before the fence is compared."""

    async def delete_thread(
        self, thread_id: str, *, expected_version: int | None = None, **options: Any
    ) -> None:
        for call in self._store.of_thread(thread_id) if expected_version else ():
            bare = call._replace(args=b"{}", result=None, erased=True)
            self._store.calls[thread_id, call.call_id] = bare

        await super().delete_thread(
            thread_id, expected_version=expected_version, **options
        )


@breaks("erase.conflict-deletes-nothing")
class DeletesOlderVersionsOnly(Broken):
    """Takes an expected version that is ahead for one that fits."""

    async def delete_thread(
        self, thread_id: str, *, expected_version: int | None = None, **options: Any
    ) -> None:
        loaded = await self.load(thread_id)

        if loaded and expected_version and expected_version > loaded.version:
            expected_version = None

        await super().delete_thread(
            thread_id, expected_version=expected_version, **options
        )


@breaks("erase.conflict-deletes-nothing")
class TouchesWhatItDoesNotDelete(Broken):
    """Moves updated_at of a thread that it does not delete."""

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        try:
            await super().delete_thread(thread_id, **options)
        except VersionConflict:
            if thread_id in self._store.threads:
                self._store.touch(thread_id)

            raise


@breaks("erase.conflict-tells-the-facts")
class SwapsTheFieldsOfARefusedDeletion(Broken):
    async def delete_thread(self, *args: Any, **options: Any) -> None:
        try:
            await super().delete_thread(*args, **options)
        except VersionConflict as exc:
            raise VersionConflict(exc.thread_id, exc.actual, exc.expected) from None


@breaks("erase.missing-is-at-0")
class DeletesTheMissingAtAnyVersion(Broken):
    async def delete_thread(
        self, thread_id: str, *, expected_version: int | None = None, **options: Any
    ) -> None:
        if thread_id not in self._store.threads:
            expected_version = None

        await super().delete_thread(
            thread_id, expected_version=expected_version, **options
        )


@breaks("erase.missing-is-at-0", raises="VersionConflict")
class RefusesToDeleteTheMissing(Broken):
    async def delete_thread(
        self, thread_id: str, *, expected_version: int | None = None, **options: Any
    ) -> None:
        if expected_version is not None and thread_id not in self._store.threads:
            raise VersionConflict(thread_id, expected_version, 0)

        await super().delete_thread(
            thread_id, expected_version=expected_version, **options
        )


@breaks("erase.expected-version-is-a-count")
class DeletesAtAnyNumber(Broken):
    async def delete_thread(
        self, thread_id: str, *, expected_version: Any = None, **options: Any
    ) -> None:
        version = None if expected_version is None else abs(int(expected_version))
        await super().delete_thread(thread_id, expected_version=version, **options)


@breaks("concurrent.one-deletes-or-appends", "linearizable.deleted-threads")
class ChecksThenDeletes(Broken):
    async def delete_thread(
        self, thread_id: str, *, expected_version: int | None = None, **options: Any
    ) -> None:
        loaded = await self.load(thread_id)
        version = 0 if loaded is None else loaded.version

        if expected_version not in (None, version):
            raise VersionConflict(thread_id, expected_version or 0, version)

        await pause()
        await super().delete_thread(thread_id, **options)


@breaks("linearizable.threads-at-one-instant", harness=DiskHarness)
class ChecksTheVersionBeforeADeletion(Disk):
    async def delete_thread(
        self, thread_id: str, *, expected_version: int | None = None, **options: Any
    ) -> None:
        async with self._turn():
            loaded = await Reference.load(self, thread_id)

        await asyncio.sleep(ROUND_TRIP)
        version = 0 if loaded is None else loaded.version

        if expected_version not in (None, version):
            raise VersionConflict(thread_id, expected_version or 0, version)

        await super().delete_thread(thread_id, **options)
