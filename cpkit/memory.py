"""The contract in plain Python: the reference that every other store is held to.

URL forms
    ``memory://`` is a store of its own for each handle; ``memory://name`` is one store
    for all handles of that name in this process, in any of its event loops and
    threads, and lives as long as the process.

Durability
    None: the state ends with the process.

What is atomic
    Everything: each operation runs under one lock, without a suspension point.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar
from urllib.parse import unquote

from cpkit.driver.codec import Codec, check_same_call, from_micros
from cpkit.driver.ids import check_id, check_page, span
from cpkit.driver.lifetime import Lifetime
from cpkit.driver.writes import StoredCall
from cpkit.errors import InvalidURL, UnknownCall, VersionConflict
from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    Survives,
    ThreadInfo,
    ToolCall,
)
from cpkit.registry import DriverOptions

__all__ = ["MemoryCheckpointer"]

MessageT = TypeVar("MessageT")


@dataclass
class _Thread:
    created_at: int
    updated_at: int
    bodies: list[bytes] = field(default_factory=list)
    extra: dict[bytes, bytes] = field(default_factory=dict)


@dataclass
class _Store:
    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: dict[str, _Thread] = field(default_factory=dict)
    # By thread and call id, in the order of claims.
    calls: dict[tuple[str, str], StoredCall] = field(default_factory=dict)
    # By thread and by key: the call's place in ``calls``, in the order of claims.
    calls_of: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    attempts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def touch(self, thread_id: str) -> _Thread:
        """Return the thread, made if it is not there, as changed now."""
        now = _now()
        thread = self.threads.setdefault(thread_id, _Thread(now, now))
        thread.updated_at = max(now, thread.updated_at)
        return thread

    def last_attempt(self, key: str) -> StoredCall | None:
        places = self.attempts.get(key)
        return self.calls[places[-1]] if places else None

    def of_thread(self, thread_id: str) -> list[StoredCall]:
        return [self.calls[place] for place in self.calls_of.get(thread_id, ())]


_named: dict[str, _Store] = {}
_named_lock = threading.Lock()


class MemoryCheckpointer(Generic[MessageT]):
    """A store in this process's memory."""

    Options: ClassVar[type[DriverOptions]] = DriverOptions
    client_options: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        name: str | None = None,
        *,
        message_type: type[MessageT] | Any = dict,
        **options: Any,
    ) -> None:
        self._codec: Codec[MessageT] = self.Options(**options).codec(message_type)
        self._lifetime = Lifetime(f"memory://{name or ''}")

        if name is None:
            self._store = _Store()
        else:
            with _named_lock:
                self._store = _named.setdefault(name, _Store())

    @classmethod
    def from_url(
        cls, url: str, *, message_type: Any, options: DriverOptions
    ) -> MemoryCheckpointer[Any]:
        _, slashes, name = url.partition("://")

        if not slashes:
            raise InvalidURL("write memory:// or memory://name")

        return cls(
            unquote(name) or None, message_type=message_type, **options.model_dump()
        )

    async def __aenter__(self) -> Self:
        self._lifetime.begin()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the handle; idempotent. A named store stays for its other handles."""
        await self._lifetime.end(self._release)

    async def _release(self) -> None:
        """Let go of nothing: a named store belongs to the process."""

    @property
    def durability(self) -> Durability:
        return Durability(Survives.NONE, "state ends with this process")

    def __repr__(self) -> str:
        return f"<MemoryCheckpointer {self._lifetime.name}>"

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)

        with self._store.lock:
            thread = self._store.threads.get(thread_id)

            if thread is None:
                return None

            bodies = list(thread.bodies)
            extra = list(thread.extra.items())
            calls = self._store.of_thread(thread_id)

        return CheckpointData(
            self._codec.messages(bodies, thread_id),
            self._codec.extra(extra, thread_id),
            [
                self._codec.record(call)
                for call in calls
                if call.status == "issued" and not call.erased
            ],
        )

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
    ) -> int:
        self._lifetime.check()
        write = self._codec.append(thread_id, messages, expected_version)

        with self._store.lock:
            thread = self._store.threads.get(write.thread_id)
            version = len(thread.bodies) if thread else 0

            if write.expected_version not in (None, version):
                raise VersionConflict(write.thread_id, write.expected_version, version)

            if not write.bodies:
                return version

            thread = self._store.touch(write.thread_id)
            thread.bodies += write.bodies
            return len(thread.bodies)

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._lifetime.check()
        write = self._codec.merge(thread_id, extra)

        if not write.items:
            return

        with self._store.lock:
            self._store.touch(write.thread_id).extra.update(write.items)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._lifetime.check()
        write = self._codec.claim(thread_id, call)
        call = write.call
        place = (write.thread_id, call.call_id)

        with self._store.lock:
            known = self._store.calls.get(place)

            if known is not None:
                record = self._codec.record(known)
                check_same_call(record, call)
                return record

            last = self._store.last_attempt(call.idempotency_key)

            if last is not None and last.status != "failed":
                return self._codec.record(last)

            self._store.touch(write.thread_id)
            self._store.calls[place] = StoredCall(
                write.thread_id,
                call.call_id,
                call.tool_name,
                write.args,
                call.idempotency_key,
                "issued",
                1 if last is None else last.attempt + 1,
                _now(),
                None,
                None,
                False,
            )
            self._store.calls_of.setdefault(write.thread_id, []).append(place)
            self._store.attempts.setdefault(call.idempotency_key, []).append(place)
            return None

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        self._lifetime.check()
        write = self._codec.resolve(thread_id, call_id, result, success)
        place = (write.thread_id, write.call_id)

        with self._store.lock:
            stored = self._store.calls.get(place)

            if stored is None:
                raise UnknownCall(*place)

            if stored.status == "issued":
                stored = stored._replace(
                    status=write.status,
                    result=None if stored.erased else write.result,
                    resolved_at=_now(),
                )
                self._store.calls[place] = stored

                if not stored.erased:
                    self._store.touch(write.thread_id)

            return self._codec.record(stored)

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await self.find_call(idempotency_key)
        return record if record is not None and record.status == "completed" else None

    # The optional protocols

    async def list_threads(
        self, *, prefix: str = "", after: str | None = None, limit: int = 100
    ) -> list[ThreadInfo]:
        self._lifetime.check()
        prefix, after, limit = check_page(prefix, after, limit)

        with self._store.lock:
            ids = sorted(
                thread_id
                for thread_id in self._store.threads
                if thread_id.startswith(prefix) and (after is None or thread_id > after)
            )
            return [
                ThreadInfo(
                    thread_id,
                    len(thread.bodies),
                    from_micros(thread.created_at),
                    from_micros(thread.updated_at),
                )
                for thread_id in ids[:limit]
                if (thread := self._store.threads[thread_id])
            ]

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)

        with self._store.lock:
            thread = self._store.threads.get(thread_id)
            bodies = thread.bodies if thread else []
            first, last = span(start, stop, len(bodies))
            bodies = bodies[first:last]

        return self._codec.messages(bodies, thread_id, first)

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)

        with self._store.lock:
            calls = self._store.of_thread(thread_id)

        return [self._codec.record(call) for call in calls]

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        self._lifetime.check()
        key = check_id("idempotency_key", idempotency_key)

        with self._store.lock:
            last = self._store.last_attempt(key)

        if last is None or last.status == "failed":
            return None

        return self._codec.record(last)

    async def delete_thread(self, thread_id: str, *, forget_keys: bool = False) -> None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)

        with self._store.lock:
            self._store.threads.pop(thread_id, None)

            if not forget_keys:
                for call in self._store.of_thread(thread_id):
                    self._store.calls[thread_id, call.call_id] = call._replace(
                        args=b"{}", result=None, erased=True
                    )

                return

            for place in self._store.calls_of.pop(thread_id, ()):
                key = self._store.calls.pop(place).idempotency_key
                self._store.attempts[key].remove(place)

                if not self._store.attempts[key]:
                    del self._store.attempts[key]


def _now() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000
