"""Stores that take an id for a pattern, as ``LIKE``, ``KEYS`` and ``glob`` do.

Each one still finds an exact id first, so that it works until an id has a wildcard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from cpkit import CallRecord, CheckpointData
from tests.broken.store import Broken, breaks


def resolve(text: str, known: Iterable[str]) -> str:
    """Return the known id that the text is, else the first that it matches."""
    found = list(known)

    if text in found:
        return text

    return next((one for one in found if fnmatchcase(one, text)), text)


@breaks("ids.thread-is-not-a-pattern")
class LoadsByPattern(Broken):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        if isinstance(thread_id, str):
            thread_id = resolve(thread_id, self._store.threads)

        return await super().load(thread_id)


@breaks("ids.key-is-not-a-pattern")
class FindsCompletedByPattern(Broken):
    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        if isinstance(idempotency_key, str):
            idempotency_key = resolve(idempotency_key, self._store.attempts)

        return await super().find_completed(idempotency_key)


@breaks("ids.call-is-not-a-pattern")
class ResolvesByPattern(Broken):
    async def record_result(
        self, thread_id: str, call_id: str, *args: Any, **options: Any
    ) -> CallRecord:
        if isinstance(call_id, str):
            known = [
                known for thread, known in self._store.calls if thread == thread_id
            ]
            call_id = resolve(call_id, known)

        return await super().record_result(thread_id, call_id, *args, **options)


@breaks("erase.id-is-not-a-pattern")
class DeletesByGlob(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        if isinstance(thread_id, str):
            for known in list(self._store.threads):
                if self.matches(known, thread_id):
                    await super().delete_thread(known, **options)

        await super().delete_thread(thread_id, **options)

    def matches(self, known: str, pattern: str) -> bool:
        return fnmatchcase(known, pattern)


@breaks("erase.id-is-not-a-pattern")
class DeletesByLike(DeletesByGlob):
    def matches(self, known: str, pattern: str) -> bool:
        like = re.escape(pattern).replace("%", ".*").replace("_", ".")
        return re.fullmatch(like, known, re.DOTALL) is not None


@breaks("read.id-is-not-a-pattern")
class ReadsByPattern(Broken):
    async def read(self, thread_id: str, *args: Any, **options: Any) -> list[Any]:
        if isinstance(thread_id, str):
            thread_id = resolve(thread_id, self._store.threads)

        return await super().read(thread_id, *args, **options)


@breaks("receipts.ids-are-not-patterns")
class ListsCallsByPattern(Broken):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        if isinstance(thread_id, str):
            thread_id = resolve(thread_id, self._store.calls_of)

        return await super().list_calls(thread_id)
