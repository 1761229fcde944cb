"""Errors of the session layer, beside those of the contract."""

from __future__ import annotations

from cpkit.errors import CheckpointerError

__all__ = ["NotASession", "Trimmed", "UnknownEntry"]


class NotASession(CheckpointerError):
    """The thread is in use, and its first message is not the header of a session."""

    def __init__(self, thread_id: str) -> None:
        super().__init__(thread_id)
        self.thread_id = thread_id

    def __str__(self) -> str:
        return f"thread {self.thread_id!r} is a plain thread, not a session"


class Trimmed(CheckpointerError):
    """Messages that a reader has not read yet were trimmed; it can go on at ``first``.

    The reader stood at ``version``, so the messages between the two are gone.
    """

    def __init__(self, thread_id: str, version: int, first: int) -> None:
        super().__init__(thread_id, version, first)
        self.thread_id = thread_id
        self.version = version
        self.first = first

    def __str__(self) -> str:
        return (
            f"thread {self.thread_id!r} was trimmed: the messages from {self.version} "
            f"to {self.first - 1} are gone; go on with version {self.first}"
        )


class UnknownEntry(CheckpointerError):
    """The session, or the branch in question, has no entry with this id."""

    def __init__(self, session_id: str, entry_id: object, where: str = "") -> None:
        super().__init__(session_id, entry_id, where)
        self.session_id = session_id
        self.entry_id = entry_id
        self.where = where

    def __str__(self) -> str:
        place = f" {self.where}" if self.where else ""
        return (
            f"session {self.session_id!r} has no entry {self.entry_id!r}{place}; "
            "'log.entries' has all entries, 'await log.refresh()' fetches new ones"
        )
