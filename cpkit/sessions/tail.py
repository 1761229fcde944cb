"""Following a thread: its messages as they are appended, for code and for browsers.

::

    async for version, message in read_from(cp, "thread-1", 7):
        print(version, message)

A version is the cursor: it counts the messages up to this one. A reader that stops at
version 9 goes on with ``read_from(cp, thread_id, 9)`` and misses nothing.

`TailEvents` serves the same as server-sent events, as a plain ASGI application. A
browser sends the last version back by itself, as ``Last-Event-ID``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    MutableMapping,
)
from contextlib import aclosing, asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from cpkit.errors import CheckpointerError, VersionConflict
from cpkit.fenced import read_part, read_range
from cpkit.foreign_json import encode_text
from cpkit.protocol import Checkpointer, WatchesThreads
from cpkit.sessions.errors import Trimmed

__all__ = ["TailEvents", "Tailed", "read_from"]

MessageT = TypeVar("MessageT")

_PAGE = 500

# Seconds between two looks at a store that cannot watch.
_POLL = 1.0

# Seconds after which a comment keeps an idle connection open.
_KEEP_ALIVE = 15.0


class Tailed(NamedTuple, Generic[MessageT]):
    """A message, and the thread's version with it as the last one."""

    version: int
    message: MessageT


async def read_from(
    cp: Checkpointer[MessageT], thread_id: str, version: int = 0
) -> AsyncGenerator[Tailed[MessageT], None]:
    """Yield the messages after ``version``, and then each one that is appended.

    It goes on until it is closed, and waits for a thread that does not exist yet. With
    a store that cannot watch it polls.

    Raises ``ValueError`` for a negative version, and `Trimmed` if messages after
    ``version`` were trimmed; version 0 begins with what is left. Raises
    ``VersionConflict`` if the thread was deleted. That is noticed only if the thread is
    shorter than ``version``, or its message at ``version`` is another one than the
    reader has seen.
    """
    if version < 0:
        raise ValueError(f"version must be 0 or more, not {version}")

    last: list[MessageT] = []

    async with _changes(cp, thread_id) as changes:
        while True:
            asked = max(0, version - 1)
            first, found = asked, []

            if last:
                found = await read_range(cp, thread_id, asked, asked + _PAGE)

            # The message before shows whether this is still the same thread, and where
            # the page begins.
            if not (last and _same(found[:1], last)):
                first, found = await read_part(cp, thread_id, asked, asked + _PAGE)
                version = version or first
                before = found[: version - first]

                if first > version:
                    raise Trimmed(thread_id, version, first)

                is_other = bool(before and last) and not _same(before, last)

                if is_other or len(before) < version - first:
                    # An append of nothing writes nothing, and returns the version.
                    actual = await cp.append(thread_id, [])
                    raise VersionConflict(thread_id, version, actual)

            before, new = found[: version - first], found[version - first :]

            for message in new:
                version += 1
                yield Tailed(version, message)

            last = new[-1:] or before

            if len(found) < _PAGE:
                await anext(changes)


def _same(found: list[MessageT], last: list[MessageT]) -> bool:
    """Compare messages: by their JSON, if their class compares by identity."""
    if found == last:
        return True

    try:
        return bool(to_jsonable_python(found) == to_jsonable_python(last))
    except (PydanticSerializationError, UnicodeEncodeError):
        return False


@asynccontextmanager
async def _changes(cp: object, thread_id: str) -> AsyncIterator[AsyncIterator[object]]:
    if isinstance(cp, WatchesThreads):
        async with cp.watch(thread_id) as changes:
            yield changes
    else:
        yield _ticks()


async def _ticks() -> AsyncIterator[None]:
    while True:
        await asyncio.sleep(_POLL)
        yield None


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
SendMore = Callable[[bytes], Awaitable[None]]


class TailEvents:
    """An ASGI application that sends a thread's messages as server-sent events.

    Each event has the version as its ``id`` and the message's JSON as its ``data``. It
    begins after the request's ``Last-Event-ID``, or after ``version``. An event named
    ``reset``, with the id 0, says that the thread was deleted, and ends the stream: the
    browser then reads the new thread whole. One named ``trimmed`` says that messages
    are gone which the browser has not got; it goes on at the event's id. Who may
    read the thread is for the caller to check.
    """

    def __init__(
        self, cp: Checkpointer[Any], thread_id: str, *, version: int = 0
    ) -> None:
        self._cp = cp
        self._thread_id = thread_id
        self._version = version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"TailEvents serves http, not {scope['type']!r}")

        headers = dict(scope["headers"])
        cursor = headers.get(b"last-event-id", b"%d" % self._version)

        if not (cursor.isdigit() and len(cursor) < 19):
            await _respond(send, 400, b"text/plain")
            await _send(send, b"Last-Event-ID is not a version\n", more=False)
            return

        await _respond(send, 200, b"text/event-stream")
        await _send(send, b": open\n\n")
        lock = asyncio.Lock()

        async def send_more(body: bytes) -> None:
            async with lock:
                await _send(send, body)

        tasks = [
            asyncio.create_task(self._send_events(int(cursor), send_more)),
            asyncio.create_task(_keep_alive(send_more)),
            asyncio.create_task(_disconnected(receive)),
        ]

        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

            results = await asyncio.gather(*tasks, return_exceptions=True)

        for result in results:
            if isinstance(result, Exception):
                raise result

        if isinstance(last := results[0], bytes):
            await _send(send, last, more=False)

    async def _send_events(self, version: int, send: SendMore) -> bytes:
        """Send the messages; return the body that ends the stream."""
        try:
            events = read_from(self._cp, self._thread_id, version)

            async with aclosing(events):
                async for tailed in events:
                    data = _json_of(tailed.message)
                    await send(b"id: %d\ndata: %b\n\n" % (tailed.version, data))
        except VersionConflict:
            # The browser connects again with this id, and reads the new thread whole.
            return b"id: 0\nevent: reset\ndata: {}\n\n"
        except Trimmed as exc:
            return b"id: %d\nevent: trimmed\ndata: {}\n\n" % exc.first
        except CheckpointerError as exc:
            # The browser connects again, and goes on after the last event.
            return b": %b\n\n" % type(exc).__name__.encode()

        raise AssertionError


def _json_of(message: Any) -> bytes:
    try:
        return to_json(message)
    except ValueError:  # it refuses surrogates
        plain = message if isinstance(message, dict) else to_jsonable_python(message)
        return encode_text(json.dumps(plain, ensure_ascii=False))


async def _keep_alive(send: SendMore) -> None:
    while True:
        await asyncio.sleep(_KEEP_ALIVE)
        await send(b": still here\n\n")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(send: Send, status: int, kind: bytes) -> None:
    headers = [
        (b"content-type", kind),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
