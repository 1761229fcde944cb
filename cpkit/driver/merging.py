"""Appends of one batch to one thread, merged into one write for the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cpkit.driver.writes import Append, Outcome, Write, stored_size

__all__ = ["MergedBatch", "merge_appends"]


class MergedBatch(NamedTuple):
    """The writes for the store, and for each caller's write its index among them."""

    writes: Sequence[Write]
    places: Sequence[int]

    def split(
        self, batch: Sequence[Write], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Return each caller's outcome: the version after its own messages."""
        if len(self.writes) == len(batch):
            return outcomes

        left = list(outcomes)
        found: list[Outcome] = []

        for write, place in zip(reversed(batch), reversed(self.places), strict=True):
            found.append(outcome := left[place])

            if isinstance(outcome, int) and isinstance(write, Append):
                left[place] = outcome - len(write.bodies)

        return found[::-1]


def merge_appends(batch: Sequence[Write], limit: int) -> MergedBatch:
    """Merge the appends to each thread that name no version, up to ``limit`` bytes.

    Another write to the thread stays between those before and after it.
    """
    if len({write.thread_id for write in batch}) == len(batch):
        return MergedBatch(batch, range(len(batch)))

    # A write that is not merged is a group of its own.
    groups: list[list[Write]] = []
    places: list[int] = []
    # By thread: the place of a group that can grow, and by how many bytes.
    growing: dict[str, tuple[int, int]] = {}

    for write in batch:
        place, room = growing.pop(write.thread_id, (0, -1))

        if isinstance(write, Append) and write.expected_version is None:
            size = stored_size(write)

            if size <= room:
                groups[place].append(write)
            else:
                place, room = len(groups), limit
                groups.append([write])

            growing[write.thread_id] = place, room - size
        else:
            place = len(groups)
            groups.append([write])

        places.append(place)

    return MergedBatch([_merged(group) for group in groups], places)


def _merged(group: list[Write]) -> Write:
    if len(group) == 1:
        return group[0]

    appends = [write for write in group if isinstance(write, Append)]
    bodies = [body for write in appends for body in write.bodies]
    items = dict(item for write in appends for item in write.items)
    return Append(group[0].thread_id, bodies, None, list(items.items()))
