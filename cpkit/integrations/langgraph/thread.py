"""The records of one LangGraph thread, and the checkpoints that result from them.

A record is one message of the store's thread. It has an id and a type:

``checkpoint``
    A checkpoint without its values, and the values that are new with it.
``writes``
    The writes of one task. The record may stand before its checkpoint.
``hidden``
    Ids of checkpoints that were pruned, or deleted with their run.

Each record also names the first record of the thread, if its writer knew it. A record
that names another one was meant for a thread that has been deleted, and is ignored. A
checkpoint that builds on a missing record is ignored too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from uuid import uuid4

from langgraph.checkpoint.base import ChannelVersions, writes_sort_key

from cpkit.errors import CorruptThread
from cpkit.integrations.langgraph.names import thread_id_in
from cpkit.integrations.langgraph.values import EMPTY, Known, Typed, Value, from_json

__all__ = ["Namespace", "Record", "Stored", "Thread", "Write", "new_record"]

Record: TypeAlias = dict[str, Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint as the thread has it."""

    checkpoint: Typed
    metadata: Typed
    parent: str | None
    versions: ChannelVersions
    values: dict[str, Value]
    is_hidden: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """One value that a task wrote to a channel."""

    task_id: str
    task_path: str
    index: int
    channel: str
    typed: Typed


@dataclass(slots=True)
class Namespace:
    """The checkpoints of a graph or of one subgraph, with their writes."""

    checkpoints: dict[str, Stored] = field(default_factory=dict)
    values: dict[tuple[str, object], Value] = field(default_factory=dict)
    writes: dict[str, dict[tuple[str, int], Write]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def visible(self) -> Iterator[tuple[str, Stored]]:
        """Yield the checkpoints that are not hidden with their ids, newest first."""
        for checkpoint_id in sorted(self.checkpoints, reverse=True):
            stored = self.checkpoints[checkpoint_id]

            if not stored.is_hidden:
                yield checkpoint_id, stored

    def get(self, checkpoint_id: str | None) -> tuple[str, Stored] | None:
        """Return this checkpoint, or the newest, unless it is missing or hidden."""
        if not checkpoint_id:
            ids = (id for id, one in self.checkpoints.items() if not one.is_hidden)
            checkpoint_id = max(ids, default="")

        stored = self.checkpoints.get(checkpoint_id)
        return None if stored is None or stored.is_hidden else (checkpoint_id, stored)

    def writes_of(self, checkpoint_id: str) -> list[Write]:
        """Return the writes to a checkpoint, in the order of application."""
        found = self.writes.get(checkpoint_id, {}).values()
        return sorted(
            found,
            key=lambda one: writes_sort_key(one.task_path, one.task_id, one.index),
        )


class Thread:
    """The records of a thread up to ``version``, in order.

    ``turn`` is a lock that is held while more records are read. ``answered`` is the
    highest version that the store has returned for the thread: if a later append
    returns a lower one, the thread was deleted. ``known`` has the list that was read or
    written last, by namespace and channel.
    """

    def __init__(self, store_id: str, thread_id: str | None = None) -> None:
        self.store_id = store_id
        self.thread_id = thread_id_in(store_id) if thread_id is None else thread_id
        self.version = 0
        self.answered = 0
        self.first_id: str | None = None
        self.last_id: str | None = None
        self.namespaces: dict[str, Namespace] = {}
        self.known: dict[tuple[str, str], Known] = {}
        self.turn = asyncio.Lock()
        self._values: dict[tuple[str, str], Value] = {}

    def namespace(self, name: str) -> Namespace:
        return self.namespaces.get(name) or Namespace()

    def check_known(self) -> None:
        """Drop known lists whose record the thread does not have.

        They were written before the thread was read for the first time. It may have
        been deleted in between, and no record may build on them then.
        """
        self.known = {
            (ns, channel): known
            for (ns, channel), known in self.known.items()
            if (known.record_id, channel) in self._values
        }

    def take(self, record: Record) -> bool:
        """Add the next record; return false if it is ignored.

        Raises ``CorruptThread`` for a message that is not a record.
        """
        try:
            is_valid = self._take(record)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise CorruptThread(
                self.store_id,
                f"message {self.version}",
                f"not a LangGraph record that this version of cpkit knows: {exc!r}",
            ) from exc

        if self.thread_id is None:
            self.thread_id = record["thread_id"]

        self.version += 1
        self.answered = max(self.answered, self.version)
        self.last_id = record["id"]
        return is_valid

    def _take(self, record: Record) -> bool:
        record_id, first_id = record["id"], record["first"]
        takes = {
            "checkpoint": self._take_checkpoint,
            "writes": self._take_writes,
            "hidden": self._take_hidden,
        }
        take = takes[record["type"]]

        if self.version == 0:
            self.first_id = record_id
        elif first_id is not None and first_id != self.first_id:
            return False

        return take(record)

    def _take_checkpoint(self, record: Record) -> bool:
        new: dict[str, Value] = {}

        for channel, value in record["values"].items():
            base = value.get("base")
            source = None

            if (
                base is not None
                and (source := self._values.get((base, channel))) is None
            ):
                logger.warning(
                    "%s: checkpoint %s was built on one that has been deleted",
                    self.store_id,
                    record["checkpoint_id"],
                )
                return False

            new[channel] = Value(
                record["id"],
                from_json(*value["data"]),
                source,
                value["keep"] if source else 0,
            )

        space = self.namespaces.setdefault(record["ns"], Namespace())
        versions = record["versions"]

        for channel, value in new.items():
            self._values[record["id"], channel] = value
            space.values[channel, record["values"][channel]["version"]] = value

        values = {
            channel: value
            for channel, version in versions.items()
            if (value := space.values.get((channel, version))) is not None
            and value.typed != EMPTY
        }
        space.checkpoints[record["checkpoint_id"]] = Stored(
            from_json(*record["checkpoint"]),
            from_json(*record["metadata"]),
            record["parent"],
            versions,
            values,
        )
        return True

    def _take_writes(self, record: Record) -> bool:
        space = self.namespaces.setdefault(record["ns"], Namespace())
        stored = space.writes[record["checkpoint_id"]]

        for index, channel, *data in record["writes"]:
            write = Write(
                record["task_id"], record["task_path"], index, channel, from_json(*data)
            )
            place = (write.task_id, index)

            # The first write at an index stays. Errors, interrupts and resumptions have
            # fixed indices below 0 and are replaced.
            if index < 0 or place not in stored:
                stored[place] = write

        return True

    def _take_hidden(self, record: Record) -> bool:
        for name, checkpoint_id in record["checkpoints"]:
            space = self.namespace(name)
            stored = space.checkpoints.get(checkpoint_id)

            if stored is not None:
                space.checkpoints[checkpoint_id] = replace(stored, is_hidden=True)

        return True


def new_record(thread: Thread, kind: str, **content: Any) -> Record:
    """Return a record with a new id, to append to the thread."""
    record = {"type": kind, "id": uuid4().hex, "first": thread.first_id, **content}

    if thread_id_in(thread.store_id) is None:
        record["thread_id"] = thread.thread_id

    return record
