"""Loads that return too much, too little, or shared objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from cpkit import CheckpointData, JsonValue
from tests.broken.store import Broken, breaks


class _Changed(Broken):
    """Changes the result of a load."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)
        return None if loaded is None else self.changed(loaded)

    def changed(self, loaded: CheckpointData[Any]) -> CheckpointData[Any] | None:
        return loaded


@breaks("load.nothing-is-none")
class LoadsMissingAsEmpty(Broken):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        return await super().load(thread_id) or CheckpointData([], {}, [], 0)


@breaks("load.reading-records-nothing")
class CreatesThreadOnRead(Broken):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)
        self._store.touch(thread_id)
        return loaded


@breaks("load.all-three-fields")
class LoadsNoPending(_Changed):
    def changed(self, loaded: CheckpointData[Any]) -> CheckpointData[Any]:
        return replace(loaded, pending=[])


@breaks("load.version-counts-messages")
class LoadsAWindow(_Changed):
    def changed(self, loaded: CheckpointData[Any]) -> CheckpointData[Any]:
        return replace(loaded, messages=loaded.messages[-2:])


@breaks("load.version-counts-messages")
class CountsFromOne(_Changed):
    """Numbers messages from 1, as some engines number rows."""

    def changed(self, loaded: CheckpointData[Any]) -> CheckpointData[Any]:
        return replace(loaded, first=1)


@breaks("load.only-extra", "load.only-calls")
class NeedsMessages(_Changed):
    def changed(self, loaded: CheckpointData[Any]) -> CheckpointData[Any] | None:
        return loaded if loaded.messages else None


@breaks("load.twice-is-equal")
class ReturnsTheCurrentTime(_Changed):
    def changed(self, loaded: CheckpointData[Any]) -> CheckpointData[Any]:
        now = datetime.now(UTC)
        pending = [replace(record, issued_at=now) for record in loaded.pending]
        return replace(loaded, pending=pending)


@breaks("load.is-the-callers")
class ReturnsItsCache(Broken):
    """Returns the same cached object to every caller."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        cache = self.__dict__.setdefault("_cache", {})
        loaded = await super().load(thread_id)
        return cache.setdefault(thread_id, loaded)  # type: ignore[no-any-return]  # an untyped cache


@breaks("load.extends-earlier", "append.keeps-order")
class LatestFirst(_Changed):
    def changed(self, loaded: CheckpointData[Any]) -> CheckpointData[Any]:
        return replace(loaded, messages=loaded.messages[::-1])


@breaks("load.threads-are-separate")
class SharesExtra(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        for thread in (thread_id, *self._store.threads):
            await super().save_extra(thread, extra)
