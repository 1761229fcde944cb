"""Checkpoints that were found in a thread, and the search for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple, get_checkpoint_id
from langgraph.checkpoint.serde.base import SerializerProtocol

from cpkit.integrations.langgraph.stored import Stored, Write
from cpkit.integrations.langgraph.thread import Thread
from cpkit.integrations.langgraph.values import Value, from_json

__all__ = [
    "Filter",
    "Found",
    "config_for",
    "is_certain",
    "matching",
    "metadata_of",
    "namespace_in",
    "newest_of",
]

Filter = dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot of a checkpoint and its writes; any thread may call `load`."""

    thread_id: str | None
    ns: str
    checkpoint_id: str
    stored: Stored
    parent: str | None
    writes: list[Write]

    @classmethod
    def at(cls, thread: Thread, ns: str, checkpoint: tuple[str, Stored]) -> Found:
        checkpoint_id, stored = checkpoint
        space = thread.namespace(ns)
        return cls(
            thread.thread_id,
            ns,
            checkpoint_id,
            stored,
            None if stored.parent in space.hidden else stored.parent,
            space.writes_of(checkpoint_id),
        )

    def load(self, serde: SerializerProtocol) -> CheckpointTuple:
        """Build LangGraph's tuple, which shares no object with another result."""
        body, metadata = serde.loads_typed(from_json(self.stored.body))
        checkpoint: Any = {
            **body,
            "channel_versions": dict(self.stored.versions),
            "channel_values": {
                channel: value.load(serde) if type(value) is Value else value
                for channel, value in self.stored.values.items()
            },
        }
        return CheckpointTuple(
            config_for(self.thread_id, self.ns, self.checkpoint_id),
            checkpoint,
            metadata,
            config_for(self.thread_id, self.ns, self.parent) if self.parent else None,
            [
                (
                    write.task_id,
                    write.channel,
                    serde.loads_typed(from_json(write.data)),
                )
                for write in self.writes
            ],
        )


def matching(
    thread: Thread,
    config: RunnableConfig | None,
    filter: Filter,
    before: RunnableConfig | None,
    limit: int | None,
    serde: SerializerProtocol,
) -> list[Found]:
    """Return the thread's checkpoints that match, newest first."""
    wanted = config["configurable"] if config else {}
    ns = wanted.get("checkpoint_ns")
    checkpoint_id = wanted.get("checkpoint_id")
    end = get_checkpoint_id(before) if before else None
    found = [
        Found.at(thread, name, checkpoint)
        for name, space in thread.namespaces.items()
        if ns is None or name == ns
        for checkpoint in space.visible()
        if not checkpoint_id or checkpoint[0] == checkpoint_id
        if not end or checkpoint[0] < end
        if not filter or _has_metadata(checkpoint[1], filter, serde)
    ]
    return newest_of(found, limit)


def newest_of(found: list[Found], limit: int | None) -> list[Found]:
    """Return the newest of these checkpoints, newest first."""
    found.sort(key=lambda one: one.checkpoint_id, reverse=True)
    return found if limit is None else found[: max(limit, 0)]


def is_certain(
    thread: Thread, ns: str | None, found: list[Found], limit: int | None
) -> bool:
    """Return whether a window has the checkpoints that a reader of all would find.

    Every checkpoint before the window has an id of at most ``above``.
    """
    if limit is None or len(found) < limit or thread.above is None:
        return False

    above = thread.above[ns is None]
    return all(
        one.checkpoint_id >= above
        and one.stored.is_complete
        and "" < thread.namespace(one.ns).first_full <= one.checkpoint_id
        for one in found
    )


def namespace_in(config: RunnableConfig) -> str:
    """Return the namespace that the config names."""
    ns: str = config["configurable"].get("checkpoint_ns", "")
    return ns


def config_for(thread_id: object, ns: str, checkpoint_id: str | None) -> RunnableConfig:
    """Return the config that names a checkpoint."""
    return {
        "configurable": {
            "thread_id": thread_id,
            "checkpoint_ns": ns,
            "checkpoint_id": checkpoint_id,
        }
    }


def metadata_of(stored: Stored, serde: SerializerProtocol) -> Any:
    """Return the metadata of a checkpoint."""
    return serde.loads_typed(from_json(stored.body))[1]


def _has_metadata(
    stored: Stored, filter: dict[str, Any], serde: SerializerProtocol
) -> bool:
    metadata = metadata_of(stored, serde)
    return all(_item(metadata, key) == value for key, value in filter.items())


def _item(metadata: Any, key: str) -> Any:
    """Return the item of this key, or of this path of keys with dots between them."""
    if key in metadata:
        return metadata[key]

    for name in key.split("."):
        metadata = metadata.get(name) if isinstance(metadata, dict) else None

    return metadata
