"""A thread of LangGraph on its way from one store to another."""

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
from cpkit.integrations.langgraph.cache import Threads
from cpkit.integrations.langgraph.thread import Thread
from cpkit.memory import MemoryCheckpointer
from cpkit.protocol import Checkpointer
from cpkit.tools.importing.source import Brought, Differs, bring

__all__ = ["CheckpointThread", "Row", "Unreadable", "decoded"]

# What is packed as an object stays packed: no class is looked up, and what comes out
# is what went in.
SERDE = JsonPlusSerializer(
    pickle_fallback=False,
    allowed_msgpack_modules=None,
    __unpack_ext_hook__=ormsgpack.Ext,
)

Writes = dict[int, tuple[str, Any]]


class Unreadable(Exception):
    """The bytes of a checkpoint are none that may be read; the message says why."""


@dataclass(frozen=True)
class Row:
    """A checkpoint with its values, and what each task wrote to it, by place."""

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
        return SERDE.loads_typed((kind or "none", data or b""))
    except NotImplementedError:
        raise Unreadable(f"values stored as {kind!r} cannot be read") from None
    except Exception as exc:
        # Whatever a damaged value makes the parser raise.
        raise Unreadable(f"a value is damaged: {exc}") from exc


@dataclass(frozen=True)
class CheckpointThread:
    """One of LangGraph's threads, whole. Its size counts records of the store."""

    name: str
    thread_id: str
    source_id: str
    rows: list[Row]

    @classmethod
    def of(cls, name: str, source_id: str, rows: list[Row]) -> Self:
        """Take the rows, oldest first; raise `Unreadable` for what LangGraph changed.

        Before version 4 a checkpoint's sends stood with its parent's writes.
        """
        parents = {(row.ns, row.checkpoint_id): row for row in rows}

        for row in rows:
            parent = parents.get((row.ns, row.parent or ""))

            if parent is not None and row.body.get("v", 1) < 4 and _sends(parent):
                raise Unreadable(
                    "checkpoints of before version 4 with pending sends: let LangGraph "
                    "run the thread on first"
                )

        try:
            return cls(name, store_thread_id(source_id), source_id, rows)
        except InvalidId as exc:
            raise Unreadable(str(exc)) from None

    @property
    def size(self) -> int:
        return sum(1 + len(row.writes) for row in self.rows)

    async def bring(self, cp: Checkpointer[Any], *, dry_run: bool) -> Brought:
        _, written = await bring(cp, self.thread_id, self._missing, dry_run=dry_run)
        return Brought(self.size - written, written)

    async def _missing(self, there: list[Any]) -> list[Any]:
        """Return the records to append to those that are there.

        They are made in a store in memory, as `CheckpointSaver` writes them, and are
        read back before they are believed.
        """
        for whole in (False, True):
            async with MemoryCheckpointer[Any](max_payload=sys.maxsize) as scratch:
                await scratch.append(self.thread_id, there)
                rows = await self._fill(scratch, whole)

                if await self._reads_back(scratch, rows):
                    data = await scratch.load(self.thread_id)
                    return [] if data is None else data.messages[len(there) :]

        raise Differs("a checkpoint would read back different")

    async def _fill(self, scratch: MemoryCheckpointer[Any], whole: bool) -> list[Row]:
        """Write what is missing, and return those checkpoints.

        Values that a checkpoint's parent has are not written again, unless ``whole``:
        versions that are plain numbers are the same in two branches.
        """
        thread = await Threads(scratch, 1).read(self.source_id)
        saver = CheckpointSaver(scratch, serde=SERDE)
        missing = [row for row in self.rows if not _has(thread, row)]
        new = {(row.ns, row.checkpoint_id): row.body for row in self.rows}
        open_writes = [
            (row, task, writes)
            for row in self.rows
            for task, writes in row.writes.items()
            if not _has_writes(thread, row, task[0], writes)
        ]

        if (missing or open_writes) and self._has_more(thread):
            raise Differs("the thread has gone on in the store as well")

        for row in missing:
            versions = row.body["channel_versions"]
            parent = new.get((row.ns, row.parent or ""), {"channel_versions": {}})
            before = {} if whole else parent["channel_versions"]
            await saver.aput(
                self._config(row.ns, row.parent),
                row.body,  # type: ignore[arg-type]  # a TypedDict, as it was stored
                row.metadata,  # type: ignore[arg-type]  # likewise
                {c: v for c, v in versions.items() if before.get(c) != v},
            )

        for row, (task_id, task_path), writes in open_writes:
            await saver.aput_writes(
                self._config(row.ns, row.checkpoint_id),
                _in_place(writes),
                task_id,
                task_path,
            )

        return missing

    async def _reads_back(
        self, scratch: MemoryCheckpointer[Any], rows: Iterable[Row]
    ) -> bool:
        saver = CheckpointSaver(scratch, serde=SERDE)

        for row in rows:
            found = await saver.aget_tuple(self._config(row.ns, row.checkpoint_id))

            if found is None or _print(found.checkpoint) != _print(row.body):
                return False

        return True

    def _has_more(self, thread: Thread) -> bool:
        """Tell whether the store's thread has what the source has not."""
        rows = {(row.ns, row.checkpoint_id): row for row in self.rows}

        for ns, space in thread.namespaces.items():
            for checkpoint_id in space.checkpoints.keys() | space.writes.keys():
                if (row := rows.get((ns, checkpoint_id))) is None:
                    return True

                places = {(task[0], i) for task, w in row.writes.items() for i in w}

                if not space.writes.get(checkpoint_id, {}).keys() <= places:
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


def _has(thread: Thread, row: Row) -> bool:
    return row.checkpoint_id in thread.namespace(row.ns).checkpoints


def _has_writes(thread: Thread, row: Row, task_id: str, writes: Writes) -> bool:
    there = thread.namespace(row.ns).writes.get(row.checkpoint_id, {})
    return {(task_id, index) for index in writes} <= there.keys()


def _in_place(writes: Writes) -> list[tuple[str, Any]]:
    """Order a task's writes so that each gets its place again by being counted.

    Errors, interrupts and the like have places of their own, below 0, and left one open
    where they were counted.
    """
    special = [write for index, write in writes.items() if index < 0]
    last = max(writes)
    ordered = []

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


def _print(checkpoint: Any) -> dict[str, Any]:
    """Return a checkpoint as bytes by name; packed objects have no ``==``."""
    values = checkpoint["channel_values"]
    packed = {name: SERDE.dumps_typed(value) for name, value in values.items()}
    rest = {k: v for k, v in checkpoint.items() if k != "channel_values"}
    return {
        "values": packed,
        **{name: SERDE.dumps_typed(value) for name, value in rest.items()},
    }
