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
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

from cpkit.driver.backoff import backoff_pauses
from cpkit.driver.ids import check_id
from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.errors import CorruptThread, VersionConflict
from cpkit.fenced import append_once, read_range
from cpkit.integrations.bridge import Bridge
from cpkit.protocol import Checkpointer, ErasesThreads, ListsThreads
from cpkit.records import ThreadInfo
from cpkit.registry import needs_extra
from cpkit.sessions.follower import Follower
from cpkit.sync import SyncCheckpointer

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

_PREFIX = "cpkit:claude-agent-sdk:"

# A process has few sessions at a time.
_CACHED = 64


class ClaudeSessionStore:
    """The ``session_store`` of the Claude Agent SDK, with all optional methods.

    ``cp`` is any store, opened without ``message_type=``, or a `SyncCheckpointer`. The
    methods may be called from any event loop. Any number of processes may append to one
    transcript: an entry whose ``uuid`` is in the transcript is not stored again.

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

        Raises ``SerializationError`` for a value that is not JSON.
        """
        given = [
            parse_json(encode_json(entry, (place,)))
            for place, entry in enumerate(entries)
        ]

        if given:
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

        pauses = backoff_pauses(first=0.005, longest=0.5)

        async with transcript.turn:
            records = transcript.records_of(key, entries)

            # Known entries are left out only if the transcript still has them.
            if transcript.version == 0 or len(records) < len(entries):
                await transcript.refresh()

            while records := transcript.records_of(key, entries):
                try:
                    await append_once(
                        self._cp,
                        thread_id,
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

        if "subpath" not in key:
            # Subagents first: after a crash between two, the session is still listed.
            async for _, _, info in self._threads(
                key["project_key"], key["session_id"]
            ):
                if info.thread_id != thread_id:
                    await self._cp.delete_thread(info.thread_id)
                    self._cached.pop(info.thread_id, None)

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

        prefix = _PREFIX + "".join(f"{quote(part, safe='')}/" for part in parts)
        after = None

        while page := await self._cp.list_threads(prefix=prefix, after=after):
            for info in page:
                _, session_id, subpath = info.thread_id[len(_PREFIX) :].split("/")

                if info.version:
                    yield unquote(session_id), unquote(subpath), info

            after = page[-1].thread_id


class _Transcript:
    """What this process knows of a transcript: its length, uuids and summary."""

    def __init__(self, cp: Checkpointer[Any], thread_id: str) -> None:
        self._cp, self._thread_id = cp, thread_id
        self.turn = asyncio.Lock()
        self._forget()

    def _forget(self) -> None:
        self._thread = Follower(self._cp, self._thread_id)
        self._uuids: set[str] = set()
        self._summary: dict[str, Any] | None = None

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

            records[-1]["summary"] = fold_session_summary(before, key, fresh)["data"]

        return records

    async def refresh(self) -> None:
        """Read what others appended."""
        records = await self._thread.news()

        if records is None:
            # The transcript was deleted, and another one has its id.
            self._forget()
            records = await self._thread.news() or []

        self._take(records)
        self._thread.read(records)

    def wrote(self, records: list[Any]) -> None:
        self._take(records)
        self._thread.wrote(records)

    def _take(self, records: list[Any]) -> None:
        for record in records:
            entry = _checked(self._thread_id, record)["entry"]

            if isinstance(uuid := entry.get("uuid"), str):
                self._uuids.add(uuid)

            self._summary = record.get("summary", self._summary)


def transcript_thread(key: SessionKey) -> str:
    """Return the id of the thread that holds a transcript.

    Raises ``InvalidId`` for an empty part, or if the id is longer than 512 bytes.
    """
    parts = [key["project_key"], key["session_id"]]

    if "subpath" in key:
        parts.append(key["subpath"])

    for name, part in zip(
        ("project_key", "session_id", "subpath"), parts, strict=False
    ):
        check_id(name, part)

    encoded = "/".join(quote(part, safe="") for part in [*parts, ""][:3])
    return check_id("the session key, with its prefix,", f"{_PREFIX}{encoded}")


def _millis(info: ThreadInfo) -> int:
    return int(info.updated_at.timestamp() * 1000)


def _checked(thread_id: str, record: Any) -> Any:
    if not isinstance(record, dict) or not isinstance(record.get("entry"), dict):
        raise CorruptThread(
            thread_id, "a message", "not an entry of a Claude Agent SDK transcript"
        )

    return record
