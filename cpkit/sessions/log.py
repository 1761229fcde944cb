"""`SessionLog`: a session in a store, with forks, imports and exports."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Self

from cpkit.effects.requests import waiting_tools
from cpkit.errors import CorruptThread
from cpkit.fenced import append_once
from cpkit.fitting import append_what_fits
from cpkit.protocol import Checkpointer
from cpkit.sessions.context import CustomMessages
from cpkit.sessions.editor import SessionEditor
from cpkit.sessions.entries import VERSION, Entry, draft, flaw, new_header
from cpkit.sessions.errors import NotASession
from cpkit.sessions.follower import Follower
from cpkit.sessions.jsonl import SessionFile, read_jsonl, write_jsonl
from cpkit.sessions.migrate import migrate, version_of
from cpkit.sessions.tree import LogTree
from cpkit.sessions.typed import TypedMessages
from cpkit.sessions.view import SessionView

__all__ = ["SessionLog"]

logger = logging.getLogger("cpkit.sessions")


class SessionLog(SessionEditor):
    """One session: an append-only log of entries that form a tree.

    This object is a copy of the log in the store, up to ``version``. Reading it does no
    I/O; `refresh` fetches the entries of other writers.

    Each ``append_*``, `move_to`, `label` and `set_name` is one append of one entry. The
    entry follows ``leaf_id`` and becomes the new leaf. The append is fenced: if another
    writer appended first, it raises ``VersionConflict`` and writes nothing. Then call
    `refresh`, look at the new entries, and decide again.

    Tasks that share one log take turns. A cancelled append is still completed. After
    ``BackendUnavailable`` with ``maybe_applied``, `refresh` shows whether the entry was
    written.
    """

    def __init__(
        self,
        cp: Checkpointer[Any],
        session_id: str,
        header: Entry,
        messages: TypedMessages,
        custom_messages: CustomMessages,
    ) -> None:
        super().__init__(session_id, header, messages, custom_messages)
        self._cp = cp
        self._thread = Follower(cp, session_id)
        self._turn = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        cp: Checkpointer[Any],
        session_id: str,
        *,
        cwd: str | os.PathLike[str] = "",
        message_type: Any = dict,
        custom_messages: CustomMessages | None = None,
    ) -> Self:
        """Read the session from the store, or start a new one.

        The session is the thread with its id, in a store of JSON objects. A new session
        is written with its first entry, and has ``cwd`` in its header.

        ``message_type`` is what `append_message` takes and `context` returns: dicts, or
        a type that pydantic validates and whose JSON is an object. ``custom_messages``
        has functions that make messages of custom entries, by their type.

        A session that was trimmed has a new header, and its oldest entry is a root. The
        state, the labels and the name that were set before are gone.

        Raises ``NotASession`` if the thread has other messages, and ``CorruptThread``
        if the session has another version of the format.
        """
        log = cls(
            cp,
            session_id,
            new_header(session_id, os.fspath(cwd)),
            TypedMessages(message_type),
            custom_messages or {},
        )
        await log.refresh()
        return log

    def __repr__(self) -> str:
        return f"<SessionLog {self.session_id!r} at version {self.version}>"

    @property
    def version(self) -> int:
        """The thread's version that this log has read; 0 before the first entry."""
        return self._thread.version

    async def refresh(self) -> list[Entry]:
        """Fetch the entries that other writers appended, and return them.

        Reads the line that was read last and all later lines. Raises ``CorruptThread``
        if the store has another line in its place, because the thread was deleted.

        A log goes on after another process has trimmed the session, and keeps what it
        has read. Where lines were trimmed before they were read, it has only what is
        left, as a session that is opened then.
        """
        async with self._turn:
            before = self.version
            lines = await self._thread.news()

            if lines is None:
                raise CorruptThread(
                    self.session_id,
                    f"messages up to {self.version - 1}",
                    "not the lines that were read before: the session was deleted or "
                    "replaced; open it again",
                )

            entries = lines

            if self._thread.first > before:
                self._begin_again(lines)
            elif lines and not before:
                self.header = _header(lines[0], self.session_id)
                entries = lines[1:]
                self._tree.extend(entries)
            else:
                self._tree.extend(entries)

            self._thread.read(lines)
            return entries

    def _begin_again(self, lines: list[Any]) -> None:
        """Take what is left of a session in the place of what was read before."""
        if lines and flaw(lines[0]) is not None:
            raise NotASession(self.session_id)

        tree = LogTree(self.session_id)
        tree.extend(lines)
        self._tree, self._base = tree, self._thread.first

    async def fork(
        self,
        session_id: str,
        entry_id: str | None = None,
        *,
        cwd: str | os.PathLike[str] | None = None,
        message: Any = None,
    ) -> Self:
        """Copy the branch up to this entry, or to the leaf, into a new session.

        Entries keep their ids. Their labels and the session's name are copied too. A
        ``message`` is written behind them, in the same append. The new header names
        this session as ``parentSession``; this session is not changed. Raises
        ``VersionConflict`` if the new session exists already.
        """
        folder = self.header.get("cwd", "") if cwd is None else os.fspath(cwd)
        header = new_header(session_id, folder, self.session_id)
        fork = type(self)(
            self._cp, session_id, header, self._messages, self._custom_messages
        )

        fork._tree.extend(self.branch(entry_id))
        fork._tree.extend(fork._tree.following(_carried_over(self, fork)))

        if message is not None:
            plain = self._messages.dump(message, session_id)
            fork._tree.extend(fork._tree.following([draft("message", message=plain)]))

        await fork._create()
        return fork

    @classmethod
    async def import_jsonl(
        cls,
        cp: Checkpointer[Any],
        source: str | os.PathLike[str] | SessionFile,
        *,
        session_id: str | None = None,
        on_corrupt: Literal["raise", "skip", "replace"] = "raise",
        message_type: Any = dict,
        custom_messages: CustomMessages | None = None,
    ) -> Self:
        """Write a session file into the store, completely or not at all.

        More than ``max_append`` (64 MiB by default) takes several appends. If the
        process dies between them, delete the thread, or go on with ``cpkit import``.

        ``source`` is a path, or the result of `read_jsonl`. The session's id is the
        header's, unless ``session_id`` is given. Versions 1 and 2 are migrated. Nothing
        else changes, and `export_jsonl` writes the same lines. A warning is logged for
        each skipped line.

        Raises ``VersionConflict`` if the session has entries already, and the errors of
        `read_jsonl`.
        """
        file = source

        if not isinstance(file, SessionFile):
            file = await asyncio.to_thread(read_jsonl, file, on_corrupt)

        for line in file.skipped:
            logger.warning("%s, %s", file.name, line)

        header, *entries = migrate(file.lines)
        log = cls(
            cp,
            header["id"] if session_id is None else session_id,
            header,
            TypedMessages(message_type),
            custom_messages or {},
        )

        log._tree.extend(entries)
        await log._create()
        return log

    async def export_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write the session, up to this log's version, to a file.

        The file is written completely or not at all, and replaces an existing one. Only
        its owner may read it. Raises ``OSError`` as `open` does.
        """
        await asyncio.to_thread(write_jsonl, path, [self.header, *self._tree.entries])

    async def _waiting_tools(self) -> Collection[str]:
        return await waiting_tools(self._cp, {self.session_id})

    async def _write(self, drafts: Callable[[], Sequence[Entry]]) -> list[str]:
        # Shielded: after a cancelled append, this copy would not know whether the
        # store has the entries.
        return await asyncio.shield(asyncio.create_task(self._commit(drafts)))

    async def _commit(self, drafts: Callable[[], Sequence[Entry]]) -> list[str]:
        async with self._turn:
            entries = self._tree.following(drafts())

            if entries:
                lines = entries if self.version else [self.header, *entries]
                await append_once(
                    self._cp, self.session_id, lines, expected_version=self.version
                )
                self._tree.extend(entries)
                self._thread.wrote(lines)

            return [entry["id"] for entry in entries]

    async def _create(self) -> None:
        """Write the complete session, which is only in memory yet."""

        async def append(lines: list[Any]) -> None:
            await append_once(
                self._cp, self.session_id, lines, expected_version=self.version
            )
            self._thread.wrote(lines)

        await append_what_fits(append, [self.header, *self._tree.entries], None)


def _header(line: object, session_id: str) -> Entry:
    if line is None or isinstance(line, (str, int, float, list)):
        raise NotASession(session_id)

    if not isinstance(line, dict):
        raise TypeError(
            f"thread {session_id!r} holds {type(line).__name__} objects, not dicts; "
            "open the store of a session without message_type="
        )

    if line.get("type") != "session":
        raise NotASession(session_id)

    if version_of(line, f"session {session_id!r}") != VERSION:
        raise CorruptThread(
            session_id,
            "message 0",
            f"a session of version {line.get('version', 1)!r} of the format, not "
            f"{VERSION}; export it and import it again",
        )

    return line


def _carried_over(source: SessionView, fork: SessionView) -> list[Entry]:
    """Return drafts of the labels and the name that other branches set."""
    drafts = [
        draft("label", targetId=entry["id"], label=source.labels.get(entry["id"]))
        for entry in fork.entries
        if source.labels.get(entry["id"]) != fork.labels.get(entry["id"])
    ]

    if source.name != fork.name:
        drafts.append(draft("session_info", name=source.name))

    return drafts
