"""The records that a saver appends: a checkpoint, and the writes of a task."""

from __future__ import annotations

from collections.abc import Sequence
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

from cpkit.integrations.langgraph.found import namespace_in
from cpkit.integrations.langgraph.thread import (
    Namespace,
    Record,
    Thread,
    new_record,
)
from cpkit.integrations.langgraph.values import (
    EMPTY,
    Known,
    fingerprints_of,
    is_plain,
    tail_start,
    to_json,
)

__all__ = ["Composer"]

# A full checkpoint is stored when the records since the last one have more bytes than
# the state, and more than this.
_FULL_FROM = 32 * 1024

# Fewer versions are stored with every checkpoint.
_MANY_CHANNELS = 8

# A checkpoint is also stored with all its values if this adds few bytes.
_SMALL_REST = 512


class Composer:
    """Makes records with the values that a thread does not have yet."""

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde
        # Another serializer may encrypt.
        self._stores_plain = isinstance(serde, JsonPlusSerializer)

    def checkpoint(
        self,
        thread: Thread,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
        is_full: bool = False,
    ) -> tuple[Record, dict[tuple[str, str], Known]]:
        """Return the record of a checkpoint, and the lists that it stores.

        It is full if the caller says so, if it is time, and if that adds little.
        """
        ns = namespace_in(config)
        space = thread.namespace(ns)
        may_be_full = not is_full and _may_be_full(thread, ns, checkpoint, new_versions)
        is_full = is_full or (may_be_full and _is_full_due(thread.bytes_seen, space))
        body: dict[str, Any] = dict(checkpoint)
        values = body.pop("channel_values")
        versions = body.pop("channel_versions")
        record = new_record(
            thread,
            "checkpoint",
            ns=ns,
            checkpoint_id=checkpoint["id"],
            parent=config["configurable"].get("checkpoint_id"),
            checkpoint=to_json(self._serde.dumps_typed(body)),
            metadata=to_json(
                self._serde.dumps_typed(get_checkpoint_metadata(config, metadata))
            ),
            versions=versions,
            values={},
            plain={},
            empty=[],
        )
        known: dict[tuple[str, str], Known] = {}

        for channel, version in (versions if is_full else new_versions).items():
            is_named = versions.get(channel) == version

            if channel not in values:
                if is_named:
                    record["empty"].append(channel)
                else:
                    empty = {"version": version, "data": to_json(EMPTY)}
                    record["values"][channel] = empty

                continue

            if is_named and self._stores_plain and is_plain(values[channel]):
                record["plain"][channel] = values[channel]
                continue

            before = thread.known.get((ns, channel))
            fingerprints = fingerprints_of(values[channel])
            keep = 0

            # A full checkpoint builds on no earlier record.
            if not is_full and before is not None and fingerprints is not None:
                keep = tail_start(before.load(self._serde) or [], fingerprints)

            tail = values[channel][keep:] if keep else values[channel]
            data = to_json(self._serde.dumps_typed(tail))
            entry: dict[str, Any] = {"version": version, "data": data}

            if keep and before is not None:
                entry |= {"base": before.record_id, "keep": keep}

            record["values"][channel] = entry

            if fingerprints is not None:
                known[ns, channel] = Known(record["id"], fingerprints)

        # LangGraph's own savers keep a value without a version in its checkpoint.
        if loose := values.keys() - versions.keys():
            record["loose"] = {
                channel: to_json(self._serde.dumps_typed(values[channel]))
                for channel in loose
            }

        if (
            may_be_full
            and not is_full
            and self._stores_plain
            and not any("base" in entry for entry in record["values"].values())
            and (rest := _plain_rest(checkpoint, new_versions)) is not None
        ):
            is_full = True
            record["plain"] |= rest
            record["empty"] += versions.keys() - values.keys() - new_versions.keys()

        if is_full:
            own = checkpoint["id"]
            record["newest"] = space.newest if space.newest > own else ""
            record["top"] = thread.top if thread.top > own else ""
        else:
            self._shorten(thread, record, versions, new_versions)

            if space.full_count:
                record["back"] = thread.seen - space.full_count + 1

        return record, known

    def _shorten(
        self,
        thread: Thread,
        record: Record,
        versions: ChannelVersions,
        new_versions: ChannelVersions,
    ) -> None:
        """Leave out the versions that the parent has too, if they are many."""
        before = thread.versions_of(record["ns"], record["parent"])

        if len(before) >= _MANY_CHANNELS and before.keys() <= versions.keys():
            del record["versions"]
            record["new_versions"] = {
                channel: version
                for channel, version in versions.items()
                if channel in new_versions or before.get(channel) != version
            }

    def writes(
        self,
        thread: Thread,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str,
    ) -> Record:
        """Return the record of a task's writes."""
        return new_record(
            thread,
            "writes",
            ns=namespace_in(config),
            checkpoint_id=config["configurable"]["checkpoint_id"],
            task_id=task_id,
            task_path=task_path,
            writes=[
                [
                    WRITES_IDX_MAP.get(channel, index),
                    channel,
                    *to_json(self._serde.dumps_typed(value)),
                ]
                for index, (channel, value) in enumerate(writes)
            ],
        )


def _is_full_due(bytes_seen: int, space: Namespace) -> bool:
    """Return whether much was stored since the last full checkpoint."""
    return bytes_seen - space.full_at >= max(_FULL_FROM, space.full_size)


def _may_be_full(
    thread: Thread, ns: str, checkpoint: Checkpoint, new_versions: ChannelVersions
) -> bool:
    """Return whether a checkpoint can be stored with all its values."""
    # A write of this checkpoint may stand before it.
    if thread.first_id is None or (ns, checkpoint["id"]) in thread.written:
        return False

    # A channel without a value may have one in the store, as delta channels do.
    return all(
        channel in checkpoint["channel_values"]
        or channel in new_versions
        or thread.empty.get((ns, channel)) == version
        for channel, version in checkpoint["channel_versions"].items()
    )


def _plain_rest(
    checkpoint: Checkpoint, new_versions: ChannelVersions
) -> dict[str, Any] | None:
    """Return the values that are not new, or ``None`` if they are not small."""
    values, versions = checkpoint["channel_values"], checkpoint["channel_versions"]
    rest: dict[str, Any] = {}
    size = 0

    for channel in versions.keys() & values.keys() - new_versions.keys():
        value = rest[channel] = values[channel]

        if not is_plain(value):
            return None

        size += 50 + len(str(value))

        if size > _SMALL_REST:
            return None

    return rest
