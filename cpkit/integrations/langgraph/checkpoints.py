"""Checkpoints in a store: writing, finding, copying and hiding them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from cpkit.errors import VersionConflict
from cpkit.integrations.langgraph.cache import Threads
from cpkit.integrations.langgraph.errors import NotOwner, Unsupported
from cpkit.integrations.langgraph.found import (
    Filter,
    Found,
    config_for,
    matching,
    namespace_in,
)
from cpkit.integrations.langgraph.names import OWNER, thread_id_in
from cpkit.integrations.langgraph.thread import (
    Namespace,
    Record,
    Stored,
    Thread,
    new_record,
    record_size,
    split,
)
from cpkit.integrations.langgraph.values import (
    EMPTY,
    Known,
    fingerprints_of,
    from_json,
    is_plain,
    tail_start,
    to_json,
)
from cpkit.protocol import ErasesThreads

__all__ = ["Checkpoints"]


# A message has at most 16 MiB. Base64 text of this length fits, with the rest.
_LARGEST_TEXT = 8 * 1024 * 1024

# A full checkpoint is stored when the records since the last one have more bytes than
# the state, and more than this.
_FULL_FROM = 32 * 1024


class Checkpoints:
    """The checkpoints in a store. Use it only on the store's event loop."""

    def __init__(self, threads: Threads, serde: SerializerProtocol) -> None:
        self._threads = threads
        self._serde = serde
        # Another serializer may encrypt.
        self._stores_plain = isinstance(serde, JsonPlusSerializer)

    async def get(self, config: RunnableConfig) -> CheckpointTuple | None:
        thread_id, ns = config["configurable"]["thread_id"], namespace_in(config)
        wanted = get_checkpoint_id(config)
        thread = await self._threads.read_newest(thread_id, ns)
        checkpoint = thread.namespace(ns).get(wanted)

        if thread.start and not _is_certain(thread.namespace(ns), wanted, checkpoint):
            thread = await self._threads.read(thread_id)
            checkpoint = thread.namespace(ns).get(wanted)

        if checkpoint is None:
            return None

        found = Found.at(thread, ns, checkpoint).load(self._serde)

        # If the run appends to these lists, only the new items are stored.
        for channel, value in checkpoint[1].values.items():
            known = thread.known.get((ns, channel))

            if known is None or known.record_id != value.record_id:
                loaded = found.checkpoint["channel_values"][channel]
                fingerprints = fingerprints_of(loaded)

                if fingerprints is not None:
                    thread.known[ns, channel] = Known(value.record_id, fingerprints)

        for channel, version in checkpoint[1].versions.items():
            is_empty = channel not in checkpoint[1].values
            thread.stored[ns, channel] = (version, is_empty)

        return found

    async def find(
        self,
        config: RunnableConfig | None,
        filter: Filter,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> list[Found]:
        if config is not None:
            thread = await self._threads.read(config["configurable"]["thread_id"])
            return matching(thread, config, filter, before, limit, self._serde)

        found: list[Found] = []

        async for store_id in self._threads.store_ids("list without a config"):
            left = None if limit is None else limit - len(found)

            if left is not None and left <= 0:
                break

            thread, _ = await self._threads.load(store_id)
            found += matching(thread, None, filter, before, left, self._serde)

        return found

    async def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        thread_id = config["configurable"]["thread_id"]
        thread = self._threads.get(thread_id)
        ns = namespace_in(config)
        is_full = _is_full_due(thread, ns, checkpoint, new_versions)
        record, known = self._record(
            thread, config, checkpoint, metadata, new_versions, is_full
        )

        if not await self._append(thread, record, config):
            # The thread was deleted, and with it the values that this record builds on.
            thread = self._threads.get(thread_id)
            record, known = self._record(
                thread, config, checkpoint, metadata, new_versions, True
            )
            await self._append(thread, record, config)

        thread.known.update(known)
        space = thread.namespaces.setdefault(ns, Namespace())
        space.newest = max(space.newest, checkpoint["id"])
        thread.written = {one for one in thread.written if one[1] > checkpoint["id"]}

        for name in ("values", "plain", "empty"):
            for channel in record[name]:
                version = record["versions"].get(channel)
                thread.stored[ns, channel] = (version, name == "empty")

        if "newest" in record:
            space.full_at = thread.bytes_seen
            space.full_size = record_size(record)

        return config_for(thread_id, namespace_in(config), checkpoint["id"])

    def _record(
        self,
        thread: Thread,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
        is_full: bool,
    ) -> tuple[Record, dict[tuple[str, str], Known]]:
        """Return the record of a checkpoint, and the lists that it stores."""
        ns = namespace_in(config)
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

        if is_full:
            record["newest"] = max(thread.namespace(ns).newest, checkpoint["id"])

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
            # A full checkpoint builds on no earlier record.
            keep = 0 if is_full else tail_start(before, fingerprints)
            tail = values[channel][keep:] if keep else values[channel]
            data = to_json(self._serde.dumps_typed(tail))
            entry: dict[str, Any] = {"version": version, "data": data}

            if keep and before is not None:
                entry |= {"base": before.record_id, "keep": keep}

            record["values"][channel] = entry

            if fingerprints is not None:
                known[ns, channel] = Known(record["id"], fingerprints)

        return record, known

    async def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str,
    ) -> None:
        if not writes:
            return

        thread = self._threads.get(config["configurable"]["thread_id"])
        record = new_record(
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
        thread.written.add((record["ns"], record["checkpoint_id"]))
        await self._append(thread, record, config)

    async def _append(
        self, thread: Thread, record: Record, config: RunnableConfig | None = None
    ) -> bool:
        """Append a record; return false if the cached thread was deleted."""
        records = split(thread, record, _LARGEST_TEXT)
        owner: object = config["configurable"].get(OWNER) if config else None

        if isinstance(owner, str):
            return await self._append_as(owner, thread, records)

        answered = thread.answered
        version = await self._threads.cp.append(thread.store_id, records)

        if version <= answered:
            self._threads.forget(thread)
            return False

        thread.answered = max(thread.answered, version)

        if version == len(records):
            thread.first_id = records[0]["id"]

        thread.add_own(records, version)
        return True

    async def claim(self, thread_id: str) -> str:
        """Append a record that makes a new run the owner; return its token."""
        thread = await self._threads.read_newest(thread_id, "")
        token = uuid4().hex
        await self._append(thread, new_record(thread, "owner", token=token))
        return token

    async def _append_as(
        self, owner: str, thread: Thread, records: list[Record]
    ) -> bool:
        """Append the records if the run owns the thread, in one atomic step."""
        if thread.start and thread.owner is None:
            # The record of the owner may stand before the records that were read.
            thread = await self._threads.read(thread.thread_id)

        async with thread.turn:
            while True:
                if thread.owner != owner or thread.version == 0:
                    await self._threads.extend(thread)

                if thread.owner != owner:
                    raise NotOwner(str(thread.thread_id), owner)

                try:
                    version = await self._threads.cp.append(
                        thread.store_id, records, expected_version=thread.version
                    )
                except VersionConflict:
                    if not await self._threads.extend(thread):
                        raise NotOwner(str(thread.thread_id), owner) from None
                else:
                    thread.answered = max(thread.answered, version)
                    thread.add_own(records, version, is_reader=True)
                    return True

    async def delete(self, thread_id: str) -> None:
        if not isinstance(self._threads.cp, ErasesThreads):
            raise Unsupported("delete_thread", "delete_thread")

        thread = self._threads.get(thread_id)
        await self._threads.cp.delete_thread(thread.store_id)
        self._threads.forget(thread)

    async def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        if not run_ids:
            return

        runs = set(run_ids)

        async for store_id in self._threads.store_ids("delete_for_runs"):
            thread, _ = await self._threads.load(store_id)
            await self._hide(
                thread,
                [
                    (ns, checkpoint_id)
                    for ns, space in thread.namespaces.items()
                    for checkpoint_id, stored in space.visible()
                    if self._metadata(stored).get("run_id") in runs
                ],
            )

    async def copy(self, source_thread_id: str, target_thread_id: str) -> None:
        target = self._threads.get(target_thread_id)
        source = self._threads.get(source_thread_id)

        if source is target:
            return

        _, records = await self._threads.load(source.store_id)
        copies = [{**record, "first": None} for record in records]

        for copy in copies:
            copy.pop("thread_id", None)

            if thread_id_in(target.store_id) is None:
                copy["thread_id"] = target.thread_id

        await self._threads.cp.append(target.store_id, copies)

    async def prune(self, thread_ids: Sequence[str], strategy: str) -> None:
        if strategy not in ("keep_latest", "delete"):
            raise ValueError(
                f"strategy must be 'keep_latest' or 'delete', not {strategy!r}"
            )

        for thread_id in thread_ids:
            if strategy == "delete":
                await self.delete(thread_id)
                continue

            thread = await self._threads.read(thread_id)
            await self._hide(
                thread,
                [
                    (ns, checkpoint_id)
                    for ns, space in thread.namespaces.items()
                    for checkpoint_id, _ in [*space.visible()][1:]
                ],
            )

    def _metadata(self, stored: Stored) -> dict[str, Any]:
        metadata: dict[str, Any] = self._serde.loads_typed(from_json(stored.metadata))
        return metadata

    async def _hide(
        self, thread: Thread, checkpoints: Sequence[tuple[str, str]]
    ) -> None:
        if checkpoints:
            ids = [[ns, checkpoint_id] for ns, checkpoint_id in checkpoints]
            await self._append(thread, new_record(thread, "hidden", checkpoints=ids))

    async def history(
        self, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        thread = await self._threads.read(config["configurable"]["thread_id"])
        space = thread.namespace(namespace_in(config))
        checkpoint = space.get(get_checkpoint_id(config))
        parent = checkpoint[1].parent if checkpoint else None
        seen: set[str] = set()
        history: dict[str, DeltaChannelHistory] = {
            ch: {"writes": []} for ch in channels
        }
        wanted = set(channels)

        # Hidden checkpoints count too: later checkpoints build on them.
        while wanted and parent and parent not in seen:
            if (stored := space.checkpoints.get(parent)) is None:
                break

            seen.add(parent)

            for write in reversed(space.writes_of(parent)):
                if write.channel in wanted:
                    history[write.channel]["writes"].append(
                        (
                            write.task_id,
                            write.channel,
                            self._serde.loads_typed(from_json(write.data)),
                        )
                    )

            for channel in wanted & stored.values.keys():
                history[channel]["seed"] = stored.values[channel].load(self._serde)
                wanted.remove(channel)

            parent = stored.parent

        for found in history.values():
            found["writes"].reverse()

        return history


def _is_certain(
    space: Namespace, wanted: str | None, found: tuple[str, Stored] | None
) -> bool:
    """Return whether a thread that was read in part has the right checkpoint.

    The newest checkpoint is uncertain if an earlier record may have a higher id.
    """
    if found is None or not found[1].is_complete:
        return False

    return bool(wanted) or found[0] >= space.newest


def _is_full_due(
    thread: Thread, ns: str, checkpoint: Checkpoint, new_versions: ChannelVersions
) -> bool:
    """Return whether a checkpoint is to be stored with all its values."""
    space = thread.namespace(ns)
    since = thread.bytes_seen - space.full_at

    if (
        thread.first_id is None
        or since < max(_FULL_FROM, space.full_size)
        # A write of this checkpoint may stand before it.
        or (ns, checkpoint["id"]) in thread.written
    ):
        return False

    # A channel without a value may have one in the store, as delta channels do.
    return all(
        channel in checkpoint["channel_values"]
        or channel in new_versions
        or thread.stored.get((ns, channel)) == (version, True)
        for channel, version in checkpoint["channel_versions"].items()
    )
