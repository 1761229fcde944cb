"""Checkpoints in a store: writing, finding, copying and hiding them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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

from cpkit.integrations.langgraph.cache import Threads
from cpkit.integrations.langgraph.errors import Unsupported
from cpkit.integrations.langgraph.found import (
    Filter,
    Found,
    config_for,
    matching,
    namespace_in,
)
from cpkit.integrations.langgraph.names import thread_id_in
from cpkit.integrations.langgraph.thread import Record, Thread, new_record
from cpkit.integrations.langgraph.values import (
    EMPTY,
    Known,
    fingerprints_of,
    tail_start,
    to_json,
)
from cpkit.protocol import ErasesThreads

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints in a store. Use it only on the store's event loop."""

    def __init__(self, threads: Threads, serde: SerializerProtocol) -> None:
        self._threads = threads
        self._serde = serde

    async def get(self, config: RunnableConfig) -> CheckpointTuple | None:
        thread = await self._threads.read(config["configurable"]["thread_id"])
        ns = namespace_in(config)
        checkpoint = thread.namespace(ns).get(get_checkpoint_id(config))

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
        record, known = self._record(thread, config, checkpoint, metadata, new_versions)

        if not await self._append(thread, record):
            # The thread was deleted, and with it the values that this record builds on.
            thread = self._threads.get(thread_id)
            every = checkpoint["channel_versions"]
            record, known = self._record(thread, config, checkpoint, metadata, every)
            await self._append(thread, record)

        thread.known.update(known)
        return config_for(thread_id, namespace_in(config), checkpoint["id"])

    def _record(
        self,
        thread: Thread,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
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
        )
        known: dict[tuple[str, str], Known] = {}

        for channel, version in new_versions.items():
            if channel not in values:
                empty = {"version": version, "data": to_json(EMPTY)}
                record["values"][channel] = empty
                continue

            before = thread.known.get((ns, channel))
            fingerprints = fingerprints_of(values[channel])
            keep = tail_start(before, fingerprints)
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
        await self._append(thread, record)

    async def _append(self, thread: Thread, record: Record) -> bool:
        """Append a record; return false if the cached thread was deleted."""
        answered = thread.answered
        version = await self._threads.cp.append(thread.store_id, [record])

        if version <= answered:
            self._threads.forget(thread)
            return False

        thread.answered = max(thread.answered, version)

        if version == 1:
            thread.first_id = record["id"]

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
                    if self._serde.loads_typed(stored.metadata).get("run_id") in runs
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
                            self._serde.loads_typed(write.typed),
                        )
                    )

            for channel in wanted & stored.values.keys():
                history[channel]["seed"] = stored.values[channel].load(self._serde)
                wanted.remove(channel)

            parent = stored.parent

        for found in history.values():
            found["writes"].reverse()

        return history
