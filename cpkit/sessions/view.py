"""`SessionView`: a session in memory, for reading. It does no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from cpkit.sessions.context import CustomMessages, SessionContext, project
from cpkit.sessions.entries import Entry, time_of
from cpkit.sessions.tree import LogTree, TreeNode
from cpkit.sessions.typed import TypedMessages

__all__ = ["SessionVersion", "SessionView"]


@dataclass(frozen=True)
class SessionVersion:
    """A point in a session's history, for `SessionView.at`.

    ``version`` is the thread's version after ``entry_id`` was appended. ``label`` is
    the entry's current label.
    """

    version: int
    entry_id: str
    time: datetime | None
    label: str | None


class SessionView:
    """The entries of a session that have been read.

    Do not change the entries and the header. The results of `context` and `at` are
    copies, which the caller may change.
    """

    def __init__(
        self,
        session_id: str,
        header: Entry,
        messages: TypedMessages,
        custom_messages: CustomMessages,
    ) -> None:
        self.session_id = session_id
        self.header = header
        self._messages = messages
        self._custom_messages = custom_messages
        self._tree = LogTree(session_id)
        self._base = 1
        """The version before the first entry."""

    @property
    def entries(self) -> list[Entry]:
        """All entries in the order of the log, without the header."""
        return list(self._tree.entries)

    @property
    def leaf_id(self) -> str | None:
        """The entry that the next one follows: the last entry of the log.

        If the last entry has followers that stand before it in the log, this is the
        newest leaf of its branch.
        """
        return self._tree.leaf_id

    @property
    def labels(self) -> dict[str, str]:
        """The current labels, by entry id."""
        return dict(self._tree.labels)

    @property
    def name(self) -> str | None:
        """The session's name, or ``None``."""
        return self._tree.name

    @property
    def orphans(self) -> list[str]:
        """Ids of entries whose parent cannot be used, in the order of the log.

        The parent is not in the log, or the parents of some entries form a cycle and
        this entry is the first of them. An orphan with its followers continues the
        entry that stands before the first of them. A complete log has no orphans.
        """
        return list(self._tree.orphans)

    def entry(self, entry_id: str) -> Entry:
        """Return one entry, or raise ``UnknownEntry``."""
        return self._tree.entry(entry_id)

    def branch(self, entry_id: str | None = None) -> list[Entry]:
        """Return the entries from the root to this one, or to the leaf."""
        return self._tree.branch(self.leaf_id if entry_id is None else entry_id)

    def leaves(self) -> list[str]:
        """Return the ids of the entries without followers, in the order of the log."""
        return self._tree.leaves()

    def tree(self) -> list[TreeNode]:
        """Return the roots of the tree: one, unless the leaf was moved to ``None``."""
        return self._tree.roots()

    def context(self, entry_id: str | None = None) -> SessionContext:
        """Return the context at this entry, or at the leaf.

        The cost grows with the length of the branch, not of the log.
        """
        return self._project(self.branch(entry_id))

    def versions(self) -> list[SessionVersion]:
        """Return every point in the session's history, oldest first."""
        labels = self._tree.labels
        return [
            SessionVersion(
                version, entry["id"], time_of(entry), labels.get(entry["id"])
            )
            for version, entry in enumerate(self._tree.entries, self._base + 1)
        ]

    def at(self, version: int) -> SessionContext:
        """Return the context at a version; version 1 has only the header.

        Of a trimmed session, the lowest version is the one before its oldest entry.
        """
        first, last = self._base, self._base + len(self._tree.entries)

        if not first <= version <= last:
            raise ValueError(
                f"session {self.session_id!r} has versions {first} to {last}, not "
                f"{version}"
            )

        if version == first:
            return self._project([])

        if version == last:
            return self.context()

        return self.context(self._tree.entries[version - first - 1]["id"])

    def _project(self, branch: list[Entry]) -> SessionContext:
        return project(branch, self._custom_messages, self._load)

    def _load(self, entry: Entry) -> object:
        return self._messages.load(entry, self.session_id)
