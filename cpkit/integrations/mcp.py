"""The events of MCP's Streamable HTTP sessions, in any store.

::

    manager = SessionManager(server, cp)

A session is one thread; each message of it is an event, with the stream that it belongs
to. The id of an event is its position.

The ids of streams are unique within a session only, so each session has a store of
events of its own: an `EventStore` that sessions share would replay to one client what
was sent to another.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from cpkit.driver.ids import check_id
from cpkit.errors import VersionConflict
from cpkit.fenced import append_once, read_range
from cpkit.protocol import Checkpointer, ErasesThreads
from cpkit.registry import needs_extra

with needs_extra("cpkit.integrations.mcp", "mcp"):
    from mcp.server.lowlevel import Server
    from mcp.server.streamable_http import (
        EventCallback,
        EventId,
        EventMessage,
        StreamId,
    )
    from mcp.server.streamable_http import EventStore as TheirEventStore
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp.types import JSONRPCMessage, jsonrpc_message_adapter

__all__ = ["EventStore", "SessionManager", "session_thread"]

_PREFIX = "cpkit:mcp:"

_PAGE = 500


class EventStore(TheirEventStore):
    """Keeps the events of one session of an MCP server, for clients that reconnect.

    ``cp`` is an open checkpointer of JSON objects on this event loop. Another process
    that serves the session later continues its events. An event whose answer is lost is
    stored once.

    Events stay until `delete`. Raises ``PayloadTooLarge`` for a message above the limit
    of the store, and ``InvalidId`` for a session id of more than 502 bytes.
    """

    def __init__(self, cp: Checkpointer[Any], session_id: str) -> None:
        self._cp = cp
        self._thread_id = session_thread(session_id)
        self._version = 0

    async def store_event(
        self, stream_id: StreamId, message: JSONRPCMessage | None
    ) -> EventId:
        """Store an event, and return its id; ``None`` stands for a stream's start."""
        dumped = None

        if message is not None:
            dumped = message.model_dump(mode="json", by_alias=True, exclude_unset=True)

        # Equal events of two processes differ in this, if an answer is lost.
        event = {"stream": stream_id, "message": dumped, "by": uuid4().hex}

        while True:
            version = self._version

            try:
                await append_once(
                    self._cp, self._thread_id, [event], expected_version=version
                )
            except VersionConflict as exc:
                self._version = exc.actual
                continue

            self._version = max(self._version, version + 1)
            return str(version + 1)

    async def replay_events_after(
        self, last_event_id: EventId, send_callback: EventCallback
    ) -> StreamId | None:
        """Send the later events of the same stream; return the stream's id.

        ``None`` if the session has no event with this id.
        """
        number = int(last_event_id) if last_event_id.isdecimal() else 0
        last = await self._read(number - 1, number) if number else []
        stream_id = last[0]["stream"] if last else None

        while last and (events := await self._read(number, number + _PAGE)):
            for event in events:
                number += 1

                if event["stream"] == stream_id and event["message"] is not None:
                    message = jsonrpc_message_adapter.validate_python(event["message"])
                    await send_callback(EventMessage(message, str(number)))

        return stream_id

    async def delete(self) -> None:
        """Erase the events of the session, which has ended."""
        if not isinstance(self._cp, ErasesThreads):
            raise NotImplementedError("the store cannot erase threads")

        await self._cp.delete_thread(self._thread_id)

    async def _read(self, start: int, stop: int) -> list[Any]:
        return await read_range(self._cp, self._thread_id, start, stop)


class SessionManager(StreamableHTTPSessionManager):
    """The SDK's session manager, with an `EventStore` of its own for each session.

    The SDK's manager hands one store to all sessions. The ids of their streams are
    equal (``_GET_stream``, ``1``, ``2``), so a client that reconnects would get what
    was sent to others. The other arguments are those of the SDK's class.
    """

    def __init__(self, app: Server[Any], cp: Checkpointer[Any], **options: Any) -> None:
        self._cp = cp
        super().__init__(app, **options)

    @property
    def event_store(self) -> TheirEventStore | None:
        """A new store of events; the manager takes one for each session."""
        return EventStore(self._cp, uuid4().hex)

    @event_store.setter
    def event_store(self, given: TheirEventStore | None) -> None:
        if given is not None:
            raise TypeError("SessionManager makes the event_store of each session")


def session_thread(session_id: str) -> str:
    """Return the id of the thread that holds the events of a session."""
    check_id("session_id", session_id)
    return check_id("session_id, with its prefix,", _PREFIX + session_id)
