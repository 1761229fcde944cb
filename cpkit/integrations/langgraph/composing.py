"""From LangGraph's checkpoints and writes to records."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from cpkit.errors import VersionConflict
from cpkit.integrations.langgraph.errors import NotOwner
from cpkit.integrations.langgraph.names import FENCE, OWNER, namespace_in
from cpkit.integrations.langgraph.records import Record, Stored, View
from cpkit.integrations.langgraph.serializer import DefaultSerializer
from cpkit.integrations.langgraph.values import (
    INLINE,
    Prints,
    Value,
    blobs_of,
    is_plain,
    length_of,
    packed,
    prints_of,
    same_items,
)
from cpkit.records import JsonValue

__all__ = ["Composer", "Draft", "Fence", "Offers", "Stale"]

# A checkpoint is stored whole if what it repeats of its parent is at most so many times
# as long as the records since the last whole one. A reader begins at the whole one.
_REPEATED = 2

Offers = dict[str, list[list[Record]]]
"""By channel, the blobs of values that tasks wrote."""


class Stale(Exception):
    """A draft builds on a record that the thread does not have."""


@dataclass(slots=True, eq=False)
class Fence:
    """Lets a change of a thread be refused if another writer appended after the read.

    ``version`` is that of the store's thread at the first read with this fence. The
    saver holds ``writes`` back, and appends them with the checkpoint at this version.
    """

    version: int | None = None
    writes: list[Draft] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Draft:
    """A record that is to be appended, with its blobs before it.

    ``base`` is the checkpoint on which it builds, and ``named`` has the blobs of other
    records that it names. ``prints`` has the fingerprints of its lists by channel.
    ``config`` may have the token of an owner, and a fence.
    """

    record: Record
    config: RunnableConfig | None = None
    base: Stored | None = None
    blobs: list[Record] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    prints: dict[str, Prints] = field(default_factory=dict)
    extra: dict[str, JsonValue] = field(default_factory=dict)
    owner: str | None = None
    fence: Fence | None = None

    def __post_init__(self) -> None:
        self.record.setdefault("size", 0)

        if self.config is not None:
            self.owner = self.config["configurable"].get(OWNER)
            self.fence = self.config["configurable"].get(FENCE)

    @property
    def weight(self) -> int:
        size: int = self.record["size"]
        return size + sum(len(one["text"]) for one in self.blobs)

    def refusal(
        self, view: View, positions: Mapping[object, int]
    ) -> NotOwner | VersionConflict | Stale | None:
        """Return why the record cannot be appended to the thread as it is now.

        ``positions`` are those of the view, and of blobs in the same append.
        """
        fence, base = self.fence, self.base

        if self.owner is not None and view.extra.get("owner") != self.owner:
            return NotOwner(view.thread_id, self.owner)

        if fence is not None and fence.version != view.version:
            return VersionConflict(view.store_id, fence.version or 0, view.version)

        if base is not None:
            found = view.complete(self.record["ns"], base.id)

            if found is None or found.position != base.position:
                return Stale()

        return None if self.named <= positions.keys() else Stale()

    def placed(
        self, view: View, position: int, positions: MutableMapping[object, int]
    ) -> list[Record]:
        """Return the records as they are appended at this position."""
        for number, blob in enumerate(self.blobs, position):
            positions[blob["id"]] = number

        if "checkpoint_id" not in self.record:
            return [self.record]

        ns, checkpoint_id = place = self.record["ns"], self.record["checkpoint_id"]
        base = self.base

        if self.record["type"] == "writes":
            base = view.space(ns).checkpoints.get(checkpoint_id)

        start = min(
            position,
            positions.get(place, position),
            base.start if base else position,
            *(positions[one] for one in self.named),
        )
        positions.setdefault(place, start)
        return [*self.blobs, {**self.record, "start": start}]


class Composer:
    """Makes the records of checkpoints and of writes."""

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde
        # Another serializer, also one derived from these, may encrypt.
        self._stores_plain = type(serde) in (JsonPlusSerializer, DefaultSerializer)

    def checkpoint(
        self,
        view: View,
        offers: Offers,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
        *,
        is_whole: bool = False,
    ) -> Draft:
        """Return a checkpoint with what its parent does not have, or with all."""
        ns, parent = namespace_in(config), config["configurable"].get("checkpoint_id")
        body: dict[str, Any] = dict(checkpoint)
        values: dict[str, Any] = body.pop("channel_values")
        versions: ChannelVersions = body.pop("channel_versions")
        base = view.complete(ns, parent)
        known, before = base.state if base else ({}, {})
        # A value without a version belongs to its checkpoint alone.
        same = {
            channel
            for channel in known.keys() & before.keys() & values.keys()
            if versions.get(channel) == known[channel] and channel not in new_versions
        }
        lists = self._lists(values, before, same)

        if base is None or not known.keys() <= versions.keys():
            is_whole = True
        elif not is_whole:
            tails = {channel for channel, (_, keep) in lists.items() if keep}
            is_whole = _is_due(view, base, same | tails)

        record: Record = {
            "type": "checkpoint",
            "ns": ns,
            "checkpoint_id": checkpoint["id"],
            "parent": parent,
            "whole": is_whole,
            "versions": dict(versions)
            if is_whole
            else {c: v for c, v in versions.items() if known.get(c) != v},
            "values": {},
            "gone": [] if is_whole else [c for c in before if c not in values],
        }
        draft = Draft(record, config, None if is_whole else base)
        head = [body, get_checkpoint_metadata(config, metadata)]
        record["head"] = self._entry(draft, head)

        for channel, value in values.items():
            if channel in same:
                if is_whole:
                    again = self._again(draft, channel, value, before[channel])
                    record["values"][channel] = again
            else:
                draft.prints[channel], keep = lists.get(channel, ([], 0))
                record["values"][channel] = self._entry(
                    draft, value, offers.get(channel, ()), 0 if is_whole else keep
                )

        return draft

    def writes(
        self,
        offers: Offers,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str,
    ) -> Draft:
        """Return the record of a task's writes, and offer them to a checkpoint."""
        stored: list[list[Any]] = []
        record: Record = {
            "type": "writes",
            "ns": namespace_in(config),
            "checkpoint_id": config["configurable"]["checkpoint_id"],
            "task_id": task_id,
            "task_path": task_path,
            "writes": stored,
        }
        draft = Draft(record, config)

        for index, (channel, value) in enumerate(writes):
            count = len(draft.blobs)
            entry = self._entry(draft, value)
            stored.append([WRITES_IDX_MAP.get(channel, index), channel, entry])

            if len(draft.blobs) > count:
                offers.setdefault(channel, []).append(draft.blobs[count:])

        return draft

    def _lists(
        self, values: dict[str, Any], before: dict[str, Any], same: set[str]
    ) -> dict[str, tuple[Prints, int]]:
        """Return the fingerprints of lists, and how many items were there before."""
        lists: dict[str, tuple[Prints, int]] = {}

        for channel, value in values.items():
            if type(value) is not list or channel in same:
                continue

            if (prints := prints_of(value)) is not None:
                known = before.get(channel)
                keep = 0

                if type(known) is Value:
                    known.prints = known.prints or prints_of(known.load(self._serde))
                    keep = same_items(known.prints or [], prints)

                lists[channel] = prints, keep

        return lists

    def _entry(
        self,
        draft: Draft,
        value: Any,
        offered: Sequence[list[Record]] = (),
        keep: int = 0,
    ) -> JsonValue:
        """Return the entry of a value, or of what follows the first items of a list."""
        if not self._stores_plain or not is_plain(value):
            kind, data = self._serde.dumps_typed(value[keep:] if keep else value)
            packing, text = packed(data)
            entry = [packing, kind, self._text(draft, text, offered)]
            return [*entry, keep] if keep else entry

        if type(value) is str and len(value) > INLINE:
            return ["plain", "", self._text(draft, value, offered)]

        draft.record["size"] += length_of(value)
        plain: JsonValue = value
        return plain

    def _again(self, draft: Draft, channel: str, value: Any, stored: Any) -> JsonValue:
        """Return the entry of a value that the parent has at this version.

        Its text is stored again. The graph may have changed the value in place, for the
        next version.
        """
        if type(stored) is not Value:
            return self._entry(draft, stored)

        draft.prints[channel] = stored.prints or []

        if stored.base is not None:
            return self._entry(draft, value)

        text = "".join(stored.texts)
        return [stored.packing, stored.kind, self._text(draft, text, ())]

    def _text(
        self, draft: Draft, text: str, offered: Sequence[list[Record]]
    ) -> JsonValue:
        """Return the text, or ids of blobs: of those offered if they are equal."""
        if len(text) <= INLINE:
            draft.record["size"] += len(text)
            return text

        blobs = blobs_of(text)

        for one in offered:
            if [blob["text"] for blob in one] == [blob["text"] for blob in blobs]:
                draft.named.update(blob["id"] for blob in one)
                return [blob["id"] for blob in one]

        draft.blobs += blobs
        return [blob["id"] for blob in blobs]


def _is_due(view: View, base: Stored, repeated: set[str]) -> bool:
    """Return whether to store a whole checkpoint, which repeats these channels."""
    before = base.state[1]
    length = sum(length_of(before[channel]) for channel in repeated)
    return length <= _REPEATED * (view.weight - base.begun)
