"""What a thread of the store holds, and the checkpoints that result from it.

A thread of LangGraph, with all its namespaces, is one thread of the store. Its extra
has ``thread``: LangGraph's thread id (``name``) and a random ``id``, which is another
one after the thread was deleted and begun again; and ``owner``, the token of the run
that claimed the thread last.

Each message is a record with a ``type``, and all but blobs have a ``size``, about the
length of the texts in it:

``checkpoint``
    Its namespace (``ns``), ``checkpoint_id`` and ``parent``. ``head`` is the entry of
    the checkpoint without its values, and its metadata; `values` describes entries. A
    ``whole`` checkpoint has all ``versions`` and ``values``. Any other one has those
    that differ from its parent's, and ``gone`` names the channels whose values are not
    there any more.
``writes``
    What one task wrote to a checkpoint: ``task_id``, ``task_path``, and a list of
    index, channel and entry. It may stand before its checkpoint.
``blob``
    A long text (``text``), to which later records refer by its ``id``. The value that
    a task wrote often becomes the channel's; then both entries name the same blobs.
``hidden``
    Ids of checkpoints that were pruned, or deleted with their run.
``owner``
    A run has claimed the thread: the version moves, so that a stale run's append fails.
``begin``
    No record ``before`` this position counts any more: what is kept was stored again
    after it. So no later record names an earlier one, and these are trimmed.

The checkpoint that was appended last is the newest, whatever the clocks say. Of two
with one id the last counts. Every append expects the version that its writer has read
up to. So a writer knows each position, and says in ``start`` where a reader of the
checkpoint must begin: at the first record of its chain of parents up to a whole one,
of the blobs that they name, or of writes that stand before their checkpoint.

So the rule for a *window*, the end of a thread: a checkpoint whose ``start`` is in the
window is complete, with its writes. A checkpoint whose parent is missing although its
``start`` is there was meant for a thread that was deleted meanwhile; it is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import uuid4

from langgraph.checkpoint.base import ChannelVersions, writes_sort_key
from langgraph.checkpoint.serde.base import SerializerProtocol

from cpkit.errors import CorruptThread
from cpkit.integrations.langgraph.names import PLAIN
from cpkit.integrations.langgraph.values import value_of

__all__ = ["Namespace", "Record", "Stored", "View", "Write", "new_thread", "weight_of"]

Record: TypeAlias = dict[str, Any]

State: TypeAlias = tuple[ChannelVersions, dict[str, Any]]
"""The versions and the values of channels: a `Value`, or JSON."""

Write: TypeAlias = tuple[str, str, Any]
"""A task's id, the channel that it wrote to, and the value: a `Value`, or JSON."""

# Reading a small record takes as long as reading some kilobytes of text.
_OVERHEAD = 4096

# How much farther back to read for what was not found.
_GROWTH = 4

_DAMAGE = (AttributeError, LookupError, TypeError, ValueError)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Stored:
    """A checkpoint as the thread has it, and the view that has its blobs.

    ``base`` is its parent, unless the record is whole. ``begun`` is the weight of the
    records of the view up to the last whole checkpoint. ``cached`` is its state, which
    is built again without it.
    """

    view: View
    record: Record
    position: int
    base: Stored | None
    begun: int
    cached: State | None = None

    @property
    def id(self) -> str:
        checkpoint_id: str = self.record["checkpoint_id"]
        return checkpoint_id

    @property
    def start(self) -> int:
        start: int = self.record["start"]
        return start

    @property
    def state(self) -> State:
        """The versions and the values of all channels."""
        self.cached = state = self.cached or self.build()
        return state

    def build(self) -> State:
        """Build the versions and the values of all channels; any thread may do it."""
        chain = [self]
        known = None

        while (base := chain[-1].base) is not None:
            if (known := base.cached) is not None:
                break

            chain.append(base)

        versions, values = map(dict, known or ({}, {}))

        with self.view.checked(self.position):
            for one in reversed(chain):
                versions.update(one.record["versions"])

                for channel in one.record["gone"]:
                    values.pop(channel, None)

                for channel, entry in one.record["values"].items():
                    if type(entry) is list:
                        entry = value_of(entry, self.view.blobs, values.get(channel))

                    values[channel] = entry

        return versions, values

    def head(self, serde: SerializerProtocol) -> Any:
        """Load the checkpoint without its values, and its metadata."""
        with self.view.checked(self.position):
            value = value_of(self.record["head"], self.view.blobs)

        return value.load(serde)


@dataclass(slots=True)
class Namespace:
    """The checkpoints of a graph or of one subgraph, oldest first, and their writes.

    ``hint`` is the ``start`` of the newest record.
    """

    checkpoints: dict[str, Stored] = field(default_factory=dict)
    writes: dict[str, list[tuple[int, Record]]] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    hint: int = 0

    def visible(self) -> Iterator[Stored]:
        """Yield the checkpoints that are not hidden, newest first."""
        for checkpoint_id, stored in reversed(self.checkpoints.items()):
            if checkpoint_id not in self.hidden:
                yield stored


class View:
    """The records of a thread from the position ``first`` to its ``version``.

    ``weight`` is about how many characters they have, with an overhead for each.
    ``positions`` has those of blobs by id, and the first of the writes of a checkpoint
    by namespace and id. ``names`` has all namespaces of the thread, if a reader had to
    look for one in all records. No record before the position ``begin`` counts.
    """

    def __init__(
        self,
        store_id: str,
        extra: Mapping[str, Any] | None = None,
        records: Sequence[Record] = (),
        version: int = 0,
    ) -> None:
        self.store_id = store_id
        self.extra = extra or {}
        self.records: list[Record] = []
        self.first = version - len(records)
        self.begin = 0
        self.weight = 0
        self.spaces: dict[str, Namespace] = {}
        self.blobs: dict[str, str] = {}
        self.positions: dict[object, int] = {}
        self.names: set[str] | None = None
        self.extend(records)

    @property
    def version(self) -> int:
        return self.first + len(self.records)

    @property
    def thread_id(self) -> str:
        """LangGraph's id of the thread."""
        match self.extra:
            case {"thread": {"name": str(name)}}:
                return name

        return self.store_id.removeprefix(PLAIN)

    def is_of(self, extra: Mapping[str, Any]) -> bool:
        """Return whether this is the extra of the same thread, not of a later one."""
        return bool(extra.get("thread") == self.extra.get("thread"))

    def space(self, ns: str) -> Namespace:
        """Return a namespace; an empty one, which is not kept, if it is unknown."""
        return self.spaces.get(ns) or Namespace()

    def find(self, ns: str, checkpoint_id: str | None = None) -> Stored | None:
        """Return this checkpoint, or the newest, unless it is missing or hidden."""
        space = self.space(ns)

        if not checkpoint_id:
            return next(space.visible(), None)

        hidden = checkpoint_id in space.hidden
        return None if hidden else space.checkpoints.get(checkpoint_id)

    def complete(self, ns: str, checkpoint_id: str | None) -> Stored | None:
        """Return this checkpoint if the view has all that it needs, hidden or not."""
        stored = self.space(ns).checkpoints.get(checkpoint_id or "")
        return stored if stored is not None and stored.start >= self.first else None

    def reach(self, ns: str, checkpoint_id: str | None = None) -> int:
        """Return where a view must begin to have this checkpoint, or the newest."""
        if (stored := self.find(ns, checkpoint_id)) is not None:
            return stored.start

        if ns not in self.spaces:
            is_unknown = self.names is None or ns in self.names
            return self.farther() if is_unknown else self.first

        # The newest checkpoint stands before these writes of its tasks.
        return min(self.spaces[ns].hint, self.farther())

    def farther(self) -> int:
        """Return where to begin to look for what the view does not have."""
        size = self.version - self.first
        return max(self.begin, self.first - _GROWTH * size - 1)

    def writes_of(self, ns: str, checkpoint_id: str) -> list[Write]:
        """Return the writes to a checkpoint, in the order of application.

        The first write at an index stays, except for errors, interrupts and
        resumptions: they have fixed indices below 0, and the last one stays.
        """
        found: dict[tuple[str, int], tuple[str, Write]] = {}

        for position, record in self.space(ns).writes.get(checkpoint_id, ()):
            with self.checked(position):
                task_id, path = record["task_id"], record["task_path"]

                for index, channel, entry in record["writes"]:
                    if index < 0 or (task_id, index) not in found:
                        write = task_id, channel, value_of(entry, self.blobs)
                        found[task_id, index] = path, write

        places = sorted(found, key=lambda one: writes_sort_key(found[one][0], *one))
        return [found[place][1] for place in places]

    def extend(self, records: Sequence[Record]) -> None:
        """Add the next records; raise ``CorruptThread`` if a message is not one."""
        with self.checked():
            for record in records:
                self._take(record)
                self.weight += weight_of(record)
                self.records.append(record)

    @contextmanager
    def checked(self, position: int | None = None) -> Iterator[None]:
        """Raise ``CorruptThread`` if the record has another form; without a position,
        that which is added next."""
        try:
            yield
        except _DAMAGE as exc:
            raise CorruptThread(
                self.store_id,
                f"message {self.version if position is None else position}",
                f"not a LangGraph record that this version of cpkit knows: {exc!r}",
            ) from exc

    def _take(self, record: Record) -> None:
        match record["type"]:
            case "checkpoint":
                self._take_checkpoint(record)
            case "writes":
                self._take_writes(record)
            case "blob":
                self.blobs[record["id"]] = record["text"]
                self.positions[record["id"]] = self.version
            case "hidden":
                for ns, checkpoint_id in record["checkpoints"]:
                    space = self.spaces.setdefault(ns, Namespace())
                    space.hidden.add(checkpoint_id)
            case "begin":
                self._begin_at(record["before"])
            case "owner":
                return  # extra names it
            case kind:
                raise ValueError(f"a record of the type {kind!r:.40}")

    def _begin_at(self, begin: int) -> None:
        self.begin = begin
        self.positions = {n: at for n, at in self.positions.items() if at >= begin}

        for space in self.spaces.values():
            space.checkpoints = {
                one.id: one for one in space.checkpoints.values() if one.start >= begin
            }
            space.writes = {
                checkpoint_id: kept
                for checkpoint_id, writes in space.writes.items()
                if (kept := [one for one in writes if one[1]["start"] >= begin])
            }

    def _take_checkpoint(self, record: Record) -> None:
        space = self.spaces.setdefault(record["ns"], Namespace())
        space.hint = record["start"]
        base = None

        if not record["whole"]:
            base = space.checkpoints.get(record["parent"])

            if base is None and space.hint >= self.first:
                logger.warning(
                    "%s: checkpoint %s is ignored: its parent was deleted",
                    self.store_id,
                    record["checkpoint_id"],
                )
                return

        begun = base.begun if base else self.weight + weight_of(record)
        checkpoint_id = record["checkpoint_id"]
        space.checkpoints.pop(checkpoint_id, None)
        space.checkpoints[checkpoint_id] = Stored(
            self, record, self.version, base, begun
        )
        space.hidden.discard(checkpoint_id)

    def _take_writes(self, record: Record) -> None:
        ns, checkpoint_id = record["ns"], record["checkpoint_id"]
        space = self.spaces.setdefault(ns, Namespace())
        space.hint = record["start"]
        writes = space.writes.setdefault(checkpoint_id, [])
        writes.append((self.version, record))
        self.positions.setdefault((ns, checkpoint_id), record["start"])


def new_thread(name: str) -> dict[str, Any]:
    """Return the extra of a new thread."""
    return {"thread": {"id": uuid4().hex, "name": name}}


def weight_of(record: Record) -> int:
    """Return about how much a reader pays for a record, in characters."""
    size: int = len(record["text"]) if record["type"] == "blob" else record["size"]
    return _OVERHEAD + size
