"""How often messages are written: a wrapper that buffers them until they are due.

::

    async with with_cadence(cp, Cadence(ends_turn=is_turn_end)) as buffered:
        await buffered.append("thread-1", [message])

A crash loses at most what was still buffered: the newest messages of a thread. Versions
and ``expected_version`` count what is buffered; other handles see a message when it is
written. So one agent at a time writes to a thread, through a wrapper of its own.

A read, ``save_extra``, a claim, a list, a deletion and ``aclose`` first write what is
buffered. If another writer has appended, they and a due append raise
``VersionConflict``, and the messages stay buffered until ``discard`` returns them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from pydantic_core import to_jsonable_python

from cpkit.driver.codec import Codec
from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import Limits
from cpkit.driver.writes import Append
from cpkit.errors import BackendUnavailable, CheckpointerError, VersionConflict
from cpkit.fenced import append_once
from cpkit.protocol import Checkpointer, StatesDurability
from cpkit.records import Durability, Survives
from cpkit.toolcalls import read_message, unwrap

__all__ = ["BufferedCheckpointer", "Cadence", "is_turn_end", "with_cadence"]

MessageT = TypeVar("MessageT")

# The methods of the store before which a wrapper writes what is buffered, and others.
_AFTER_FLUSH = """load read load_range save_extra record_issued list_threads dump_thread
    restore_thread delete_thread trim erase_calls search_threads""".split()
_AS_IT_IS = "record_result find_completed list_calls find_call watch durability".split()


def is_turn_end(message: Any) -> bool:
    """Return whether this is an assistant's message or entry without a tool call."""
    plain = message if isinstance(message, dict) else to_jsonable_python(message)
    reading = read_message(plain)
    _, inner = unwrap(plain)
    is_answer = isinstance(inner, dict) and inner.get("role") == "assistant"
    return is_answer and not reading.calls and not reading.unknown


@dataclass(frozen=True)
class Cadence:
    """When a thread's buffered messages are written: at the first rule that applies.

    ``messages``: the buffer has so many; 1 buffers nothing. ``seconds``: the oldest has
    waited for so long, if it is not 0. ``ends_turn``: it returns true for a message.
    """

    messages: int = 100
    seconds: float = 0
    ends_turn: Callable[[Any], bool] | None = None


@dataclass
class _Buffer:
    """A thread's messages that are not written yet; the first has position ``base``."""

    base: int
    bodies: list[bytes]
    size: int
    maybe_stored: bool = False  # a write of them got no answer


class BufferedCheckpointer(Checkpointer[MessageT]):
    """A checkpointer that buffers messages; made by `with_cadence`.

    It has the methods of the checkpointer it wraps, which it does not close. That one
    is ``unbuffered``, for an outcome that no buffer may hold up.
    """

    def __init__(
        self, inner: Checkpointer[MessageT], cadence: Cadence, **options: Any
    ) -> None:
        self.unbuffered = inner
        self._cadence = cadence
        self._codec: Codec[MessageT] = Codec(**options)
        self._lifecycle = Lifecycle(f"cadence over {inner!r}")
        self._buffers: dict[str, _Buffer] = {}
        self._lock = asyncio.Lock()  # one for all threads: a wrapper is for one agent

        if isinstance(limits := getattr(inner, "limits", None), Limits):
            self._codec.lower_limits(limits)

        # On the instance, where ``isinstance`` finds those of optional protocols.
        for name in filter(partial(hasattr, inner), _AFTER_FLUSH + _AS_IT_IS):
            method = getattr(inner, name)
            flushing = partial(self._flush_and, method)
            setattr(self, name, method if name in _AS_IT_IS else flushing)

        if isinstance(inner, StatesDurability) and cadence.messages > 1:
            lost = f"the last {cadence.messages - 1} messages of a thread"
            advice = (f"a crash loses at most {lost}", *inner.durability.advice)
            settings = inner.durability.settings
            self.durability = Durability(Survives.NONE, settings, advice)

    async def __aenter__(self) -> Self:
        self._lifecycle.begin()

        if self._cadence.seconds > 0:
            ticking = self._lifecycle.spawn(self._tick(self._cadence.seconds))
            self._lifecycle.on_close.append(ticking.cancel)

        return self

    async def aclose(self, *exc_info: object) -> None:
        """Write what is buffered and close; what cannot be written stays `buffered`."""
        await self._lifecycle.close(self._flush)

    __aexit__ = aclose

    @property
    def buffered(self) -> dict[str, list[MessageT]]:
        """The messages that are not written yet, by thread; also after close."""
        decode = self._codec.messages
        return {one: decode(it.bodies, one) for one, it in self._buffers.items()}

    async def discard(self, thread_id: str) -> list[MessageT]:
        """Drop and return what is buffered, which a lost answer may have stored."""
        async with self._lock:
            buffer = self._buffers.pop(thread_id, None)
            return self._codec.messages(buffer.bodies if buffer else [], thread_id)

    async def flush(self) -> None:
        """Write what is buffered; raise the first error after the last write."""
        self._lifecycle.check()

        if self._buffers or self._lock.locked():
            await self._lifecycle.run_shielded(self._flush())

    async def _flush_and(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        await self.flush()
        return await method(*args, **kwargs)

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> int:
        self._lifecycle.check()
        write = self._codec.append(thread_id, messages, expected_version, extra)
        ends_turn = self._cadence.ends_turn or (lambda _: False)
        is_due = bool(extra) or any(map(ends_turn, messages))
        return await self._lifecycle.run_shielded(self._append(write, extra, is_due))

    async def _append(self, write: Append, extra: Any, is_due: bool) -> int:
        thread_id, bodies, expected, _, size = write

        limit = self._codec.max_append

        async with self._lock:
            buffer = self._buffers.get(thread_id)

            if buffer and (buffer.maybe_stored or buffer.size + size > limit):
                await self._write(thread_id, buffer)
                buffer = None

            count = len(bodies) + (len(buffer.bodies) if buffer else 0)
            is_due = is_due or count >= self._cadence.messages

            if buffer is None:
                # An append of nothing returns the version, and checks the expected one.
                now = self._codec.messages(bodies if is_due else [], thread_id)
                version = await self.unbuffered.append(
                    thread_id, now, expected_version=expected, extra=extra
                )

                if bodies and not is_due:
                    self._buffers[thread_id] = _Buffer(version, bodies, size)
                    version += count

                return version

            version = buffer.base + len(buffer.bodies)

            if expected not in (None, version):
                raise VersionConflict(thread_id, expected, version)

            if is_due:
                # Not buffered before: a caller appends again what raised an error.
                await self._write(thread_id, buffer, bodies, extra)
            else:
                buffer.bodies += bodies
                buffer.size += size

            return buffer.base + count

    async def _write(
        self, thread_id: str, buffer: _Buffer, more: Any = (), extra: Any = None
    ) -> None:
        """Write the buffer, and more, in one append; the caller holds the lock."""
        bodies = [*buffer.bodies, *more]

        try:
            await append_once(
                self.unbuffered,
                thread_id,
                self._codec.messages(bodies, thread_id),
                expected_version=buffer.base,
                extra=extra,
                maybe_stored=buffer.maybe_stored,
            )
        except BackendUnavailable as exc:
            buffer.maybe_stored = exc.maybe_applied
            raise

        del self._buffers[thread_id]

    async def _flush(self) -> None:
        async with self._lock:
            writes = [self._write(*item) for item in self._buffers.items()]
            results = await asyncio.gather(*writes, return_exceptions=True)

        for failure in filter(None, results):
            raise failure

    async def _tick(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)

            try:
                await self.flush()  # it goes on if this task is cancelled
            except CheckpointerError as exc:
                logging.getLogger(__name__).warning("messages stay buffered: %s", exc)


def with_cadence(
    cp: Checkpointer[MessageT], cadence: Cadence, **options: Any
) -> BufferedCheckpointer[MessageT]:
    """Wrap an open checkpointer so that it writes at a cadence; enter the result.

    A message is checked when it is appended, long before the store sees it. So pass the
    ``message_type`` and ``strict_roundtrip`` with which the store was opened.
    """
    return BufferedCheckpointer(cp, cadence, **options)  # type: ignore[abstract]  # see __init__
