"""Transcripts of the Claude Agent SDK in any store.

::

    store = ClaudeSessionStore(cp)
    options = ClaudeAgentOptions(session_store=store)

Each transcript is one thread: a session, or a subagent of a session. Its id has the
project, the session and the subpath, each percent-encoded, with slashes between them.
Each message has one entry. The last entry of an append also has the summary that the
SDK folds from all entries so far. So the summary and the entries change together, and a
list of summaries reads one message of each session.

``by`` is an id of the append that wrote the entry. Without it, two processes that
append equal entries at the same time would take the other's entries for their own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

from cpkit.driver.backoff import backoff_pauses
from cpkit.errors import CorruptThread, VersionConflict
from cpkit.fenced import append_once, read_range
from cpkit.fitting import (
    append_what_fits,
    fitting,
    log_missing,
    storable,
)
from cpkit.integrations.bridge import Bridge
from cpkit.integrations.claude_thread import PREFIX, transcript_thread
from cpkit.protocol import Checkpointer, ErasesThreads, ListsThreads
from cpkit.records import ThreadInfo
from cpkit.registry import needs_extra
from cpkit.sessions.follower import Follower
from cpkit.sync import SyncCheckpointer
from cpkit.toolcalls import time_of

with needs_extra("cpkit.integrations.claude_agent_sdk", "claude-agent-sdk"):
    from claude_agent_sdk import (
        SessionKey,
        SessionListSubkeysKey,
        SessionStoreEntry,
        SessionStoreListEntry,
        SessionSummaryEntry,
        fold_session_summary,
    )

__all__ = ["ClaudeSessionStore", "transcript_thread"]

# A process has few sessions at a time.
_CACHED = 64

_SUMMARY_BYTES = 16 * 1024


class ClaudeSessionStore:
    """The ``session_store`` of the Claude Agent SDK, with all optional methods.

    ``cp`` is any store, opened without ``message_type=``, or a `SyncCheckpointer`. The
    methods may be called from any event loop. Any number of processes may append to one
    transcript: an entry whose ``uuid`` is in the transcript is not stored again. In a
    transcript that was trimmed, neither is one whose time is before the oldest left,
    unless it follows an entry that is there.

    The first append to a transcript reads it, and each later append reads only what
    other processes appended. `delete` needs a store that erases, and the lists need a
    store that lists its threads; otherwise they raise ``NotImplementedError``.
    """

    def __init__(self, cp: Checkpointer[Any] | SyncCheckpointer[Any]) -> None:
        self._bridge = Bridge(cp, wait_for_loop=True)
        self._cp = self._bridge.checkpointer
        # Used only on the store's event loop.
        self._cached: OrderedDict[str, _Transcript] = OrderedDict()

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Append the entries that are new, all or none, and fold the summary.

        A value that is not JSON, and the largest parts of an entry above the store's
        limit, are replaced by a text that says what is missing, and logged. Entries
        above ``max_append`` together take several appends.
        """
        missing: list[str] = []
        given = [_entry(storable(entry, missing)) for entry in entries]

        if given:
            log_missing(transcript_thread(key), missing)
            await self._bridge.go(self._append(key, given))

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Return all entries, or ``None`` if the transcript was never written."""
        return await self._bridge.go(self._load(key))

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """Return the sessions of the project with the time of their last change."""
        return await self._bridge.go(self._list_sessions(project_key))

    async def list_session_summaries(
        self, project_key: str
    ) -> list[SessionSummaryEntry]:
        """Return the summary of each session of the project."""
        return await self._bridge.go(self._list_summaries(project_key))

    async def delete(self, key: SessionKey) -> None:
        """Erase a transcript; a session's subagents are erased with it."""
        await self._bridge.go(self._delete(key))

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """Return the subpaths of the session's subagents."""
        return await self._bridge.go(self._list_subkeys(key))

    # On the store's event loop

    async def _append(self, key: SessionKey, entries: list[Any]) -> None:
        thread_id = transcript_thread(key)
        transcript = self._cached.setdefault(
            thread_id, _Transcript(self._cp, thread_id)
        )
        self._cached.move_to_end(thread_id)

        if len(self._cached) > _CACHED:
            self._cached.popitem(last=False)

        async with transcript.turn:
            records = transcript.records_of(key, entries)

            # Known entries are left out only if the transcript still has them.
            if transcript.version == 0 or len(records) < len(entries):
                await transcript.refresh()

            await append_what_fits(
                lambda part: self._append_new(key, transcript, part),
                entries,
                partial(log_missing, thread_id),
            )

    async def _append_new(
        self, key: SessionKey, transcript: _Transcript, entries: list[Any]
    ) -> None:
        """Append the entries that the transcript lacks, in one step."""
        pauses = backoff_pauses(first=0.005, longest=0.5)

        while records := transcript.records_of(key, entries):
            try:
                await append_once(
                    self._cp,
                    transcript.thread_id,
                    records,
                    expected_version=transcript.version,
                )
            except VersionConflict:
                await transcript.refresh()
                await asyncio.sleep(next(pauses))
            else:
                transcript.wrote(records)
                return

    async def _load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        thread_id = transcript_thread(key)
        records = await read_range(self._cp, thread_id)
        return [_checked(thread_id, record)["entry"] for record in records] or None

    async def _list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        return [
            {"session_id": session_id, "mtime": _millis(info)}
            async for session_id, subpath, info in self._threads(project_key)
            if not subpath
        ]

    async def _list_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        summaries: list[SessionSummaryEntry] = []

        async for session_id, subpath, info in self._threads(project_key):
            if subpath:
                continue

            # The thread may have grown since it was listed.
            last = (await read_range(self._cp, info.thread_id, info.version - 1))[-1:]

            if last and "summary" in (record := _checked(info.thread_id, last[0])):
                summaries.append(
                    {
                        "session_id": session_id,
                        "mtime": _millis(info),
                        "data": record["summary"],
                    }
                )

        return summaries

    async def _delete(self, key: SessionKey) -> None:
        if not isinstance(self._cp, ErasesThreads):
            raise NotImplementedError("the store cannot erase threads")

        thread_id = transcript_thread(key)

        # The session first: after a crash in between it is not listed any more, and a
        # repeated call erases the rest.
        await self._erase(thread_id)

        if "subpath" not in key:
            async for _, subpath, info in self._threads(
                key["project_key"], key["session_id"]
            ):
                if subpath:
                    await self._erase(info.thread_id)

    async def _erase(self, thread_id: str) -> None:
        assert isinstance(self._cp, ErasesThreads)
        await self._cp.delete_thread(thread_id)
        self._cached.pop(thread_id, None)

    async def _list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        return [
            subpath
            async for _, subpath, _ in self._threads(
                key["project_key"], key["session_id"]
            )
            if subpath
        ]

    async def _threads(self, *parts: str) -> AsyncIterator[tuple[str, str, ThreadInfo]]:
        """Yield the session id, the subpath and the thread of each transcript."""
        if not isinstance(self._cp, ListsThreads):
            raise NotImplementedError("the store cannot list threads")

        prefix = PREFIX + "".join(f"{quote(part, safe='')}/" for part in parts)
        after = None

        while page := await self._cp.list_threads(prefix=prefix, after=after):
            for info in page:
                parts_of_id = info.thread_id[len(PREFIX) :].split("/")

                # Another program may have a thread of another form with this prefix.
                if info.version and len(parts_of_id) == 3:
                    yield unquote(parts_of_id[1]), unquote(parts_of_id[2]), info

            after = page[-1].thread_id


class _Transcript:
    """What this process knows of a transcript: its length, uuids and summary."""

    def __init__(self, cp: Checkpointer[Any], thread_id: str) -> None:
        self._cp, self.thread_id = cp, thread_id
        self.turn = asyncio.Lock()
        self._forget()

    def _forget(self) -> None:
        self._thread = Follower(self._cp, self.thread_id)
        self._uuids: set[str] = set()
        self._summary: dict[str, Any] | None = None
        self._oldest: datetime | None = None
        # The entries after the last summary, as an import writes them without one.
        self._unfolded: list[Any] = []

    @property
    def version(self) -> int:
        return self._thread.version

    def records_of(self, key: SessionKey, entries: list[Any]) -> list[Any]:
        """Return the messages for the entries that are not in the transcript."""
        seen: set[str] = set()
        fresh: list[Any] = []

        for entry in entries:
            uuid = entry.get("uuid")

            if isinstance(uuid, str):
                if uuid in self._uuids or uuid in seen:
                    continue

                if self._was_trimmed(entry, seen):
                    continue

                seen.add(uuid)

            fresh.append(entry)

        by = uuid4().hex[:16]
        records = [{"entry": entry, "by": by} for entry in fresh]

        if records and "subpath" not in key:
            before: SessionSummaryEntry | None = None

            if self._summary is not None:
                before = {
                    "session_id": key["session_id"],
                    "mtime": 0,
                    "data": self._summary,
                }

            entries = [*self._unfolded, *fresh]
            summary = fold_session_summary(before, key, entries)["data"]
            # Some of its fields are texts of entries, and every append has it.
            records[-1]["summary"] = fitting(summary, _SUMMARY_BYTES, [])

        return records

    def _was_trimmed(self, entry: Any, seen: set[str]) -> bool:
        """Return whether an entry is older than what a trim has left.

        One that follows a stored or ``seen`` entry is new, whatever its clock says.
        """
        parent, time = entry.get("parentUuid"), time_of({"entry": entry})

        if self._oldest is None or time is None or time >= self._oldest:
            return False

        return not isinstance(parent, str) or (
            parent not in self._uuids and parent not in seen
        )

    async def refresh(self) -> None:
        """Read what others appended."""
        before = self.version
        records = await self._thread.news()

        if records is None:
            # The transcript was deleted, and another one has its id.
            self._forget()
            before, records = 0, await self._thread.news() or []

        if self._thread.first > before:  # the uuids of what was trimmed are unknown
            times = map(time_of, records)
            self._oldest = next((one for one in times if one is not None), None)

        self._take(records)
        self._thread.read(records)

    def wrote(self, records: list[Any]) -> None:
        self._take(records)
        self._thread.wrote(records)

    def _take(self, records: list[Any]) -> None:
        for record in records:
            entry = _checked(self.thread_id, record)["entry"]

            if isinstance(uuid := entry.get("uuid"), str):
                self._uuids.add(uuid)

            self._unfolded.append(entry)

            if "summary" in record:
                self._summary = record["summary"]
                self._unfolded.clear()


def _entry(value: Any) -> dict[str, Any]:
    """Return the entry, or one around what is not an object."""
    return value if isinstance(value, dict) else {"type": "cpkit", "content": value}


def _millis(info: ThreadInfo) -> int:
    return int(info.updated_at.timestamp() * 1000)


def _checked(thread_id: str, record: Any) -> Any:
    if not isinstance(record, dict) or not isinstance(record.get("entry"), dict):
        raise CorruptThread(
            thread_id, "a message", "not an entry of a Claude Agent SDK transcript"
        )

    return record
