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
from cpkit.integrations.langgraph.serializer import DefaultSerializer
from cpkit.integrations.langgraph.stored import Draft, Offer, Record
from cpkit.integrations.langgraph.thread import (
    LARGEST_TEXT,
    Namespace,
    Thread,
    new_record,
)
from cpkit.integrations.langgraph.values import (
    EMPTY,
    Known,
    Typed,
    Value,
    fingerprints_of,
    is_plain,
    tail_start,
    to_json,
)

__all__ = ["Composer"]

# A full checkpoint is stored when the records since the last one have more bytes than
# half of the state, and more than this. The first read of a process loads the full
# checkpoint and the records after it.
_FULL_FROM = 32 * 1024

# With fewer channels, every checkpoint has all versions.
_MANY_CHANNELS = 8

# The least bytes of a write to which a checkpoint refers.
_OFFERED_FROM = 128

# A checkpoint is also stored with all its values if this adds few bytes.
_SMALL_REST = 512


class Composer:
    """Makes records with the values that a thread does not have yet."""

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde
        # Another serializer, also one derived from these, may encrypt.
        self._stores_plain = type(serde) in (JsonPlusSerializer, DefaultSerializer)

    def checkpoint(
        self,
        thread: Thread,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
        is_full: bool = False,
    ) -> tuple[Draft, dict[tuple[str, str], Known]]:
        """Return the record of a checkpoint, and the lists that it stores.

        The record is full if any of these is true: the caller asks for it, many bytes
        were stored since the last full one, or the values that are not new are small.
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
            body=to_json(
                self._serde.dumps_typed(
                    [body, get_checkpoint_metadata(config, metadata)]
                )
            ),
            versions=versions,
            values={},
            plain={},
            empty=[],
        )
        draft = Draft(record)
        offers = thread.take_offers(ns, record["parent"])
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

            value = values[channel]
            offered = offers.get(channel, ())

            # If a task wrote the value, refer to the write. That saves comparing it
            # with the list before.
            if any(
                type(value) is not list or one.length == len(value) for one in offered
            ):
                typed = self._serde.dumps_typed(value)

                if offer := _offered(offered, typed):
                    draft.refers.append((channel, offer))
                    entry = {"version": version, "data": offer.data}
                    record["values"][channel] = entry

                    if offer.length:
                        written = Value(record["id"], offer.data)
                        known[ns, channel] = Known(record["id"], value=written)

                    continue

            before = thread.known.get((ns, channel))
            fingerprints = fingerprints_of(value)
            keep = 0

            # A full checkpoint builds on no earlier record.
            if not is_full and before is not None and fingerprints is not None:
                keep = tail_start(before.load(self._serde) or [], fingerprints)

            typed = self._serde.dumps_typed(value[keep:] if keep else value)
            entry = {"version": version}

            if offer := _offered(offered, typed):
                draft.refers.append((channel, offer))
                entry["data"] = offer.data
            else:
                entry["data"] = to_json(typed)

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
            thread.set_higher_ids(record)
        else:
            self._shorten(thread, record, versions, new_versions)

        return draft, known

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
            differ = dict(versions.items() - before.items())
            named = {one: versions[one] for one in new_versions if one in versions}
            record["new_versions"] = differ | named

    def writes(
        self,
        thread: Thread,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str,
    ) -> Draft:
        """Return the record of a task's writes, and offer them to a checkpoint."""
        record = new_record(
            thread,
            "writes",
            ns=namespace_in(config),
            checkpoint_id=config["configurable"]["checkpoint_id"],
            task_id=task_id,
            task_path=task_path,
            writes=[],
        )
        offers: dict[str, Offer] = {}

        for index, (channel, value) in enumerate(writes):
            typed = self._serde.dumps_typed(value)
            data = to_json(typed)
            record["writes"].append(
                [WRITES_IDX_MAP.get(channel, index), channel, *data]
            )

            if _OFFERED_FROM <= len(typed[1]) <= LARGEST_TEXT // 2:
                length = len(value) if type(value) is list else None
                offers[channel] = Offer(record["id"], index, typed, data, length)

        thread.offer(record["ns"], record["checkpoint_id"], offers)
        return Draft(record, offers=[*offers.values()])


def _offered(offers: Sequence[Offer], typed: Typed) -> Offer | None:
    """Return the offer of this value, if there is one."""
    return next((offer for offer in offers if offer.typed == typed), None)


def _is_full_due(bytes_seen: int, space: Namespace) -> bool:
    """Return whether much was stored since the last full checkpoint."""
    return bytes_seen - space.full_at >= max(_FULL_FROM, space.full_size // 2)


def _may_be_full(
    thread: Thread, ns: str, checkpoint: Checkpoint, new_versions: ChannelVersions
) -> bool:
    """Return whether a checkpoint can be stored with all its values."""
    # Writes of this checkpoint or of a later one may be stored already: a reader that
    # begins here would miss them.
    if thread.first_id is None or thread.early_writes.get(ns, "") >= checkpoint["id"]:
        return False

    versions = checkpoint["channel_versions"]
    without = (
        versions.keys() - checkpoint["channel_values"].keys() - new_versions.keys()
    )

    # A channel without a value may have one in the store, as delta channels do.
    return all(thread.empty.get((ns, one)) == versions[one] for one in without)


def _plain_rest(
    checkpoint: Checkpoint, new_versions: ChannelVersions
) -> dict[str, Any] | None:
    """Return the values that are not new, or ``None`` if they are not small."""
    values, versions = checkpoint["channel_values"], checkpoint["channel_versions"]
    rest: dict[str, Any] = {}
    size = 0

    if 50 * (len(values) - len(new_versions)) > _SMALL_REST:
        return None

    for channel in versions.keys() & values.keys() - new_versions.keys():
        value = rest[channel] = values[channel]

        if not is_plain(value):
            return None

        size += 50 + len(str(value))

        if size > _SMALL_REST:
            return None

    return rest
