"""The log in memory: entries by position, found by id, linked by parents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.errors import CorruptThread
from cpkit.sessions.entries import Entry, flaw, fresh_id, now
from cpkit.sessions.errors import UnknownEntry
from cpkit.sessions.links import NO_PARENT, link, newest_leaf

__all__ = ["LogTree", "TreeNode"]


@dataclass(frozen=True, eq=False)
class TreeNode:
    """An entry, its label or ``None``, and the entries that follow it."""

    entry: Entry
    label: str | None
    # Not in the repr: a session may be deeper than Python's stack.
    children: list[TreeNode] = field(default_factory=list, repr=False)


class LogTree:
    """Entries in the order of the log, and the tree that their parents make of them.

    The tree depends on the entries alone, not on how many were added at a time.
    `cpkit.sessions.links` says which entries are orphans and where they belong;
    ``orphans`` has their ids.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.entries: list[Entry] = []
        self.labels: dict[str, str] = {}
        self.name: str | None = None
        self.orphans: list[str] = []
        self._places: dict[str, int] = {}
        self._parents: list[int] = []
        self._missing: set[str] = set()
        self._leaf = NO_PARENT

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._places

    def extend(self, entries: Sequence[Entry]) -> None:
        """Add the next entries of the log.

        Raises ``CorruptThread``, and adds nothing, if one of them is not an entry.
        """
        if not entries:
            return

        start = len(self.entries)
        places = self._checked(entries)
        self.entries += entries
        self._places |= places
        parents = [
            self._parent_before(entry, place)
            for place, entry in enumerate(entries, start)
        ]

        # The usual case: no link that exists is changed by the new entries.
        if None not in parents and self._missing.isdisjoint(places):
            self._parents += [parent for parent in parents if parent is not None]
            self._leaf = len(self.entries) - 1
        else:
            self._link_all()

        for entry in entries:
            kind = entry["type"]

            if kind == "label":
                self._take_label(entry)
            elif kind == "session_info":
                self._take_name(entry)

    def following(self, drafts: Sequence[Entry]) -> list[Entry]:
        """Make entries of the drafts and return them, without adding them.

        Each follows the one before it, and the first follows the leaf, unless a draft
        has a ``parentId``. They are equal to what a load would return.
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
        """The id of the last entry, or of the newest leaf of its branch.

        The two differ only if entries of the log stand before their parents.
        """
        return None if self._leaf == NO_PARENT else self.entries[self._leaf]["id"]

    def entry(self, entry_id: str) -> Entry:
        """Return the entry, or raise ``UnknownEntry``."""
        return self.entries[self._place(entry_id)]

    def branch(self, entry_id: str | None) -> list[Entry]:
        """Return the entries from the root to this one; none for ``None``."""
        place = NO_PARENT if entry_id is None else self._place(entry_id)
        path = []

        while place != NO_PARENT:
            path.append(self.entries[place])
            place = self._parents[place]

        path.reverse()
        return path

    def leaves(self) -> list[str]:
        """Return the ids of the entries without followers, in the order of the log."""
        followed = set(self._parents)
        return [
            entry["id"]
            for place, entry in enumerate(self.entries)
            if place not in followed
        ]

    def roots(self) -> list[TreeNode]:
        """Return the tree; roots and children are in the order of the log."""
        roots: list[TreeNode] = []
        nodes = [
            TreeNode(entry, self.labels.get(entry["id"])) for entry in self.entries
        ]

        for node, parent in zip(nodes, self._parents, strict=True):
            (roots if parent == NO_PARENT else nodes[parent].children).append(node)

        return roots

    def _place(self, entry_id: str) -> int:
        try:
            return self._places[entry_id]
        except (KeyError, TypeError):
            raise UnknownEntry(self.session_id, entry_id) from None

    def _checked(self, entries: Sequence[Entry]) -> dict[str, int]:
        """Return the place of each new entry by its id."""
        places: dict[str, int] = {}

        for place, entry in enumerate(entries, len(self.entries)):
            reason = flaw(entry)

            if reason is not None:
                raise self._corrupt(place, reason)

            entry_id = entry.get("id")

            if not isinstance(entry_id, str) or not entry_id:
                raise self._corrupt(place, "no id")

            if entry_id in self._places or entry_id in places:
                raise self._corrupt(place, f"a second entry {entry_id!r}")

            places[entry_id] = place

        return places

    def _parent_before(self, entry: Entry, place: int) -> int | None:
        """Return the parent's place; ``None`` if it does not stand before the entry."""
        parent_id = entry.get("parentId")

        if parent_id is None:
            return NO_PARENT

        parent = self._places.get(parent_id) if isinstance(parent_id, str) else None
        return parent if parent is not None and parent < place else None

    def _link_all(self) -> None:
        self._parents, orphans = link(self.entries, self._places)
        self._leaf = newest_leaf(self._parents, len(self.entries) - 1)
        self.orphans = [self.entries[place]["id"] for place in orphans]
        named = (self.entries[place]["parentId"] for place in orphans)
        self._missing = {name for name in named if isinstance(name, str)}

    def _take_name(self, entry: Entry) -> None:
        name = entry.get("name")

        if isinstance(name, str) and name:
            self.name = name

    def _take_label(self, entry: Entry) -> None:
        target = entry.get("targetId")
        label = entry.get("label")

        if not isinstance(target, str):
            return

        if isinstance(label, str) and label:
            self.labels[target] = label
        else:
            self.labels.pop(target, None)

    def _corrupt(self, place: int, reason: str) -> CorruptThread:
        # The header is message 0.
        return CorruptThread(self.session_id, f"message {place + 1}", reason)
