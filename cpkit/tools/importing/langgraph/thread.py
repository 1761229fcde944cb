"""One thread of LangGraph, read from its saver and written as cpkit's records."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import ormsgpack
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import TASKS

from cpkit.errors import InvalidId
from cpkit.integrations.langgraph import CheckpointSaver, store_thread_id
from cpkit.integrations.langgraph.records import View, new_thread
from cpkit.integrations.langgraph.threads import Threads
from cpkit.memory import MemoryCheckpointer
from cpkit.protocol import Checkpointer
from cpkit.tools.importing.source import Brought, Differs, bring

__all__ = ["CheckpointThread", "Row", "Unreadable", "checkpoint", "decoded"]

Writes = dict[int, tuple[str, Any]]

# Errors, interrupts and resumptions of one task that a saver may have replaced.
_MOST_GAPS = 1_000


class _PackedObjects:
    """LangGraph's serializer, except that packed objects stay packed.

    No class is looked up, and an object is written as the bytes that were read.
    """

    def __init__(self) -> None:
        self._serde = JsonPlusSerializer(
            pickle_fallback=False, allowed_msgpack_modules=None
        )

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        return self._serde.dumps_typed(obj)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        kind, body = data

        if kind != "msgpack":
            return self._serde.loads_typed(data)

        return ormsgpack.unpackb(
            body, ext_hook=ormsgpack.Ext, option=ormsgpack.OPT_NON_STR_KEYS
        )


_SERDE = _PackedObjects()


class Unreadable(Exception):
    """The bytes of a checkpoint cannot be read; the message says why."""


@dataclass(frozen=True)
class Row:
    """A checkpoint with its values, and the writes of each task by their index."""

    ns: str
    checkpoint_id: str
    parent: str | None
    body: dict[str, Any]
    metadata: dict[str, Any]
    writes: dict[tuple[str, str], Writes] = field(default_factory=dict)


def decoded(kind: str | None, data: bytes | None) -> Any:
    """Read stored bytes with LangGraph's serializer; raise `Unreadable`."""
    if kind == "pickle":
        raise Unreadable("pickled values are not read: they would run code")

    try:
        return _SERDE.loads_typed((kind or "none", data or b""))
    except NotImplementedError:
        raise Unreadable(f"values stored as {kind!r} cannot be read") from None
    except Exception as exc:
        # The parser may raise any type for a damaged value.
        raise Unreadable(f"a value is damaged: {exc}") from exc


def checkpoint(body: Any) -> dict[str, Any]:
    """Return what is a checkpoint; raise `Unreadable` for anything else."""
    if (
        isinstance(body, dict)
        and isinstance(body.get("v", 1), int)
        and isinstance(body.get("id"), str)
        and isinstance(body.get("channel_versions"), dict)
        and isinstance(body.get("channel_values") or {}, dict)
    ):
        return {**body, "channel_values": body.get("channel_values") or {}}

    raise Unreadable("a checkpoint is damaged: it lacks its id, versions or values")


@dataclass(frozen=True)
class CheckpointThread:
    """A complete thread of LangGraph. Its size counts records of the store."""

    name: str
    thread_id: str
    source_id: str
    rows: list[Row]

    @classmethod
    def of(cls, name: str, source_id: str, rows: list[Row]) -> Self:
        """Make a thread of its rows, oldest first.

        Raises `Unreadable` for pending sends from before version 4, which LangGraph
        stored with the parent's writes.
        """
        parents = {(row.ns, row.checkpoint_id): row for row in rows}

        for row in rows:
            parent = parents.get((row.ns, row.parent or ""))

            if parent is not None and row.body.get("v", 1) < 4 and _sends(parent):
                raise Unreadable(
                    "checkpoints from before version 4 with pending sends: continue "
                    "the thread with LangGraph first"
                )

        try:
            return cls(name, store_thread_id(source_id), source_id, rows)
        except InvalidId as exc:
            raise Unreadable(str(exc)) from None

    @property
    def size(self) -> int:
        return sum(1 + len(row.writes) for row in self.rows)

    async def bring(self, cp: Checkpointer[Any], *, dry_run: bool) -> Brought:
        extra = new_thread(self.source_id)
        counts = await bring(
            cp, self.thread_id, self._missing, dry_run=dry_run, extra=extra
        )
        return Brought(*counts)

    async def _missing(self, stored: list[Any]) -> list[Any]:
        """Return the records to append to those that the store has.

        `CheckpointSaver` writes them to a store in memory. They are used only if the
        saver reads the same checkpoints back.
        """
        for complete in (False, True):
            async with MemoryCheckpointer[Any](
                max_payload=sys.maxsize, max_append=sys.maxsize
            ) as scratch:
                await scratch.append(self.thread_id, stored)
                rows = await self._fill(scratch, complete)

                if await self._reads_back(scratch, rows):
                    data = await scratch.load(self.thread_id)
                    return [] if data is None else data.messages[len(stored) :]

        raise Differs("a checkpoint would read back different")

    async def _fill(
        self, scratch: MemoryCheckpointer[Any], complete: bool
    ) -> list[Row]:
        """Write the missing checkpoints and writes; return those checkpoints.

        A value that the checkpoint's parent has at the same version is not written
        again, unless ``complete``: two branches may use one version number for
        different values.
        """
        view = await Threads(scratch, 1).window(self.thread_id, lambda _: 0)
        saver = CheckpointSaver(scratch, serde=_SERDE)
        missing = [row for row in self.rows if not _has(view, row)]
        new = {(row.ns, row.checkpoint_id): row.body for row in self.rows}
        missing_writes = [
            (row, task, writes)
            for row in self.rows
            for task, writes in row.writes.items()
            if not _has_writes(view, row, task[0], writes)
        ]

        if (missing or missing_writes) and self._store_has_more(view):
            raise Differs("the thread has gone on in the store as well")

        for row in missing:
            versions = row.body["channel_versions"]
            parent = new.get((row.ns, row.parent or ""), {"channel_versions": {}})
            before = {} if complete else parent["channel_versions"]
            await saver.aput(
                self._config(row.ns, row.parent),
                row.body,  # type: ignore[arg-type]  # a TypedDict, as it was stored
                row.metadata,  # type: ignore[arg-type]  # likewise
                {c: v for c, v in versions.items() if before.get(c) != v},
            )

        for row, (task_id, task_path), writes in missing_writes:
            await saver.aput_writes(
                self._config(row.ns, row.checkpoint_id),
                _in_order(writes),
                task_id,
                task_path,
            )

        return missing

    async def _reads_back(
        self, scratch: MemoryCheckpointer[Any], rows: Iterable[Row]
    ) -> bool:
        saver = CheckpointSaver(scratch, serde=_SERDE)

        for row in rows:
            found = await saver.aget_tuple(self._config(row.ns, row.checkpoint_id))

            if found is None or _packed(found.checkpoint) != _packed(row.body):
                return False

        return True

    def _store_has_more(self, view: View) -> bool:
        """Return whether the store's thread has something that the source lacks."""
        rows = {(row.ns, row.checkpoint_id): row for row in self.rows}

        for ns, space in view.spaces.items():
            for checkpoint_id in space.checkpoints.keys() | space.writes.keys():
                if (row := rows.get((ns, checkpoint_id))) is None:
                    return True

                places = {(task[0], i) for task, w in row.writes.items() for i in w}

                if not _places(view, ns, checkpoint_id) <= places:
                    return True

        return False

    def _config(self, ns: str, checkpoint_id: str | None) -> RunnableConfig:
        return {
            "configurable": {
                "thread_id": self.source_id,
                "checkpoint_ns": ns,
                "checkpoint_id": checkpoint_id,
            }
        }


def _has(view: View, row: Row) -> bool:
    return row.checkpoint_id in view.space(row.ns).checkpoints


def _has_writes(view: View, row: Row, task_id: str, writes: Writes) -> bool:
    stored = _places(view, row.ns, row.checkpoint_id)
    return {(task_id, index) for index in writes} <= stored


def _places(view: View, ns: str, checkpoint_id: str) -> set[tuple[str, int]]:
    """Return task and index of each write that the store has of a checkpoint."""
    records = view.space(ns).writes.get(checkpoint_id, ())
    return {
        (record["task_id"], index)
        for _, record in records
        for index, *_ in record["writes"]
    }


def _in_order(writes: Writes) -> list[tuple[str, Any]]:
    """Order a task's writes so that a saver gives each its own index again.

    A saver numbers writes by their position. Errors, interrupts and resumptions take a
    position too, but are stored under fixed indices below 0, which leaves a gap.
    """
    special = [write for index, write in writes.items() if index < 0]
    last = max(writes)
    ordered = []

    # A damaged index would fill the memory.
    if last - len(writes) > _MOST_GAPS:
        raise Differs("a task's writes are not complete")

    for index in range(last + 1):
        if index not in writes and not special:
            raise Differs("a task's writes are not complete")

        ordered.append(writes[index] if index in writes else special[0])

    return [*ordered, *special]


def _sends(row: Row) -> bool:
    return any(
        channel == TASKS
        for writes in row.writes.values()
        for channel, _ in writes.values()
    )


def _packed(value: Any) -> Any:
    """Return a form of a value that can be compared: packed objects have no ``==``.

    The order of a mapping's items and of a set's does not count, and 1, 1.0 and True
    are different.
    """
    if isinstance(value, dict):
        return {_SERDE.dumps_typed(key): _packed(one) for key, one in value.items()}

    if isinstance(value, list | tuple):
        return [*map(_packed, value)]

    if isinstance(value, ormsgpack.Ext):
        return ormsgpack.unpackb(
            ormsgpack.packb(value), ext_hook=_opened, option=ormsgpack.OPT_NON_STR_KEYS
        )

    return _SERDE.dumps_typed(value)


def _opened(tag: int, data: bytes) -> Any:
    """Return what is in a packed object, which is never built."""
    try:
        inner = _SERDE.loads_typed(("msgpack", data))
    except Exception:  # the parser may raise any type
        return [tag, data]

    match inner:
        case ["builtins", "set" | "frozenset" as name, list(items)]:
            return [name, *sorted(map(_packed, items), key=repr)]

    return [tag, _packed(inner)]
