"""pydantic-ai's conversations in any store.

::

    store = ConversationStore(cp)
    conversation = await store.load("c") or Conversation(conversation_id="c")
    await store.save(await agent.run(prompt, conversation=conversation))

Each conversation is one thread. Its messages are the entries that its saves stored,
each with the place of the entry before it: a thread and a position, because the entries
of a fork continue those of another conversation. The extra has the record, and the
places of its newest entry and of its branches. A write without new entries appends a
mark, so that the version of the thread fences the record.

A conversation whose entries a fork uses is marked as shared before the fork is stored.
Its entries stay when it is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpkit.driver.ids import check_id
from cpkit.errors import VersionConflict
from cpkit.fenced import append_once, load_range, read_range
from cpkit.protocol import Checkpointer, ErasesThreads, ListsThreads
from cpkit.records import CheckpointData
from cpkit.registry import needs_extra
from cpkit.tools.paging import gather_limited, thread_pages

with needs_extra("cpkit.integrations.pydantic_ai", "pydantic-ai"):
    from pydantic import TypeAdapter
    from pydantic_ai import conversation_store as theirs
    from pydantic_ai.conversation_store import (
        ConversationConflict,
        ConversationEntry,
        ConversationRecord,
    )
    from pydantic_ai.messages import ModelMessagesTypeAdapter

__all__ = ["ConversationStore", "conversation_thread"]

_PREFIX = "cpkit:pydantic-ai:"

_RECORD = TypeAdapter(ConversationRecord)

_MAX_PLACES = 100_000
"""Places that a process remembers; it finds the entry of another id by a scan."""

Place = tuple[str, int]
"""Where an entry is: a thread, and a position."""


class ConversationStore(theirs.ConversationStore):
    """Keeps pydantic-ai's conversations in a store.

    ``cp`` is an open checkpointer of JSON objects on this event loop.

    A save stores its entries and its record in one step, and only if the conversation
    is as it was loaded; otherwise it raises ``ConversationConflict``. A save whose
    answer is lost is repeated, and stored once.

    `delete` erases a conversation's entries, unless it was forked: then they stay. A
    list reads the record of each conversation. It raises ``NotImplementedError`` with a
    store that cannot list its threads.

    Raises ``InvalidId`` for a conversation id of more than 494 bytes, and
    ``PayloadTooLarge`` for a message above the limit of the store.
    """

    def __init__(self, cp: Checkpointer[Any]) -> None:
        self._cp = cp
        self._places: dict[str, Place] = {}

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        """Return the record of a conversation, or ``None``."""
        return self._record(
            await self._load_extra(conversation_thread(conversation_id))
        )

    async def read_records(
        self, *, scope: str | None = None, limit: int | None = None
    ) -> Sequence[ConversationRecord]:
        """Return the records, or those of the scope, the last saved first."""
        threads = await self._threads()
        found = map(self._record, await gather_limited(self._load_extra, threads))
        records = [
            one for one in found if one and (scope is None or one.scope == scope)
        ]
        records.sort(key=lambda record: record.updated_at, reverse=True)
        return records[:limit]

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        """Store the record and its new entries, all or nothing."""
        thread_id = conversation_thread(record.conversation_id)

        while True:
            data = await self._load_extra(thread_id)
            self._check(data, record.conversation_id, expected_revision)
            version = 0 if data is None else data.version
            new = {e.id: (thread_id, version + n) for n, e in enumerate(new_entries)}

            try:
                places, messages = await self._placed(record, new_entries, new)

                for entry_id, place in places.items():
                    if place[0] != thread_id and entry_id not in _places_in(data):
                        await self._share(entry_id, place)
            except LookupError:
                raise ConversationConflict(record.conversation_id) from None

            tips = [record.head_id, *record.branches]
            extra: dict[str, Any] = {
                "record": _RECORD.dump_python(record, mode="json"),
                "places": {one: [*places[one]] for one in tips if one is not None},
            }

            try:
                await append_once(
                    self._cp,
                    thread_id,
                    messages or [{"saved": record.revision}],
                    expected_version=version,
                    extra=extra,
                )
            except VersionConflict:
                continue  # another save came first, or a fork shared the thread

            self._note(new)
            return

    async def delete_record(
        self, conversation_id: str, *, expected_revision: str
    ) -> None:
        """Delete the conversation, and its entries unless it was forked."""
        thread_id = conversation_thread(conversation_id)

        while True:
            data = await self._load_extra(thread_id)
            self._check(data, conversation_id, expected_revision)

            if data is None:
                raise ConversationConflict(conversation_id)

            version = data.version

            try:
                if isinstance(self._cp, ErasesThreads) and "shared" not in data.extra:
                    await self._cp.delete_thread(thread_id, expected_version=version)
                else:
                    await append_once(
                        self._cp,
                        thread_id,
                        [{"deleted": expected_revision}],
                        expected_version=version,
                        extra={"record": None, "places": {}},
                    )
            except VersionConflict:
                continue

            return

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        """Return the entry; raise ``KeyError`` for an unknown id."""
        (entry,) = await self.read_history(entry_id, limit=1)
        return entry

    async def read_history(
        self, head_id: str | None, *, limit: int | None = None
    ) -> list[ConversationEntry]:
        """Return the entries up to this one, or the last ``limit`` of them."""
        found: list[ConversationEntry] = []
        part: list[Any] = []
        thread_id, start = "", 0
        wanted, place = head_id, None if head_id is None else await self._place(head_id)

        while wanted is not None and place is not None and len(found) != limit:
            position = place[1]

            if place[0] != thread_id or position < start:
                thread_id, end = place[0], position + 1

                if limit is not None:
                    # Marks and other branches stand between the entries.
                    start = max(0, end - 2 * (limit - len(found)) - 16)
                else:
                    start = 0

                part = await read_range(self._cp, thread_id, start, end)

            stored = _stored(part, position - start, wanted)
            self._note({wanted: place})
            (message,) = ModelMessagesTypeAdapter.validate_python([stored["message"]])
            parent_id = stored["parent_id"]
            found.append(
                ConversationEntry(id=wanted, parent_id=parent_id, message=message)
            )
            wanted, place = parent_id, parent_id and _place(stored["parent"])

        return found[::-1]

    # Places of entries

    async def _place(self, entry_id: str) -> Place:
        """Return where an entry is; raise ``KeyError`` if it is nowhere."""
        if entry_id in self._places:
            return self._places[entry_id]

        for thread_id in await self._threads():
            for position, stored in enumerate(await read_range(self._cp, thread_id)):
                if _has_id(stored, entry_id):
                    return thread_id, position

        raise KeyError(entry_id)

    async def _placed(
        self,
        record: ConversationRecord,
        entries: Sequence[ConversationEntry],
        new: Mapping[str, Place],
    ) -> tuple[dict[str, Place], list[Any]]:
        """Return the places that a write refers to, and the messages of its entries."""
        parents = [entry.parent_id for entry in entries]
        places = dict(new)

        for one in [record.head_id, *record.branches, *parents]:
            if one is not None and one not in places:
                places[one] = await self._place(one)

        messages = [
            {
                "id": entry.id,
                "kind": entry.kind,
                "parent_id": entry.parent_id,
                "parent": entry.parent_id and [*places[entry.parent_id]],
                "message": ModelMessagesTypeAdapter.dump_python(
                    [entry.message], mode="json"
                )[0],
            }
            for entry in entries
        ]
        return places, messages

    async def _share(self, entry_id: str, place: Place) -> None:
        """Let a conversation keep its entries for another one that uses this entry.

        Raises ``KeyError`` if the entry is gone.
        """
        thread_id, position = place

        while True:
            data = await self._load_extra(thread_id)

            if data is None:
                raise KeyError(entry_id)

            if "shared" in data.extra:
                break

            try:
                await append_once(
                    self._cp,
                    thread_id,
                    [{"shared": entry_id}],
                    expected_version=data.version,
                    extra={"shared": True},
                )
            except VersionConflict:
                continue

        part = await read_range(self._cp, thread_id, position, position + 1)
        _stored(part, 0, entry_id)

    def _note(self, places: Mapping[str, Place]) -> None:
        self._places.update(places)

        while len(self._places) > _MAX_PLACES:
            del self._places[next(iter(self._places))]

    # Threads

    async def _threads(self) -> list[str]:
        if not isinstance(self._cp, ListsThreads):
            raise NotImplementedError("the store cannot list its threads")

        pages = thread_pages(self._cp, prefix=_PREFIX)
        return [info.thread_id async for page in pages for info in page]

    async def _load_extra(self, thread_id: str) -> CheckpointData[Any] | None:
        """Return a thread with its extra, without messages."""
        return await load_range(self._cp, thread_id, stop=0)

    def _record(self, data: CheckpointData[Any] | None) -> ConversationRecord | None:
        stored = None if data is None else data.extra.get("record")

        if stored is None:
            return None

        self._note(_places_in(data))
        return _RECORD.validate_python(stored)

    def _check(
        self,
        data: CheckpointData[Any] | None,
        conversation_id: str,
        expected_revision: str | None,
    ) -> None:
        """Raise ``ConversationConflict`` unless the record has this revision."""
        record = self._record(data)

        if (None if record is None else record.revision) != expected_revision:
            raise ConversationConflict(conversation_id)


def conversation_thread(conversation_id: str) -> str:
    """Return the id of the thread that holds a conversation."""
    check_id("conversation_id", conversation_id)
    return check_id("conversation_id, with its prefix,", _PREFIX + conversation_id)


def _places_in(data: CheckpointData[Any] | None) -> dict[str, Place]:
    """Return the places that are stored with a record."""
    stored: Any = {} if data is None else data.extra.get("places", {})
    return {entry_id: _place(place) for entry_id, place in stored.items()}


def _place(stored: Any) -> Place:
    thread_id, position = stored
    return thread_id, position


def _has_id(stored: Any, entry_id: str) -> bool:
    return isinstance(stored, dict) and stored.get("id") == entry_id


def _stored(part: Sequence[Any], index: int, entry_id: str) -> dict[str, Any]:
    """Return the message of an entry; ``KeyError`` if the place has another one.

    Then the conversation was deleted, and maybe begun again.
    """
    if index >= len(part) or not _has_id(part[index], entry_id):
        raise KeyError(entry_id)

    found: dict[str, Any] = part[index]
    return found
