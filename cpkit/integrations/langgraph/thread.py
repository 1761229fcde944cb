"""The records of one LangGraph thread, and the checkpoints that result from them.

A record is one message of the store's thread. It has an id and a type:

``checkpoint``
    A checkpoint without its values, and the values that are new with it: ``plain`` ones
    as JSON, the names of ``empty`` ones, and other ``values``; ``loose`` ones have no
    version and belong to this checkpoint alone. A *full* checkpoint has
    all values, so that a reader needs no earlier record. It also has the highest
    checkpoint id that its writer knew, in the namespace (``newest``) and in all
    namespaces (``top``), if it is not its own. With many channels, a checkpoint has
    only the ``new_versions``, which differ from those of its parent.
``writes``
    The writes of one task. The record may stand before its checkpoint.
``hidden``
    Ids of checkpoints that were pruned, or deleted with their run.
``owner``
    A run that owns the thread from here on.
``part``
    A piece of data that is too large for one message. The parts of a record stand
    directly before it.

Each record also names the first record of the thread, if its writer knew it. A record
that names another one was meant for a thread that has been deleted. It is ignored,
unless it is or follows a full checkpoint that names the same one, because that needs no
deleted record. A checkpoint that builds on a missing record is ignored too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from langgraph.checkpoint.base import ChannelVersions, writes_sort_key

from cpkit.errors import CorruptThread
from cpkit.integrations.langgraph.names import thread_id_in
from cpkit.integrations.langgraph.values import EMPTY, PLAIN, Known, Value

__all__ = [
    "Namespace",
    "Record",
    "Stored",
    "Thread",
    "Write",
    "new_record",
    "record_size",
    "split",
]

Record: TypeAlias = dict[str, Any]

_OVERHEAD = 4096

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Stored:
    """A checkpoint as the thread has it.

    It is not complete if a value stands before the first record that was read.
    """

    checkpoint: list[Any]
    metadata: list[Any]
    parent: str | None
    versions: ChannelVersions
    values: dict[str, Value]
    is_complete: bool = True


@dataclass(slots=True)
class Write:
    """One value that a task wrote to a channel."""

    task_id: str
    task_path: str
    index: int
    channel: str
    data: list[Any]


@dataclass(slots=True)
class Namespace:
    """The checkpoints of a graph or of one subgraph, with their writes.

    ``latest`` is the highest id of ``checkpoints``, and ``newest`` the highest that a
    record names. ``full_at`` and ``full_count`` are the values of `Thread.bytes_seen`
    and `Thread.seen` at the last full checkpoint.
    """

    checkpoints: dict[str, Stored] = field(default_factory=dict)
    values: dict[tuple[str, object], Value] = field(default_factory=dict)
    writes: dict[str, dict[tuple[str, int], Write]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    hidden: set[str] = field(default_factory=set)
    latest: str = ""
    newest: str = ""
    full_at: int = 0
    full_count: int = 0
    full_size: int = 0

    def visible(self) -> Iterator[tuple[str, Stored]]:
        """Yield the checkpoints that are not hidden with their ids, newest first."""
        for checkpoint_id in sorted(self.checkpoints, reverse=True):
            if checkpoint_id not in self.hidden:
                yield checkpoint_id, self.checkpoints[checkpoint_id]

    def get(self, checkpoint_id: str | None) -> tuple[str, Stored] | None:
        """Return this checkpoint, or the newest, unless it is missing or hidden."""
        if not checkpoint_id:
            checkpoint_id = self.latest

            if checkpoint_id in self.hidden:
                checkpoint_id = max(self.checkpoints.keys() - self.hidden, default="")

        stored = self.checkpoints.get(checkpoint_id)
        is_hidden = stored is None or checkpoint_id in self.hidden
        return None if stored is None or is_hidden else (checkpoint_id, stored)

    def writes_of(self, checkpoint_id: str) -> list[Write]:
        """Return the writes to a checkpoint, in the order of application."""
        found = self.writes.get(checkpoint_id, {}).values()
        return sorted(
            found,
            key=lambda one: writes_sort_key(one.task_path, one.task_id, one.index),
        )


class Thread:
    """The records of a thread that were read, in order, up to its ``version``.

    A *window* begins at a full checkpoint, all else at the first record. The version
    of a window is ``None`` until the position of one of its records is known. ``top``
    is the highest checkpoint id that a record names, and ``above`` has the ids of the
    full checkpoint at which the window begins: earlier records have none that is
    higher, in its namespace and in all. A window is *mixed* if only a reader of all
    records can tell which of its records are ignored.

    ``seen`` counts these records and those that this process has appended, and
    ``bytes_seen`` counts their bytes. ``owner`` is the token of the run that owns the
    thread.

    ``appended`` has the positions, by id, of records that this process appended and has
    not read.
    ``written`` names the checkpoints that this process stored writes of. ``empty`` has
    the version of each channel that was empty when this process stored or loaded it
    last.

    ``turn`` is a lock that is held while more records are read. ``answered`` is the
    highest version that the store has returned for the thread: if a later append
    returns a lower one, the thread was deleted. ``known`` has the list that was read or
    written last, by namespace and channel.
    """

    def __init__(
        self, store_id: str, thread_id: str | None = None, full: Record | None = None
    ) -> None:
        self.store_id = store_id
        self.is_window = full is not None
        self.is_mixed = False
        self.thread_id = thread_id_in(store_id) if thread_id is None else thread_id
        self.count = 0
        self.version: int | None = 0
        self.answered = 0
        self.seen = 0
        self.bytes_seen = 0
        self.top = ""
        self.above: tuple[str, str] | None = None
        self.owner: str | None = None
        self.appended: dict[str, int] = {}
        self.written: set[tuple[str, str]] = set()
        self.empty: dict[tuple[str, str], object] = {}
        self.first_id: str | None = None
        self.last_id: str | None = None
        self._firsts: set[str] = set()
        self.namespaces: dict[str, Namespace] = {}
        self.known: dict[tuple[str, str], Known] = {}
        self.turn = asyncio.Lock()
        self._values: dict[tuple[str, str], Value] = {}
        self._parts: list[str] = []
        self._noted: dict[str, tuple[str, ChannelVersions]] = {}

        if full is not None:
            self.version = None
            self.first_id = full["first"]
            self._firsts.add(full["first"])

            if "top" in full:
                own = full["checkpoint_id"]
                self.above = (max(full["newest"], own), max(full["top"], own))

    def namespace(self, name: str) -> Namespace:
        return self.namespaces.get(name) or Namespace()

    def space(self, name: str) -> Namespace:
        """Return a namespace, which the thread has from now on."""
        space = self.namespaces.get(name)

        if space is None:
            space = self.namespaces[name] = Namespace()

        return space

    def note_full(self, space: Namespace, record: Record) -> None:
        """Remember that this full checkpoint is the last record."""
        space.full_at = self.bytes_seen
        space.full_count = self.seen
        space.full_size = record_size(record)

    def note(self, ns: str, checkpoint_id: str, versions: ChannelVersions) -> None:
        """Remember a checkpoint that is stored, which the next one may build on."""
        self._noted[ns] = (checkpoint_id, versions)

    def versions_of(self, ns: str, checkpoint_id: str | None) -> ChannelVersions:
        """Return the versions of a checkpoint, if it is the noted one."""
        noted_id, versions = self._noted.get(ns, (None, {}))
        return versions if noted_id == checkpoint_id else {}

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
                f"message {self.count}" + (" of those read" * self.is_window),
                f"not a LangGraph record that this version of cpkit knows: {exc!r}",
            ) from exc

        if self.thread_id is None:
            self.thread_id = record["thread_id"]

        position = self.appended.pop(record["id"], self.version)
        self.version = None if position is None else position + 1
        self.count += 1
        self.answered = max(self.answered, self.version or self.count)
        self.last_id = record["id"]
        return is_valid

    def add_own(
        self, records: list[Record], version: int, *, is_reader: bool = False
    ) -> None:
        """Add records that this process appended; ``version`` is the store's answer.

        If other records stand before them, a later read adds them all. So does it while
        another task reads, unless the caller is the reader.
        """
        start = version - len(records)

        if start == self.version and (is_reader or not self.turn.locked()):
            for record in records:
                self.take(record)
        else:
            self.seen += len(records)
            self.bytes_seen += sum(map(record_size, records))

            for position, record in enumerate(records, start):
                self.appended[record["id"]] = position

    def _take(self, record: Record) -> bool:
        record_id, first_id = record["id"], record["first"]
        takes = {
            "checkpoint": self._take_checkpoint,
            "writes": self._take_writes,
            "hidden": self._take_hidden,
            "owner": self._take_owner,
            "part": self._take_part,
        }
        take = takes[record["type"]]

        if record_id not in self.appended:
            self.seen += 1
            self.bytes_seen += record_size(record)

        if self.count == 0 and not self.is_window:
            self.first_id = record_id
            self._firsts.add(record_id)
        elif record["type"] == "part":
            pass
        elif first_id is not None and first_id not in self._firsts:
            if "newest" not in record:
                self.is_mixed = self.is_window
                self._parts.clear()
                return False

            self._firsts.add(first_id)

        if self._parts and record["type"] != "part":
            record = with_parts(record, self._parts)
            self._parts.clear()

        return take(record)

    def _take_checkpoint(self, record: Record) -> bool:
        record_id = record["id"]
        space = self.space(record["ns"])
        parent = space.checkpoints.get(record["parent"])

        if "versions" in record:
            versions = changed = record["versions"]
            is_complete = True
        elif parent is None and not self.is_window:
            self._warn(record)
            return False
        else:
            changed = record["new_versions"]
            versions = {**parent.versions, **changed} if parent else changed
            is_complete = parent is not None and parent.is_complete

        new: dict[str, Value] = {}

        for channel, stored in record["values"].items():
            base = stored.get("base")
            source = None

            if (
                base is not None
                and (source := self._values.get((base, channel))) is None
            ):
                if self.is_window:
                    is_complete = False
                    continue

                self._warn(record)
                return False

            keep = stored["keep"] if source else 0
            new[channel] = Value(record_id, _data(stored["data"]), source, keep)

        for channel, value in new.items():
            space.values[channel, record["values"][channel]["version"]] = value

        for channel, plain in record.get("plain", {}).items():
            new[channel] = value = Value(record_id, [PLAIN, plain])
            space.values[channel, versions[channel]] = value

        for channel in record.get("empty", ()):
            new[channel] = value = Value(record_id, list(EMPTY))
            space.values[channel, versions[channel]] = value

        for channel, value in new.items():
            self._values[record_id, channel] = value

        before: ChannelVersions = {}
        values: dict[str, Value] = {}

        if parent is not None and parent.is_complete:
            before, values = parent.versions, dict(parent.values)

            for channel in values.keys() - versions.keys():
                del values[channel]

        for channel, version in changed.items():
            if channel in new or before.get(channel) != version:
                found = space.values.get((channel, version))

                if found is None and self.is_window:
                    # Every channel has a value, if only an empty one, at each version.
                    is_complete = False

                if found is None or found.is_empty:
                    values.pop(channel, None)
                else:
                    values[channel] = found

        for channel, data in record.get("loose", {}).items():
            values[channel] = Value(record_id, _data(data))

        checkpoint_id = record["checkpoint_id"]
        space.newest = max(space.newest, checkpoint_id, record.get("newest", ""))
        self.top = max(self.top, space.newest, record.get("top", ""))
        space.latest = max(space.latest, checkpoint_id)
        space.hidden.discard(checkpoint_id)
        space.checkpoints[checkpoint_id] = Stored(
            _data(record["checkpoint"]),
            _data(record["metadata"]),
            record["parent"],
            versions,
            values,
            is_complete,
        )

        if "newest" in record:
            self.note_full(space, record)

        return True

    def _warn(self, record: Record) -> None:
        logger.warning(
            "%s: checkpoint %s was built on one that has been deleted",
            self.store_id,
            record["checkpoint_id"],
        )

    def _take_writes(self, record: Record) -> bool:
        space = self.space(record["ns"])
        stored = space.writes[record["checkpoint_id"]]

        for index, channel, *data in record["writes"]:
            write = Write(
                record["task_id"], record["task_path"], index, channel, _data(data)
            )
            place = (write.task_id, index)

            # The first write at an index stays. Errors, interrupts and resumptions have
            # fixed indices below 0 and are replaced.
            if index < 0 or place not in stored:
                stored[place] = write

        return True

    def _take_hidden(self, record: Record) -> bool:
        for name, checkpoint_id in record["checkpoints"]:
            space = self.space(name)
            space.hidden.add(checkpoint_id)

        return True

    def _take_owner(self, record: Record) -> bool:
        self.owner = record["token"]
        return True

    def _take_part(self, record: Record) -> bool:
        self._parts.append(record["text"])
        return True


def new_record(thread: Thread, kind: str, **content: Any) -> Record:
    """Return a record with a new id, to append to the thread."""
    # 96 random bits.
    record = {
        "type": kind,
        "id": os.urandom(12).hex(),
        "first": thread.first_id,
        **content,
    }

    if thread_id_in(thread.store_id) is None:
        record["thread_id"] = thread.thread_id

    return record


def record_size(record: Record) -> int:
    """Return about what a record costs in bytes: its data, and its overhead.

    A reader takes as long for a small record as for some kilobytes of data.
    """
    size = _OVERHEAD + len(record.get("text", "")) + 40 * len(record.get("empty", ()))
    size += len(str(record.get("plain", "")))

    for data in _each_data(record):
        if isinstance(data[1], str):
            size += 100 + len(data[1])

    return size


def with_parts(record: Record, parts: list[str]) -> Record:
    """Return the record with the texts that were stored as parts before it."""
    left = iter(parts)

    for data in _each_data(record):
        if isinstance(data[1], int):
            data[1] = "".join(next(left) for _ in range(data[1]))

    return record


def split(thread: Thread, record: Record, largest: int) -> list[Record]:
    """Return the parts of a record with too long texts, and then the record."""
    parts: list[Record] = []

    for data in _each_data(record):
        text = data[1]

        if len(text) > largest:
            pieces = [text[i : i + largest] for i in range(0, len(text), largest)]
            parts += [new_record(thread, "part", text=piece) for piece in pieces]
            data[1] = len(pieces)

    if parts:
        record["parts"] = len(parts)

    return [*parts, record]


def _each_data(record: Record) -> Iterator[list[Any]]:
    """Yield each list of a record whose item 1 is the text of serialized data."""
    if "checkpoint" in record:
        yield record["checkpoint"]
        yield record["metadata"]

    for value in record.get("values", {}).values():
        yield value["data"]

    yield from record.get("loose", {}).values()

    for write in record.get("writes", ()):
        # Index and channel come first.
        data = write[2:]
        yield data
        write[2:] = data


def _data(data: list[Any]) -> list[Any]:
    """Check the form of stored data, which is decoded when it is used."""
    if not all(isinstance(part, str) for part in data) or not 2 <= len(data) <= 3:
        raise ValueError(f"not serialized data: {str(data)[:80]}")

    return data
