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
    is_certain,
    matching,
    namespace_in,
    newest_of,
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
    PLAIN,
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

# Fewer versions are stored with every checkpoint.
_MANY_CHANNELS = 8

# A checkpoint is also stored with all its values if this adds few bytes.
_SMALL_REST = 512


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

        def is_enough(thread: Thread) -> bool:
            space = thread.namespace(ns)
            return _is_certain(space, wanted, space.get(wanted))

        thread = await self._threads.find(
            thread_id, ns, is_enough, oldest=wanted is not None
        )
        checkpoint = thread.namespace(ns).get(wanted)

        if checkpoint is None:
            return None

        found = Found.at(thread, ns, checkpoint).load(self._serde)

        # If the run appends to these lists, only the new items are stored.
        for channel, value in checkpoint[1].values.items():
            if value.data[0] == PLAIN or channel not in checkpoint[1].versions:
                continue

            known = thread.known.get((ns, channel))

            if known is None or known.record_id != value.record_id:
                loaded = found.checkpoint["channel_values"][channel]
                fingerprints = fingerprints_of(loaded)

                if fingerprints is not None:
                    thread.known[ns, channel] = Known(value.record_id, fingerprints)

        thread.note(ns, checkpoint[0], checkpoint[1].versions)

        for channel in checkpoint[1].versions.keys() - checkpoint[1].values.keys():
            thread.empty[ns, channel] = checkpoint[1].versions[channel]

        return found

    async def find(
        self,
        config: RunnableConfig | None,
        filter: Filter,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> list[Found]:
        ns = config["configurable"].get("checkpoint_ns") if config else None

        def search(thread: Thread) -> list[Found]:
            return matching(thread, config, filter, before, limit, self._serde)

        def is_enough(thread: Thread) -> bool:
            return is_certain(thread, ns, search(thread), limit)

        # A step of a graph has about this many records.
        first = None if limit is None else 4 * (limit + 1)

        if config is not None:
            thread_id = config["configurable"]["thread_id"]
            return search(
                await self._threads.find(
                    thread_id, ns, is_enough, first=first, oldest=True
                )
            )

        found: list[Found] = []

        async for store_id in self._threads.store_ids("list without a config"):
            async for thread in self._threads.windows(
                store_id, None, None, first=first, oldest=True
            ):
                if not thread.is_window or is_enough(thread):
                    found = newest_of(found + search(thread), limit)
                    break

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
        is_full = _may_be_full(thread, ns, checkpoint, new_versions) and _is_full_due(
            thread.bytes_seen, thread.namespace(ns)
        )
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
        thread.top = max(thread.top, checkpoint["id"])
        thread.written = {one for one in thread.written if one[1] > checkpoint["id"]}

        thread.note(ns, checkpoint["id"], checkpoint["channel_versions"])

        for channel in record["empty"]:
            thread.empty[ns, channel] = checkpoint["channel_versions"][channel]

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

        rest = {} if is_full else _plain_rest(checkpoint, new_versions)
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

        # LangGraph's own savers keep a value without a version in its checkpoint.
        if loose := values.keys() - versions.keys():
            record["loose"] = {
                channel: to_json(self._serde.dumps_typed(values[channel]))
                for channel in loose
            }

        if (
            rest is not None
            and self._stores_plain
            and _may_be_full(thread, ns, checkpoint, new_versions)
            and not any("base" in entry for entry in record["values"].values())
        ):
            is_full = True
            record["plain"] |= rest
            record["empty"] += versions.keys() - values.keys() - new_versions.keys()

        if not is_full:
            self._shorten(thread, record, versions, new_versions)

        if is_full:
            own, newest = checkpoint["id"], thread.namespace(ns).newest
            record["newest"] = newest if newest > own else ""
            record["top"] = thread.top if thread.top > own else ""

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
        thread = await self._threads.find(thread_id, "", lambda _: True)
        token = uuid4().hex
        await self._append(thread, new_record(thread, "owner", token=token))
        return token

    async def _append_as(
        self, owner: str, thread: Thread, records: list[Record]
    ) -> bool:
        """Append the records if the run owns the thread, in one atomic step."""
        while True:
            # The record of the owner may stand before the records that were read.
            is_known = thread.count > 0 and thread.owner is not None

            async with thread.turn:
                if is_known and thread.version is None:
                    is_known = await self._threads.locate(thread)

            if not is_known:
                self._threads.forget(thread)
                thread = await self._threads.read(thread.thread_id)

            async with thread.turn:
                if await self._append_owned(owner, thread, records):
                    return True

            # The thread was deleted, or others have added many records.
            self._threads.forget(thread)
            thread = await self._threads.read(thread.thread_id)

    async def _append_owned(
        self, owner: str, thread: Thread, records: list[Record]
    ) -> bool:
        """Append if the run is the owner; return false if the thread must be read."""
        while True:
            if thread.owner != owner and thread.count:
                await self._threads.extend(thread)

            if thread.owner != owner or thread.version is None:
                raise NotOwner(str(thread.thread_id), owner)

            try:
                version = await self._threads.cp.append(
                    thread.store_id, records, expected_version=thread.version
                )
            except VersionConflict:
                if not await self._threads.extend(thread):
                    return False
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
