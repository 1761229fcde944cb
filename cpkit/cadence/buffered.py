"""A checkpointer that buffers messages: the six methods."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar, cast
from weakref import WeakValueDictionary

from cpkit.cadence.policy import Cadence
from cpkit.driver.abilities import FullHandle
from cpkit.driver.codec import Codec
from cpkit.driver.ids import check_id
from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import Limits
from cpkit.driver.writes import Append
from cpkit.errors import BackendUnavailable, CheckpointerError, VersionConflict
from cpkit.fenced import append_once
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, CheckpointData, JsonValue, ToolCall

__all__ = ["BufferedCheckpointer"]

MessageT = TypeVar("MessageT")

logger = logging.getLogger(__name__)


@dataclass
class _Buffer:
    """A thread's messages that are not written yet; the first has position ``base``."""

    thread_id: str
    base: int
    bodies: list[bytes]
    size: int
    timer: asyncio.TimerHandle | None = None
    # Whether a write of these messages may have been applied without an answer.
    maybe_stored: bool = False
    # The store's version, after another writer was seen.
    actual: int | None = None

    @property
    def version(self) -> int:
        return self.base + len(self.bodies)

    def check(self, actual: int | None = None) -> None:
        """Raise ``VersionConflict`` if the store is known not to be at ``base``."""
        if actual not in (None, self.base):
            self.actual = actual

        if self.actual is not None:
            raise VersionConflict(self.thread_id, self.base, self.actual)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class BufferedCheckpointer(Generic[MessageT]):
    """A checkpointer that buffers messages; made by `cpkit.cadence.with_cadence`.

    It has the optional protocols of the checkpointer it wraps, and does not close it.
    """

    def __init__(
        self,
        inner: Checkpointer[MessageT],
        codec: Codec[MessageT],
        cadence: Cadence,
    ) -> None:
        # Only for the types: ``inner`` may lack some or all of the optional protocols.
        self._inner = cast("FullHandle[MessageT]", inner)
        self._codec = codec
        self._cadence = cadence
        self._max_messages = cadence.messages
        self._lifecycle = Lifecycle(repr(self))
        self._buffers: dict[str, _Buffer] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<BufferedCheckpointer over {self._inner!r}>"

    async def __aenter__(self) -> Self:
        self._lifecycle.begin()
        limits = getattr(self._inner, "limits", None)

        if isinstance(limits, Limits):
            self._codec.lower_limits(limits)

        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Write what is buffered and close; idempotent.

        Messages that cannot be written stay in `buffered`, and the error is raised.
        """
        await self._lifecycle.close(self._close)

    async def _close(self) -> None:
        try:
            await self._flush_all()
        finally:
            for buffer in self._buffers.values():
                buffer.stop_timer()

    @property
    def unbuffered(self) -> Checkpointer[MessageT]:
        """The checkpointer below.

        A claim that only records an effect that has happened goes there: a buffer that
        cannot be written must not stop it.
        """
        return self._inner

    # On demand

    async def flush(self, thread_id: str | None = None) -> None:
        """Write what is buffered, of one thread or of all."""
        self._lifecycle.check()

        if thread_id is None:
            await self._lifecycle.run_shielded(self._flush_all())
        else:
            thread_id = check_id("thread_id", thread_id)
            await self._lifecycle.run_shielded(self._flush(thread_id))

    @property
    def buffered(self) -> dict[str, list[MessageT]]:
        """The messages that are not written yet, by thread; also after close."""
        return {one: self._messages(buffer) for one, buffer in self._buffers.items()}

    async def discard(self, thread_id: str) -> list[MessageT]:
        """Drop the buffered messages of a thread, and return them.

        Call it after ``VersionConflict``. The thread is then as the store has it; open
        a session's log over this handle again. If the last write got no answer, the
        store may have the returned messages all the same.
        """
        self._lifecycle.check()
        thread_id = check_id("thread_id", thread_id)

        async with self._locked(thread_id) as buffer:
            if buffer is None:
                return []

            self._drop(buffer)
            return self._messages(buffer)

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        self._lifecycle.check()
        thread_id = check_id("thread_id", thread_id)

        async with self._decided(thread_id) as buffer:
            data = await self._inner.load(thread_id)

            if buffer is None:
                return data

            data = data or CheckpointData([], {}, [], 0)
            buffer.check(data.version)
            messages = [*data.messages[: buffer.base], *self._messages(buffer)]
            return replace(data, messages=messages, version=buffer.version)

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        self._lifecycle.check()

        if self._max_messages == 1:
            return await self._inner.append(
                thread_id, messages, expected_version=expected_version, extra=extra
            )

        write = self._codec.append(thread_id, messages, expected_version, extra)
        ends_turn = self._cadence.ends_turn
        is_due = bool(extra) or (
            ends_turn is not None and any(map(ends_turn, messages))
        )
        extra = None if extra is None else dict(extra)
        return await self._lifecycle.run_shielded(self._append(write, extra, is_due))

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._lifecycle.check()
        write = self._codec.merge(thread_id, extra)

        if write.thread_id in self._unwritten():
            await self._lifecycle.run_shielded(self._flush(write.thread_id))

        await self._inner.save_extra(thread_id, extra)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._lifecycle.check()
        write = self._codec.claim(thread_id, call)

        if self._unwritten():
            await self._lifecycle.run_shielded(self._flush_all(write.thread_id))

        return await self._inner.record_issued(thread_id, call)

    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, *, success: bool = True
    ) -> CallRecord:
        self._lifecycle.check()
        return await self._inner.record_result(
            thread_id, call_id, result, success=success
        )

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        self._lifecycle.check()
        return await self._inner.find_completed(idempotency_key)

    # Buffering and writing

    async def _append(
        self, write: Append, extra: dict[str, JsonValue] | None, is_due: bool
    ) -> int:
        async with self._decided(write.thread_id) as buffer:
            if buffer is None:
                return await self._append_first(write, extra, is_due)

            buffer.check()
            version = buffer.version

            if write.expected_version not in (None, version):
                raise VersionConflict(write.thread_id, write.expected_version, version)

            if buffer.size + write.size > self._codec.max_append:
                await self._write(buffer)  # one append cannot hold both
                return await self._append_first(write, extra, is_due)

            if (
                is_due
                or version + len(write.bodies) - buffer.base >= self._max_messages
            ):
                # Do not buffer the new messages before they are written: a caller that
                # gets an error may append them again.
                await self._write(buffer, write.bodies, extra)
            else:
                buffer.bodies += write.bodies
                buffer.size += write.size

            return version + len(write.bodies)

    async def _append_first(
        self, write: Append, extra: dict[str, JsonValue] | None, is_due: bool
    ) -> int:
        """Write at once, or begin a buffer at the store's current version."""
        is_due = is_due or len(write.bodies) >= self._max_messages
        version = await self._inner.append(
            write.thread_id,
            self._codec.messages(write.bodies if is_due else [], write.thread_id),
            expected_version=write.expected_version,
            extra=extra,
        )

        if is_due or not write.bodies:
            return version

        buffer = _Buffer(write.thread_id, version, write.bodies, write.size)
        self._buffers[write.thread_id] = buffer
        self._start_timer(buffer)
        return buffer.version

    async def _flush_all(self, thread_id: str | None = None) -> None:
        """Write every buffer; of several errors, raise that of ``thread_id`` first."""
        threads = sorted(self._unwritten(), key=lambda one: one != thread_id)
        results = await asyncio.gather(
            *(self._flush(one) for one in threads), return_exceptions=True
        )

        for result in results:
            if result is not None:
                raise result

    def _unwritten(self) -> set[str]:
        """Return the threads with a buffer, or with an operation that may make one.

        An operation continues after its caller was cancelled. The caller's next
        operation must not overtake it.
        """
        return {*self._buffers, *self._locks}

    async def _flush(self, thread_id: str) -> None:
        async with self._locked(thread_id) as buffer:
            if buffer is not None:
                await self._write(buffer)

    async def _write(
        self,
        buffer: _Buffer,
        more: Sequence[bytes] = (),
        extra: dict[str, JsonValue] | None = None,
    ) -> None:
        """Write the buffer, and more, in one append; the caller holds the lock."""
        buffer.check()
        bodies = [*buffer.bodies, *more]

        try:
            await append_once(
                self._inner,
                buffer.thread_id,
                self._codec.messages(bodies, buffer.thread_id, buffer.base),
                expected_version=buffer.base,
                extra=extra,
                maybe_stored=buffer.maybe_stored,
                same=self._same,
            )
        except VersionConflict as exc:
            buffer.actual = exc.actual
            raise
        except BackendUnavailable as exc:
            buffer.maybe_stored = exc.maybe_applied
            raise

        self._drop(buffer)

    def _same(self, found: list[MessageT], ours: list[MessageT]) -> bool:
        """Compare the stored bytes, because a message type may not define equality."""

        def bodies(messages: list[MessageT]) -> list[bytes]:
            return self._codec.append("thread", messages, None).bodies

        return bodies(found) == bodies(ours)

    def _messages(self, buffer: _Buffer) -> list[MessageT]:
        return self._codec.messages(buffer.bodies, buffer.thread_id, buffer.base)

    @asynccontextmanager
    async def _locked(self, thread_id: str) -> AsyncIterator[_Buffer | None]:
        """Hold the thread's lock; yield its buffer."""
        if self._max_messages == 1:  # nothing is ever buffered
            yield None
            return

        async with self._locks.setdefault(thread_id, asyncio.Lock()):
            yield self._buffers.get(thread_id)

    @asynccontextmanager
    async def _decided(self, thread_id: str) -> AsyncIterator[_Buffer | None]:
        """Do what `_locked` does, after repeating a write that got no answer."""
        async with self._locked(thread_id) as buffer:
            if buffer is not None and buffer.maybe_stored:
                await self._write(buffer)
                buffer = None

            yield buffer

    def _drop(self, buffer: _Buffer) -> None:
        buffer.stop_timer()
        del self._buffers[buffer.thread_id]

    # By time

    def _start_timer(self, buffer: _Buffer) -> None:
        if self._cadence.seconds is not None:
            later = asyncio.get_running_loop().call_later
            buffer.timer = later(self._cadence.seconds, self._expired, buffer)

    def _expired(self, buffer: _Buffer) -> None:
        if self._lifecycle.is_open:
            self._lifecycle.spawn(self._flush_expired(buffer))

    async def _flush_expired(self, buffer: _Buffer) -> None:
        try:
            await self._flush(buffer.thread_id)
        except BackendUnavailable as exc:
            logger.warning("%s: still buffered: %s", buffer.thread_id, exc)
            self._start_timer(buffer)
        except CheckpointerError as exc:
            # The next use of the thread raises it again.
            logger.error("%s: cannot be written: %s", buffer.thread_id, exc)
