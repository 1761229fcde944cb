"""The log in memory: entries by position, found by id, linked by parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.errors import CorruptThread
from cpkit.sessions.entries import Entry, flaw, fresh_id, now
from cpkit.sessions.errors import UnknownEntry

__all__ = ["LogTree", "TreeNode"]

NO_PARENT = -1


@dataclass(frozen=True, eq=False)
class TreeNode:
    """An entry, its label if it has one, and the entries that follow it."""

    entry: Entry
    label: str | None
    # Not in the repr: a session is deeper than Python's stack.
    children: list[TreeNode] = field(default_factory=list, repr=False)


class LogTree:
    """Entries in the order of the log, and the tree that their parents make of them.

    A parent stands before its child, so there is no cycle. An entry whose parent is
    not there (its line was lost) is taken to follow the entry before it, so that the
    rest of the branch stays in reach; ``orphans`` has the ids of such entries.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.entries: list[Entry] = []
        self.labels: dict[str, str] = {}
        self.name: str | None = None
        self.orphans: list[str] = []
        self._places: dict[str, int] = {}
        self._parents: list[int] = []

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._places

    def add(self, entry: Entry) -> None:
        """Add the next entry of the log.

        Raises ``CorruptThread``, and adds nothing, for what is no entry.
        """
        place = len(self.entries)
        reason = flaw(entry)

        if reason is not None:
            raise self._corrupt(reason)

        entry_id = entry.get("id")

        if not isinstance(entry_id, str) or not entry_id:
            raise self._corrupt("no id")

        if entry_id in self._places:
            raise self._corrupt(f"a second entry {entry_id!r}")

        parent_id = entry.get("parentId")
        parent = NO_PARENT

        if parent_id is not None:
            known = isinstance(parent_id, str)
            parent = self._places.get(parent_id, place) if known else place

            if parent == place:
                parent = place - 1
                self.orphans.append(entry_id)

        self.entries.append(entry)
        self._parents.append(parent)
        self._places[entry_id] = place

        if entry["type"] == "label":
            self._take_label(entry)
        elif entry["type"] == "session_info":
            self.name = entry.get("name") or self.name

    def following(self, drafts: Sequence[Entry]) -> list[Entry]:
        """Return the entries that the drafts make, one after the other from the leaf.

        A draft with a ``parentId`` follows that entry instead. They are as a load
        would return them, and not added.
        """
        entries: list[Entry] = []
        parent = self.leaf_id

        for i, fields in enumerate(drafts):
            entry = {
                "type": fields["type"],
                "id": fresh_id(self),
                "parentId": parent,
                "timestamp": now(),
                **fields,
            }
            entries.append(parse_json(encode_json(entry, (i,))))
            parent = entry["id"]

        return entries

    @property
    def leaf_id(self) -> str | None:
        """The id of the last entry, which is where the session stands."""
        return self.entries[-1]["id"] if self.entries else None

    def entry(self, entry_id: str) -> Entry:
        """Return the entry, or raise ``UnknownEntry``."""
        return self.entries[self._place(entry_id)]

    def branch(self, entry_id: str | None) -> list[Entry]:
        """Return the entries from the root to this one; no id, no entries."""
        place = NO_PARENT if entry_id is None else self._place(entry_id)
        path = []

        while place != NO_PARENT:
            path.append(self.entries[place])
            place = self._parents[place]

        path.reverse()
        return path

    def leaves(self) -> list[str]:
        """Return the ids of the entries that none follows, in the order of the log."""
        followed = set(self._parents)
        return [
            entry["id"]
            for place, entry in enumerate(self.entries)
            if place not in followed
        ]

    def roots(self) -> list[TreeNode]:
        """Return the tree; roots and children are in the order of the log."""
        roots: list[TreeNode] = []
        nodes: list[TreeNode] = []

        for entry, parent in zip(self.entries, self._parents, strict=True):
            node = TreeNode(entry, self.labels.get(entry["id"]))
            nodes.append(node)
            (roots if parent == NO_PARENT else nodes[parent].children).append(node)

        return roots

    def _place(self, entry_id: str) -> int:
        try:
            return self._places[entry_id]
        except (KeyError, TypeError):
            raise UnknownEntry(self.session_id, entry_id) from None

    def _take_label(self, entry: Entry) -> None:
        target = entry.get("targetId")
        label = entry.get("label")

        if not isinstance(target, str):
            return

        if isinstance(label, str) and label:
            self.labels[target] = label
        else:
            self.labels.pop(target, None)

    def _corrupt(self, reason: str) -> CorruptThread:
        # The header is message 0.
        return CorruptThread(
            self.session_id, f"message {len(self.entries) + 1}", reason
        )
