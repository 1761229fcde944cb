"""The records of one LangGraph thread, and the checkpoints that result from them.

A record is one message of the store's thread. It has an id and a type:

``checkpoint``
    ``body`` is the checkpoint without its values, and its metadata. The other fields
    have the values that are new in this checkpoint: ``plain`` has values as JSON,
    ``empty`` has the names of channels without a value, and ``values`` has all others.
    ``loose`` has values without a version, which belong to this checkpoint alone. A
    value that a task wrote is not stored a second time: ``of`` refers to the record of
    the writes. With many channels, ``new_versions`` replaces ``versions``: it has only
    the versions that differ from the parent's.

    A *full* checkpoint has all values, so a reader needs no earlier record, except for
    the records of writes in its ``needs``. ``newest`` is the highest checkpoint id that
    its writer knew in the namespace, and ``top`` in all namespaces; each is empty if
    the checkpoint's own id is the highest. The two are right for all records before it:
    the append is refused if its writer has not seen them all.
``writes``
    The writes of one task. The record may be stored before that of its checkpoint.
``hidden``
    Ids of checkpoints that were pruned, or deleted with their run.
``owner``
    A run that owns the thread from here on.
``part``
    A piece of data that is too large for one message. The parts of a record are stored
    directly before it.

Each record also names the first record of the thread (``first``), if its writer knew
it. A record with another ``first`` was meant for a thread that was deleted, and is
ignored. Full checkpoints are not: they need no deleted record. So they count, and so do
the records after them with the same ``first``. A checkpoint that builds on a missing
record is ignored too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from langgraph.checkpoint.base import ChannelVersions, writes_sort_key

from cpkit.errors import CorruptThread
from cpkit.integrations.langgraph.names import thread_id_in
from cpkit.integrations.langgraph.stored import (
    MISSING,
    Offer,
    Record,
    Stored,
    Write,
    is_full,
)
from cpkit.integrations.langgraph.values import Known, Value

__all__ = [
    "LARGEST_TEXT",
    "Namespace",
    "Thread",
    "new_record",
    "record_size",
    "split",
]

_OVERHEAD = 4096

# A message has at most 16 MiB. A text of this length leaves room for the rest of the
# record, even if each of its characters takes six bytes.
LARGEST_TEXT = 2 * 1024 * 1024

# The number of checkpoints whose writes are kept, for the next one to refer to.
_OFFERED = 16

_UNKNOWN: Any = object()

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Namespace:
    """The checkpoints of a graph or of one subgraph, with their writes.

    ``latest`` is the highest id of ``checkpoints``, and ``newest`` the highest that a
    record names. ``full_at`` is the value of `Thread.bytes_seen` at the last full
    checkpoint, and ``full_size`` is its size. ``full_count`` is the value of
    `Thread.seen` there, or earlier, at the first record that the checkpoint needs.
    ``first_full`` is the id of the first full checkpoint that was read: no record
    before it has writes of this checkpoint or of a later one.
    """

    checkpoints: dict[str, Stored] = field(default_factory=dict)
    values: dict[tuple[str, object], Any] = field(default_factory=dict)
    writes: dict[str, dict[tuple[str, int], Write]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    hidden: set[str] = field(default_factory=set)
    latest: str = ""
    newest: str = ""
    first_full: str = ""
    full_at: int = 0
    full_count: int = 0
    full_size: int = 0

    def visible(self) -> Iterator[tuple[str, Stored]]:
        """Yield the ids and checkpoints that are not hidden, newest first."""
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

    A *window* begins at a full checkpoint, and a whole thread at the first record. The
    version of a window is ``None`` until the position of one of its records is known.
    ``top`` is the highest checkpoint id that a record names. ``above`` bounds the
    checkpoint ids before a window: in the namespace of the full checkpoint, and in all
    namespaces. A window is *mixed* if it has a record with an unknown ``first``: only a
    reader of the whole thread can tell whether that record is ignored.

    ``seen`` counts these records and those that this process has appended, and
    ``bytes_seen`` counts their bytes. ``owner`` is the token of the run that owns the
    thread.

    ``appended`` has the positions, by id, of records that this process appended and has
    not read.
    ``early_writes`` has, by namespace, the highest checkpoint id with writes that are
    stored, or may be stored, before their checkpoint. ``empty`` has the version of each
    channel that was empty when this process last stored or loaded it.

    ``lock`` is held while more records are read. ``answered`` is the highest version
    that the store has returned for the thread: if a later append does not return a
    higher one, the thread was deleted. ``known`` has the list that was read or written
    last, by namespace and channel.

    A thread that ``must_be_read`` has too many new records. No full checkpoint may be
    made for it before it is read again.
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
        self.early_writes: dict[str, str] = {}
        self.empty: dict[tuple[str, str], object] = {}
        self.first_id: str | None = None
        self.last_id: str | None = None
        self._firsts: set[str] = set()
        self.namespaces: dict[str, Namespace] = {}
        self.known: dict[tuple[str, str], Known] = {}
        self.must_be_read = False
        self.lock = asyncio.Lock()
        self._values: dict[tuple[str, str], Value] = {}
        self._parts: list[str] = []
        self._noted: dict[str, tuple[str, ChannelVersions]] = {}
        self._offers: dict[tuple[str, str | None], dict[str, list[Offer]]] = {}
        # By record id: the writes of the record, and the value of `seen` after it.
        self._writes: dict[str, list[Any]] = {}
        self._places: dict[str, int] = {}

        if full is not None:
            self.version = None
            self.first_id = full["first"]
            self._firsts.add(full["first"])

            if "top" in full:
                own = full["checkpoint_id"]
                self.above = (max(full["newest"], own), max(full["top"], own))

    def unread(self) -> Thread:
        """Return a copy without records, to read again; it shares what was noted."""
        copy = Thread(self.store_id, self.thread_id)
        copy.known, copy.empty = self.known, self.empty
        copy.early_writes = self.early_writes
        copy.must_be_read = True
        return copy

    def namespace(self, name: str) -> Namespace:
        """Return a namespace; an empty one, which is not kept, if it is unknown."""
        return self.namespaces.get(name) or Namespace()

    def ensure_namespace(self, name: str) -> Namespace:
        """Return a namespace; create it if it is unknown."""
        space = self.namespaces.get(name)

        if space is None:
            space = self.namespaces[name] = Namespace()

        return space

    def set_higher_ids(self, record: Record) -> None:
        """Set ``newest`` and ``top`` of a full checkpoint from the records read so far.

        They are right only if this thread has all records that are in the store.
        """
        newest, own = self.namespace(record["ns"]).newest, record["checkpoint_id"]
        record["newest"] = newest if newest > own else ""
        record["top"] = self.top if self.top > own else ""

    def set_back(self, record: Record, ahead: int) -> None:
        """Set how far before a record the last full checkpoint is, if that is known.

        ``ahead`` is the number of records before it in the same append. The distance is
        at least this: records of others that were not read are not counted.
        """
        if "ns" in record and not is_full(record):
            full_count = self.namespace(record["ns"]).full_count

            if full_count:
                record["back"] = self.seen + ahead - full_count + 1

    def note_newest(self, ns: str, checkpoint_id: str) -> None:
        """Remember a checkpoint that is stored, or is about to be."""
        space = self.ensure_namespace(ns)
        space.newest = max(space.newest, checkpoint_id)
        self.top = max(self.top, checkpoint_id)

    def note_full(self, space: Namespace, record: Record) -> None:
        """Remember this full checkpoint as the last one."""
        needs = record.get("needs", ())
        space.full_at = self.bytes_seen
        # A window that begins at another full checkpoint may lack some of these writes.
        places = (self._places.get(one, 0) for one in needs)
        space.full_count = min([self.seen, *places])
        space.full_size = record_size(record)

        for value in record["values"].values():
            if "of" in value and (data := self._data_of(value)) is not None:
                space.full_size += len(data[1])

    def note_writes(self, record: Record) -> None:
        """Remember the writes of a record, to which checkpoints may refer."""
        self._writes[record["id"]] = record["writes"]
        self._places.setdefault(record["id"], self.seen)

    def note_early_writes(self, ns: str, checkpoint_id: str) -> None:
        """Remember that writes of this checkpoint may be stored before it."""
        self.early_writes[ns] = max(checkpoint_id, self.early_writes.get(ns, ""))

    def offer(self, ns: str, checkpoint_id: str, offers: Mapping[str, Offer]) -> None:
        """Offer the writes of a task to the checkpoint that follows this one."""
        found = self._offers.setdefault((ns, checkpoint_id), {})

        for channel, offer in offers.items():
            found.setdefault(channel, []).append(offer)

        if len(self._offers) > _OFFERED:
            del self._offers[next(iter(self._offers))]

    def take_offers(
        self, ns: str, checkpoint_id: str | None
    ) -> Mapping[str, list[Offer]]:
        """Return and forget the writes of the tasks of this checkpoint, by channel."""
        return self._offers.pop((ns, checkpoint_id), {})

    def note(self, ns: str, checkpoint_id: str, versions: ChannelVersions) -> None:
        """Remember a checkpoint that is stored, which the next one may build on."""
        self._noted[ns] = (checkpoint_id, versions)

    def versions_of(self, ns: str, checkpoint_id: str | None) -> ChannelVersions:
        """Return the versions of a checkpoint, if it is the noted one."""
        noted_id, versions = self._noted.get(ns, (None, {}))
        return versions if noted_id == checkpoint_id else {}

    def check_known(self) -> None:
        """Drop known lists whose record the thread does not have.

        This process wrote those lists before it read the thread. If the thread was
        deleted in between, no new record may build on them.
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
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
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

        If the store has other records before them, a later read adds them all. It is
        the same while another task holds the lock; ``is_reader`` says that the caller
        holds it.
        """
        start = version - len(records)

        if start == self.version and (is_reader or not self.lock.locked()):
            for record in records:
                self.take(record)
        else:
            for position, record in enumerate(records, start):
                self.seen += 1
                self.bytes_seen += record_size(record)
                self.appended[record["id"]] = position

                if record["type"] == "writes":
                    self.note_writes(record)

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

        if record["type"] == "writes":
            # Even if the record is ignored, a full checkpoint may refer to it.
            self.note_writes(record)

        if self.count == 0 and not self.is_window:
            self.first_id = record_id
            self._firsts.add(record_id)
        elif record["type"] == "part":
            pass
        elif first_id is not None and first_id not in self._firsts:
            if not is_full(record):
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
        space = self.ensure_namespace(record["ns"])
        parent = space.checkpoints.get(record["parent"])

        has_all = "versions" in record

        if not has_all and parent is None and not self.is_window:
            self._warn_ignored(record)
            return False

        changed = record["versions" if has_all else "new_versions"]
        is_complete = has_all or (parent is not None and parent.is_complete)
        new: dict[tuple[str, object], Any] = {}

        for channel, stored in record["values"].items():
            base_id = stored.get("base")
            source = None if base_id is None else self._values.get((base_id, channel))
            data = self._data_of(stored) if "of" in stored else stored["data"]

            if data is None or (base_id is not None and source is None):
                if self.is_window:
                    is_complete = False
                    continue

                self._warn_ignored(record)
                return False

            keep = stored["keep"] if source else 0
            value = Value(record_id, _data(data), source, keep)
            new[channel, stored["version"]] = MISSING if value.is_empty else value

        for (channel, _), value in new.items():
            self._values[record_id, channel] = value

        for channel, plain in record.get("plain", {}).items():
            new[channel, changed[channel]] = plain

        for channel in record.get("empty", ()):
            new[channel, changed[channel]] = MISSING

        space.values.update(new)
        before: ChannelVersions = {}
        found: dict[str, Any] = {}

        # What the checkpoint is built from: its parent, if that is complete.
        base = None if parent is None or not parent.is_complete else parent

        if has_all and base is not None:
            before = base.versions

        for place in changed.items():
            channel, version = place

            if before.get(channel) != version or place in new:
                value = space.values.get(place, _UNKNOWN)

                if value is _UNKNOWN:
                    # A whole thread has every value, so this one is empty. A window may
                    # lack the record with the value.
                    is_complete = is_complete and not self.is_window
                    value = MISSING

                found[channel] = value

        if has_all and len(found) == len(changed):
            base = None

        loose = record.get("loose", {})
        checkpoint_id = record["checkpoint_id"]
        space.newest = max(space.newest, checkpoint_id, record.get("newest", ""))
        self.top = max(self.top, space.newest, record.get("top", ""))
        space.latest = max(space.latest, checkpoint_id)
        space.hidden.discard(checkpoint_id)
        space.checkpoints[checkpoint_id] = Stored(
            body=_data(record["body"]),
            parent=record["parent"],
            base=base,
            changed=changed,
            found=found,
            loose={name: Value(record_id, _data(data)) for name, data in loose.items()},
            is_complete=is_complete,
            has_all=has_all,
        )

        if is_full(record):
            space.first_full = space.first_full or checkpoint_id
            self.note_full(space, record)

        return True

    def _data_of(self, stored: dict[str, Any]) -> list[Any] | None:
        """Return the data of a value that is a write; ``None`` if it was deleted."""
        record_id, index = stored["of"]
        writes = self._writes.get(record_id)
        data: list[Any] | None = None if writes is None else writes[index][2:]
        return data

    def _warn_ignored(self, record: Record) -> None:
        logger.warning(
            "%s: checkpoint %s is ignored: a record that it builds on was deleted",
            self.store_id,
            record["checkpoint_id"],
        )

    def _take_writes(self, record: Record) -> bool:
        space = self.ensure_namespace(record["ns"])
        stored = space.writes[record["checkpoint_id"]]

        if record["checkpoint_id"] not in space.checkpoints:
            self.note_early_writes(record["ns"], record["checkpoint_id"])

        for index, channel, *data in record["writes"]:
            write = Write(
                record["task_id"], record["task_path"], index, channel, _data(data)
            )
            place = (write.task_id, index)

            # The first write at an index stays, except for errors, interrupts and
            # resumptions: they have fixed indices below 0, and the last one stays.
            if index < 0 or place not in stored:
                stored[place] = write

        return True

    def _take_hidden(self, record: Record) -> bool:
        for name, checkpoint_id in record["checkpoints"]:
            space = self.ensure_namespace(name)
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
    """Return about how many bytes a record counts for: its data, and an overhead.

    The overhead is there because reading a small record takes as long as reading some
    kilobytes of data.
    """
    size = _OVERHEAD + len(record.get("text", "")) + 40 * len(record.get("empty", ()))

    for plain in record.get("plain", {}).values():
        size += 60 + (len(plain) if type(plain) is str else 0)

    for data in _each_data(record):
        if isinstance(data[1], str):
            size += 100 + len(data[1])

    return size


def with_parts(record: Record, parts: list[str]) -> Record:
    """Put the texts that were stored as parts before the record into it."""
    used = 0

    for data in _each_data(record):
        if isinstance(count := data[1], int):
            data[1] = "".join(parts[used : used + count])
            used += count

    if used > len(parts):
        raise ValueError(f"{len(parts)} parts are stored before it, and not {used}")

    return record


def split(thread: Thread, record: Record, largest: int = LARGEST_TEXT) -> list[Record]:
    """Move texts longer than ``largest`` into parts; return them, then the record.

    The given record is not changed, so that it can be split again.
    """
    parts: list[Record] = []

    if any(len(data[1]) > largest for data in _each_data(record)):
        record = deepcopy(record)

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
    """Yield each list of a record whose item 1 is the text of serialized data.

    The caller may replace that item.
    """
    if "body" in record:
        yield record["body"]

    for value in record.get("values", {}).values():
        if "data" in value:
            yield value["data"]

    yield from record.get("loose", {}).values()

    for write in record.get("writes", ()):
        # Index and channel come first. The list is a copy, so it is written back.
        data = write[2:]
        yield data
        write[2:] = data


def _data(data: list[Any]) -> list[Any]:
    """Check the form of stored data, which is decoded when it is used."""
    # The type's name, the text, and perhaps how the text is packed.
    if not 2 <= len(data) <= 3 or {*map(type, data)} != {str}:
        raise ValueError(f"not serialized data: {str(data)[:80]}")

    return data
