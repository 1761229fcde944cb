"""Stores that take an id or a number otherwise in one place than in all others."""

from __future__ import annotations

from collections.abc import Mapping
from posixpath import normpath
from typing import Any
from urllib.parse import unquote

from cpkit import CallRecord, JsonValue, ThreadDump, ThreadInfo
from tests.broken.store import Broken, breaks


def _in_bits(value: int | None, bits: int) -> int | None:
    return value if value is None or type(value) is not int else value % 2**bits


@breaks("append.expected-version-of-any-size")
class ComparesVersionsIn32Bits(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        if type(options.get("expected_version")) is int and options.get("extra"):
            options["expected_version"] %= 2**32

        return await super().append(thread_id, messages, **options)


@breaks("append.expected-version-of-any-size")
class DeletesByAVersionIn64Bits(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        version = options.get("expected_version")

        if type(version) is int and version > 0:
            options["expected_version"] = version % 2**64

        await super().delete_thread(thread_id, **options)


@breaks("ids.extra-keys-never-meet")
class StripsKeysOfExtra(Broken):
    """Loses trailing blanks of a key, as a column of type CHAR does."""

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        if isinstance(extra, dict) and all(isinstance(key, str) for key in extra):
            extra = {
                key if key == " " else key.rstrip(" "): extra[key] for key in extra
            }

        await super().save_extra(thread_id, extra)


@breaks("ids.every-operation-finds-them")
class UnquotesKeys(Broken):
    """Decodes %-escapes of a key in one of the reads."""

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        if isinstance(idempotency_key, str) and "\0" not in unquote(idempotency_key):
            idempotency_key = unquote(idempotency_key)

        return await super().find_call(idempotency_key)

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await super().find_call(idempotency_key)
        return record if record and record.status == "completed" else None


@breaks("ids.every-operation-finds-them")
class RestoresANormalPath(Broken):
    """Names the folder of a restored thread by a path that it tidies first."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(dump)
        thread, tidy = dump.thread_id, normpath(dump.thread_id)

        if tidy != thread:
            self._store.threads[tidy] = self._store.threads.pop(thread)


@breaks("ids.every-operation-finds-them")
class ListsCallsOfAShortId(Broken):
    """Finds the calls of a thread by the first 256 characters of its id."""

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        found = await super().list_calls(thread_id)
        return found if len(thread_id) < 400 else []


@breaks("threads.pages")
class LimitsIn32Bits(Broken):
    async def list_threads(
        self, *, limit: Any = 100, **options: Any
    ) -> list[ThreadInfo]:
        return await super().list_threads(limit=_in_bits(limit, 32) or limit, **options)


@breaks("read.is-a-slice")
class ReadsIn32Bits(Broken):
    async def read(self, thread_id: str, start: Any = 0, stop: Any = None) -> list[Any]:
        if type(start) is int and start >= 2**32 and start < 2**64:
            start %= 2**32

        return await super().read(thread_id, start, stop)
