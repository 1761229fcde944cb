"""Which entry each entry of a log follows, by its place in the log.

A parent may stand before or after its child: links are made when all entries are
known. An entry is an *orphan* if the parent that it names is not in the log, or if it
is the earliest entry of a cycle of parents. An orphan keeps its descendants. It gets as
parent the entry just before the earliest of the orphan and its descendants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from cpkit.sessions.entries import Entry

__all__ = ["NO_PARENT", "link", "newest_leaf"]

NO_PARENT = -1
_ORPHAN = -2


def link(
    entries: Sequence[Entry], places: Mapping[str, int]
) -> tuple[list[int], list[int]]:
    """Return the place of each entry's parent, and the places of the orphans.

    ``places`` has the place of each entry by its id.
    """
    parents = [_named_parent(entry, places) for entry in entries]
    _break_cycles(parents)
    orphans = [place for place, parent in enumerate(parents) if parent == _ORPHAN]

    if orphans:
        _attach(parents, orphans)

    return parents, orphans


def newest_leaf(parents: Sequence[int], place: int) -> int:
    """Return the largest place of a leaf that descends from this entry, or is it."""
    children: dict[int, list[int]] = defaultdict(list)

    for child, parent in enumerate(parents):
        children[parent].append(child)

    newest = NO_PARENT
    todo = [place]

    while todo:
        place = todo.pop()

        if place in children:
            todo += children[place]
        else:
            newest = max(newest, place)

    return newest


def _named_parent(entry: Entry, places: Mapping[str, int]) -> int:
    parent_id = entry.get("parentId")

    if parent_id is None:
        return NO_PARENT

    return places.get(parent_id, _ORPHAN) if isinstance(parent_id, str) else _ORPHAN


def _break_cycles(parents: list[int]) -> None:
    """Make an orphan of the first entry of each cycle."""
    walked_from = [NO_PARENT] * len(parents)

    for start in range(len(parents)):
        place = start

        while place >= 0 and walked_from[place] == NO_PARENT:
            walked_from[place] = start
            place = parents[place]

        if place >= 0 and walked_from[place] == start:
            first = place
            other = parents[place]

            while other != place:
                first = min(first, other)
                other = parents[other]

            parents[first] = _ORPHAN


def _attach(parents: list[int], orphans: Sequence[int]) -> None:
    """Give each orphan the parent that the module's docstring says.

    That parent stands before all of the orphan's descendants, so it is not one of them
    and no new cycle is made. ``up`` is a union-find over the trees that exist so far,
    because a walk to the root for each orphan would take quadratic time in a damaged
    log. ``first`` has, for each root, the earliest entry of its tree.
    """
    up = [max(parent, NO_PARENT) for parent in parents]  # orphans are roots too
    first = list(range(len(parents)))

    def root_of(place: int) -> int:
        path = []

        while up[place] != NO_PARENT:
            path.append(place)
            place = up[place]

        for passed in path:
            up[passed] = place

        return place

    for place in range(len(parents)):
        root = root_of(place)
        first[root] = min(first[root], place)

    for orphan in orphans:
        before = first[orphan] - 1
        parents[orphan] = before

        if before != NO_PARENT:
            root = root_of(before)
            up[orphan] = root
            first[root] = min(first[root], first[orphan])
