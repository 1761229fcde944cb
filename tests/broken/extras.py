"""Merges that replace too much, merge nested objects, or lose keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpkit import BackendUnavailable, CheckpointData, JsonValue, SerializationError
from tests.broken.store import Broken, breaks


@breaks("extra.merges", "model.agrees-with-reference")
class ReplacesExtra(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        if thread_id in self._store.threads:
            self._store.threads[thread_id].extra.clear()

        await super().save_extra(thread_id, extra)


@breaks("extra.is-shallow")
class MergesDeep(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        loaded = await self.load(thread_id)
        old: dict[str, Any] = {} if loaded is None else loaded.extra
        both = {
            key: {**old[key], **value}
            if isinstance(value, dict) and isinstance(old.get(key), dict)
            else value
            for key, value in extra.items()
        }
        await super().save_extra(thread_id, both)


@breaks("extra.stores-none")
class TreatsNoneAsDelete(Broken):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        for key in [k for k, v in loaded.extra.items() if v is None] if loaded else ():
            del loaded.extra[key]  # type: ignore[union-attr]  # loaded is not None here

        return loaded


@breaks("extra.nothing-changes-nothing")
class CreatesThreadOnEmptyMerge(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await super().save_extra(thread_id, extra)
        self._store.touch(thread_id)


@breaks("extra.all-or-none")
class SavesKeyByKey(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        for key, value in extra.items():
            await super().save_extra(thread_id, {key: value})


@breaks("extra.any-key")
class FoldsKeys(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await super().save_extra(thread_id, {k.casefold(): v for k, v in extra.items()})


@breaks("extra.any-key")
class IndexesTheStartOfKeys(Broken):
    """Takes two keys for one if they start with the same 500 bytes."""

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await super().save_extra(thread_id, extra)
        stored = self._store.threads[thread_id].extra if extra else {}
        first = {key[:500]: key for key in reversed(stored)}

        for key in [key for key in stored if first[key[:500]] != key]:
            stored[first[key[:500]]] = stored.pop(key)


@breaks("extra.long-key-is-refused")
class CutsLongKeys(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await super().save_extra(thread_id, {k[:200]: v for k, v in extra.items()})


@breaks("extra.long-key-is-refused")
class LeavesKeysToItsEngine(Broken):
    """Has an index of the keys, and hands the engine's error on."""

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        try:
            await super().save_extra(thread_id, extra)
        except SerializationError as exc:
            raise BackendUnavailable("broken", "key too long") from exc


@breaks("sizes.long-thread")
class SavesAThousandKeys(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await super().save_extra(thread_id, dict(list(extra.items())[:1000]))


@breaks("extra.copies-its-input")
class KeepsTheCallersMapping(Broken):
    _kept: Any

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._kept = extra
        await super().save_extra(thread_id, extra)

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)
        assert loaded is not None
        loaded.extra.update(self._kept)
        return loaded


@breaks("extra.leaves-the-rest")
class AppendsMergesAsMessages(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await super().save_extra(thread_id, extra)
        await self.append(thread_id, [dict(extra)])


@breaks("extra.takes-a-mapping-only")
class AcceptsPairs(Broken):
    async def save_extra(self, thread_id: str, extra: Any) -> None:
        await super().save_extra(thread_id, dict(extra or ()))


@breaks("extra.takes-a-mapping-only", raises="TypeError")
class TakesDictsOnly(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._check_usable()
        self._codec.merge(thread_id, extra)

        if not isinstance(extra, dict):
            raise TypeError("extra must be a dict")

        await super().save_extra(thread_id, extra)
