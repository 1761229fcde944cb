"""How often messages are written: a wrapper that holds them back until it is time.

::

    async with with_cadence(cp, Cadence.per_turn()) as buffered:
        await buffered.append("thread-1", [message])

What a crash can cost
    Acknowledged messages that were held back: at most ``messages - 1`` of a thread,
    none older than ``seconds`` while the store answers, and always the last ones. What
    is left of a thread is what this handle wrote to it up to some moment:
    ``save_extra`` writes the thread's messages first, and a claim those of all
    threads, so neither is ever ahead of them. Only results are not held up: the
    outcome of a call is written at once.

What the six promises become
    On this handle they hold: reads, versions and ``expected_version`` count what is
    held back. Other handles see a message when it is written. Positions that were
    handed out stay true, because writing is fenced by the version at which holding
    back began. Where another writer took that version, nothing is written and nothing
    lost: ``VersionConflict`` is raised then, and by every later use of the thread but
    ``record_result``, until `BufferedCheckpointer.discard` hands the messages back.
    So use it for threads with one writer at a time, one wrapper for each agent; any
    number of wrappers share one store's handle.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar
from weakref import WeakValueDictionary

from pydantic_core import to_jsonable_python

from cpkit.driver.codec import Codec
from cpkit.driver.ids import check_id, span
from cpkit.driver.lifetime import Lifetime
from cpkit.driver.options import MAX_PAYLOAD
from cpkit.driver.writes import Append
from cpkit.errors import BackendUnavailable, CheckpointerError, VersionConflict
from cpkit.protocol import (
    Checkpointer,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    ReadsRanges,
    StatesDurability,
)
from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    Survives,
    ThreadInfo,
    ToolCall,
)
from cpkit.sessions.fenced import append_once
from cpkit.sessions.toolcalls import calls_in

__all__ = ["BufferedCheckpointer", "Cadence", "is_turn_end", "with_cadence"]

MessageT = TypeVar("MessageT")

logger = logging.getLogger(__name__)


def is_turn_end(message: Any) -> bool:
    """Tell whether this is an assistant's message that asks for no tool.

    For messages in the forms that `cpkit.sessions.toolcalls` knows, plain, typed or in
    a session's entry.
    """
    plain = message if isinstance(message, dict) else to_jsonable_python(message)

    if not isinstance(plain, dict):
        return False

    if plain.get("type") == "message" and isinstance(plain.get("message"), dict):
        plain = plain["message"]

    return plain.get("role") == "assistant" and not any(calls_in("", plain))


@dataclass(frozen=True)
class Cadence:
    """When the messages that a thread holds back are written; the first that applies.

    ``messages``: before that many are held back; 1 holds nothing back. ``seconds``:
    when the oldest has waited for so long. ``ends_turn``: with the first message of
    which it is true. Before every claim, on `flush` and on close always.
    """

    messages: int = 100
    seconds: float | None = None
    ends_turn: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        if type(self.messages) is not int or self.messages < 1:
            raise ValueError("messages is an int of at least 1")

        if self.seconds is not None and not self.seconds > 0:
            raise ValueError("seconds is more than 0")

    @classmethod
    def per_message(cls) -> Cadence:
        """Hold nothing back."""
        return cls(1)

    @classmethod
    def per_tool_call(cls, *, messages: int = 100) -> Cadence:
        """Write before each claim: what led to an effect is there before it runs."""
        return cls(messages)

    @classmethod
    def per_turn(
        cls, *, ends_turn: Callable[[Any], bool] = is_turn_end, messages: int = 100
    ) -> Cadence:
        """Write with the message that ends a turn, and before each claim."""
        return cls(messages, ends_turn=ends_turn)

    @classmethod
    def every(cls, messages: int = 100, *, seconds: float | None = None) -> Cadence:
        """Write every so many messages or seconds, and before each claim."""
        return cls(messages, seconds)

    @property
    def may_lose(self) -> str:
        """What a crash can cost, in words."""
        if self.messages == 1:
            return "a crash loses nothing that was acknowledged"

        since = ["the last claim"]
        since += ["the last turn's end"] if self.ends_turn else []
        since += [f"{self.seconds:g} seconds ago"] if self.seconds else []
        return (
            f"a crash loses at most the last {self.messages - 1} messages of a thread, "
            f"none from before {' or '.join(since)}"
        )


@dataclass
class _Held:
    """What is held back of a thread: messages from position ``base`` on."""

    thread_id: str
    base: int
    bodies: list[bytes] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    # Whether a write of these messages ended without an answer.
    maybe_there: bool = False
    # The store's version, once another writer is known to have been there.
    actual: int | None = None

    @property
    def version(self) -> int:
        return self.base + len(self.bodies)

    def check(self, actual: int | None = None) -> None:
        """Raise ``VersionConflict`` where the store is known not to be at ``base``."""
        if actual not in (None, self.base):
            self.actual = actual

        if self.actual is not None:
            raise VersionConflict(self.thread_id, self.base, self.actual)


class BufferedCheckpointer(Generic[MessageT]):
    """A checkpointer that holds messages back; made by `with_cadence`.

    It has the optional abilities of what it wraps, and does not close it.
    """

    def __init__(
        self,
        inner: Checkpointer[MessageT],
        cadence: Cadence,
        codec: Codec[MessageT],
    ) -> None:
        self._inner = inner
        # The same, for the abilities that it may have.
        self._able: Any = inner
        self._cadence = cadence
        self._codec = codec
        self._lifetime = Lifetime(repr(self))
        self._held: dict[str, _Held] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._is_closing = False

    def __repr__(self) -> str:
        return f"<BufferedCheckpointer over {self._inner!r}>"

    async def __aenter__(self) -> Self:
        self._lifetime.begin()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Write what is held back and close; idempotent.

        What cannot be written stays in `buffered`, and the error is raised.
        """
        self._is_closing = True
        await self._lifetime.end(self._close)

    async def _close(self) -> None:
        try:
            await self._flush_all()
        finally:
            for held in self._held.values():
                _stop(held)

    # On demand

    async def flush(self, thread_id: str | None = None) -> None:
        """Write what is held back, of one thread or of all."""
        self._lifetime.check()

        if thread_id is None:
            await self._lifetime.finish(self._flush_all())
        else:
            await self._lifetime.finish(self._flush(check_id("thread_id", thread_id)))

    @property
    def buffered(self) -> dict[str, list[MessageT]]:
        """What is held back, by thread; readable after close too."""
        return {held.thread_id: self._messages(held) for held in self._held.values()}

    async def discard(self, thread_id: str) -> list[MessageT]:
        """Give up what is held back of a thread, and return it.

        The way on after ``VersionConflict``: the thread is then as the store has it. A
        session's log over this handle is then opened again. Where the last write ended
        without an answer, the messages may be in the store all the same.
        """
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)

        async with self._of(thread_id) as held:
            if held is None:
                return []

            self._forget(held)
            return self._messages(held)

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)

        async with self._clear(thread_id) as held:
            data = await self._inner.load(thread_id)

            if held is None:
                return data

            data = data or CheckpointData([], {}, [])
            held.check(data.version)
            data.messages[held.base :] = self._messages(held)
            return data

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
    ) -> int:
        self._lifetime.check()

        if self._cadence.messages == 1:
            return await self._inner.append(
                thread_id, messages, expected_version=expected_version
            )

        write = self._codec.append(thread_id, messages, expected_version)
        ends = self._cadence.ends_turn
        is_end = ends is not None and any(map(ends, messages))
        return await self._lifetime.finish(self._append(write, is_end))

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._lifetime.check()
        write = self._codec.merge(thread_id, extra)

        if write.thread_id in self._held:
            await self._lifetime.finish(self._flush(write.thread_id))

        await self._inner.save_extra(thread_id, extra)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._lifetime.check()
        write = self._codec.claim(thread_id, call)

        if self._held:
            await self._lifetime.finish(self._flush_all(write.thread_id))

        return await self._inner.record_issued(thread_id, call)

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        self._lifetime.check()
        return await self._inner.record_result(
            thread_id, call_id, result, success=success
        )

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        self._lifetime.check()
        return await self._inner.find_completed(idempotency_key)

    # Holding back, and writing

    async def _append(self, write: Append, is_end: bool) -> int:
        async with self._clear(write.thread_id) as held:
            if held is None:
                return await self._append_first(write, is_end)

            held.check()
            version = held.version

            if write.expected_version not in (None, version):
                raise VersionConflict(write.thread_id, write.expected_version, version)

            if is_end or self._is_due(len(held.bodies) + len(write.bodies)):
                # Only once they are written do they count: a caller that gets an
                # error may append them again.
                await self._write(held, write.bodies)
            else:
                held.bodies += write.bodies

            return version + len(write.bodies)

    async def _append_first(self, write: Append, is_end: bool) -> int:
        is_due = is_end or self._is_due(len(write.bodies))
        now = write.bodies if is_due else []
        # Without messages it tells the version, and writes nothing.
        version = await self._inner.append(
            write.thread_id,
            self._codec.messages(now, write.thread_id),
            expected_version=write.expected_version,
        )

        if is_due or not write.bodies:
            return version

        held = self._held[write.thread_id] = _Held(
            write.thread_id, version, write.bodies
        )
        self._start(held)
        return held.version

    def _is_due(self, count: int) -> bool:
        return count >= self._cadence.messages

    async def _flush_all(self, thread_id: str | None = None) -> None:
        """Write everything; of several errors the thread's own is raised."""
        threads = sorted(self._held, key=lambda one: one != thread_id)
        ends = await asyncio.gather(
            *(self._flush(one) for one in threads), return_exceptions=True
        )

        for end in ends:
            if end is not None:
                raise end

    async def _flush(self, thread_id: str) -> None:
        async with self._of(thread_id) as held:
            if held is not None:
                await self._write(held)

    async def _write(self, held: _Held, more: Sequence[bytes] = ()) -> None:
        """Write what is held back, and more, in one append; under the lock."""
        held.check()
        bodies = [*held.bodies, *more]

        try:
            await append_once(
                self._inner,
                held.thread_id,
                self._codec.messages(bodies, held.thread_id, held.base),
                expected_version=held.base,
                maybe_there=held.maybe_there,
                same=self._same,
            )
        except VersionConflict as exc:
            held.actual = exc.actual
            raise
        except BackendUnavailable as exc:
            held.maybe_there = exc.maybe_applied
            raise

        self._forget(held)

    def _same(self, found: list[MessageT], ours: list[MessageT]) -> bool:
        """Compare as stored: people's types need not define equality."""

        def bodies(messages: list[MessageT]) -> list[bytes]:
            return self._codec.append("thread", messages, None).bodies

        return bodies(found) == bodies(ours)

    def _messages(self, held: _Held) -> list[MessageT]:
        return self._codec.messages(held.bodies, held.thread_id, held.base)

    @asynccontextmanager
    async def _of(self, thread_id: str) -> AsyncIterator[_Held | None]:
        """Take the thread's turn; give what is held back of it."""
        # Nobody waits where nothing is ever held back.
        if self._cadence.messages == 1:
            yield None
            return

        async with self._locks.setdefault(thread_id, asyncio.Lock()):
            yield self._held.get(thread_id)

    @asynccontextmanager
    async def _clear(self, thread_id: str) -> AsyncIterator[_Held | None]:
        """Do likewise, once a write that ended without an answer is cleared up."""
        async with self._of(thread_id) as held:
            if held is not None and held.maybe_there:
                await self._write(held)
                held = None

            yield held

    def _forget(self, held: _Held) -> None:
        _stop(held)
        del self._held[held.thread_id]

    # By the clock

    def _start(self, held: _Held) -> None:
        if self._cadence.seconds is not None:
            loop = asyncio.get_running_loop()
            held.timer = loop.call_later(self._cadence.seconds, self._ring, held)

    def _ring(self, held: _Held) -> None:
        if not self._is_closing:
            self._lifetime.spawn(self._flush_late(held))

    async def _flush_late(self, held: _Held) -> None:
        try:
            await self._flush(held.thread_id)
        except BackendUnavailable as exc:
            logger.warning("%s: still held back: %s", held.thread_id, exc)
            self._start(held)
        except CheckpointerError as exc:
            # Whoever uses the thread next gets it again.
            logger.error("%s: held back for good: %s", held.thread_id, exc)


def _stop(held: _Held) -> None:
    if held.timer is not None:
        held.timer.cancel()


# The optional protocols, each to be had or not


class _Lists(BufferedCheckpointer[MessageT]):
    async def list_threads(
        self, *, prefix: str = "", after: str | None = None, limit: int = 100
    ) -> list[ThreadInfo]:
        """As the store has them, once everything that is held back is written."""
        self._lifetime.check()
        await self._lifetime.finish(self._flush_all())
        page: list[ThreadInfo] = await self._able.list_threads(
            prefix=prefix, after=after, limit=limit
        )
        return page


class _Reads(BufferedCheckpointer[MessageT]):
    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)

        async with self._clear(thread_id) as held:
            if held is None:
                part: list[MessageT] = await self._able.read(thread_id, start, stop)
                return part

            first, last = span(start, stop, held.version)

            if last <= held.base:
                part = await self._able.read(thread_id, first, last)
                return part

            # To the end, which shows whether another writer has been there.
            known = min(first, held.base)
            stored: list[MessageT] = await self._able.read(thread_id, known)
            held.check(known + len(stored))
            stored[held.base - known :] = self._messages(held)
            return stored[first - known : last - known]


class _Receipts(BufferedCheckpointer[MessageT]):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        self._lifetime.check()
        calls: list[CallRecord] = await self._able.list_calls(thread_id)
        return calls

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        self._lifetime.check()
        record: CallRecord | None = await self._able.find_call(idempotency_key)
        return record


class _Erases(BufferedCheckpointer[MessageT]):
    async def delete_thread(self, thread_id: str, *, forget_keys: bool = False) -> None:
        """Erase the thread, and with it what is held back of it."""
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        await self._lifetime.finish(self._delete(thread_id, forget_keys))

    async def _delete(self, thread_id: str, forget_keys: bool) -> None:
        async with self._of(thread_id) as held:
            await self._able.delete_thread(thread_id, forget_keys=forget_keys)

            if held is not None:
                self._forget(held)


class _States(BufferedCheckpointer[MessageT]):
    @property
    def durability(self) -> Durability:
        inner: Durability = self._able.durability

        if self._cadence.messages == 1:
            return inner

        return Durability(
            Survives.NONE, inner.settings, (self._cadence.may_lose, *inner.advice)
        )


_ABILITIES: dict[type, type[BufferedCheckpointer[Any]]] = {
    ListsThreads: _Lists,
    ReadsRanges: _Reads,
    KeepsReceipts: _Receipts,
    ErasesThreads: _Erases,
    StatesDurability: _States,
}


def with_cadence(
    cp: Checkpointer[MessageT],
    cadence: Cadence,
    *,
    message_type: type[MessageT] | Any = dict,
    max_payload: int = MAX_PAYLOAD,
    strict_roundtrip: bool = False,
) -> BufferedCheckpointer[MessageT]:
    """Wrap an open checkpointer so that it writes at a cadence; enter what comes back.

    A message is checked when it is appended, long before the store sees it: say with
    ``message_type``, ``max_payload`` and ``strict_roundtrip`` how the store was opened.
    """
    parts = (part for ability, part in _ABILITIES.items() if isinstance(cp, ability))
    codec: Codec[MessageT] = Codec(
        message_type, max_payload=max_payload, strict_roundtrip=strict_roundtrip
    )
    return _class_with(tuple(parts))(cp, cadence, codec)


@functools.cache
def _class_with(
    parts: tuple[type[BufferedCheckpointer[Any]], ...],
) -> type[BufferedCheckpointer[Any]]:
    """Return the class with these abilities and no others, so isinstance is true."""
    return type("BufferedCheckpointer", (*parts, BufferedCheckpointer), {})
