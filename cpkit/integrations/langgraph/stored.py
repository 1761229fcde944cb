"""What a thread's records say: checkpoints, and the writes of tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from langgraph.checkpoint.base import ChannelVersions

from cpkit.integrations.langgraph.values import Typed

__all__ = [
    "MISSING",
    "Draft",
    "Fence",
    "Offer",
    "Record",
    "Stored",
    "Write",
    "is_full",
    "may_begin_window",
]

Record: TypeAlias = dict[str, Any]

MISSING: Any = object()
"""Marks a channel that has a version and no value."""

# How many checkpoints in a row may have no dicts of their own. Reading the last one
# builds them from all of these, so a longer chain would make that read slow.
_LONGEST_CHAIN = 32


def is_full(record: Record) -> bool:
    """Return whether a record is a full checkpoint: no other one has ``newest``."""
    return "newest" in record


def may_begin_window(record: Record) -> bool:
    """Return whether a reader may begin at this record."""
    return is_full(record) and record.get("first") is not None


class Stored:
    """A checkpoint as the thread has it.

    ``body`` is the serialized checkpoint without its values, and its metadata. The
    checkpoint is not complete if one of its values is in a record that was not read.

    ``changed`` has all ``versions`` (``has_all``), or those that differ from the
    ``base``: the parent, or ``None`` if nothing is taken from it. ``found``
    has the values of the channels that changed, and ``loose`` those without a version.
    The dicts of a checkpoint with a base are built when they are read for the first
    time; ``_chain_length`` counts the checkpoints in a row whose dicts are not built.
    """

    __slots__ = (
        "_base",
        "_chain_length",
        "_found",
        "_loose",
        "_values",
        "_versions",
        "body",
        "is_complete",
        "parent",
    )

    def __init__(
        self,
        body: list[Any],
        parent: str | None,
        base: Stored | None,
        changed: ChannelVersions,
        found: Mapping[str, Any],
        loose: Mapping[str, Any],
        is_complete: bool,
        has_all: bool,
    ) -> None:
        self.body = body
        self.parent = parent
        self.is_complete = is_complete
        self._base = base
        self._versions = changed
        self._found = found
        self._loose = loose
        self._values: dict[str, Any] = {}
        self._chain_length: int = (
            0 if base is None or has_all else base._chain_length + 1
        )

        if base is None:
            self._set(changed, {})
        elif has_all:
            before = base.values.items()
            self._set(changed, {name: one for name, one in before if name in changed})
        elif self._chain_length > _LONGEST_CHAIN:
            self._build()

    @property
    def versions(self) -> ChannelVersions:
        self._build()
        return self._versions

    @property
    def values(self) -> dict[str, Any]:
        """The values: JSON, or a `Value`."""
        self._build()
        return self._values

    def _build(self) -> None:
        """Build the dicts from those of the nearest checkpoint that has them."""
        if self._base is None:
            return

        chain = []
        nearest: Stored = self

        while nearest._base is not None:
            chain.append(nearest)
            nearest = nearest._base

        versions, values = dict(nearest._versions), dict(nearest._values)
        before = nearest

        for one in reversed(chain):
            versions.update(one._versions)

            for channel in before._loose:
                if channel not in versions:
                    values.pop(channel, None)

            before = one
            one._apply(values)

        self._set(versions, values, is_applied=True)

    def _set(
        self,
        versions: ChannelVersions,
        values: dict[str, Any],
        is_applied: bool = False,
    ) -> None:
        if not is_applied:
            self._apply(values)

        self._base, self._chain_length = None, 0
        self._versions, self._values = versions, values

    def _apply(self, values: dict[str, Any]) -> None:
        for channel, value in self._found.items():
            if value is MISSING:
                values.pop(channel, None)
            else:
                values[channel] = value

        values.update(self._loose)


@dataclass(slots=True)
class Write:
    """One value that a task wrote to a channel."""

    task_id: str
    task_path: str
    index: int
    channel: str
    data: list[Any]


@dataclass(slots=True, eq=False)
class Offer:
    """A task's write, to which the next checkpoint may refer in place of the value.

    The write must be stored before, or in the same append. ``length`` is the number of
    items if the value is a list.
    """

    record_id: str
    index: int
    typed: Typed
    data: list[Any]
    length: int | None
    is_stored: bool = False


@dataclass(slots=True, eq=False)
class Draft:
    """A record that is to be appended.

    ``refers`` has the channels whose values are writes, and ``offers`` the writes of
    this record. ``stored`` is what was appended last.
    """

    record: Record
    refers: list[tuple[str, Offer]] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    stored: Record = field(default_factory=dict)

    def finished(self, together: Collection[str]) -> Record:
        """Return the record as it is appended.

        Values that are stored as writes become references. The writes are in the store,
        or among the records ``together``, by their ids, in the same append.
        """
        used = [
            (channel, offer)
            for channel, offer in self.refers
            if offer.is_stored or offer.record_id in together
        ]
        self.stored = self.record

        if not used:
            return self.stored

        values = dict(self.record["values"])

        for channel, offer in used:
            entry = values[channel] | {"of": [offer.record_id, offer.index]}
            del entry["data"]
            values[channel] = entry

        self.stored = {**self.record, "values": values}

        if is_full(self.record):
            self.stored["needs"] = sorted({offer.record_id for _, offer in used})

        return self.stored

    def note_stored(self) -> None:
        """Let later checkpoints refer to the writes of this record."""
        for offer in self.offers:
            offer.is_stored = True


@dataclass(slots=True, eq=False)
class Fence:
    """Lets a change of a thread be refused if another writer appended after the read.

    ``version`` is that of the store's thread before the first read with this fence.
    The saver holds ``writes`` back, and appends them with the checkpoint at this
    version.
    """

    version: int | None = None
    writes: list[Draft] = field(default_factory=list)
