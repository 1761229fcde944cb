"""Checkpoints in a store: writing, finding and copying them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_id,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from cpkit.integrations.langgraph.appending import Appends
from cpkit.integrations.langgraph.cache import Threads
from cpkit.integrations.langgraph.composing import Composer
from cpkit.integrations.langgraph.found import (
    Filter,
    Found,
    config_for,
    is_certain,
    matching,
    namespace_in,
    newest_of,
)
from cpkit.integrations.langgraph.names import FENCE, store_thread_id, thread_id_in
from cpkit.integrations.langgraph.stored import Fence, Stored, is_full
from cpkit.integrations.langgraph.thread import Namespace, Thread
from cpkit.integrations.langgraph.values import Known, Value, from_json, load

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints in a store. Use it only on the store's event loop."""

    def __init__(self, threads: Threads, serde: SerializerProtocol) -> None:
        self.serde = serde
        self._threads = threads
        self._composer = Composer(serde)
        self._appends = Appends(threads)

    async def get(self, config: RunnableConfig) -> CheckpointTuple | None:
        thread_id, ns = config["configurable"]["thread_id"], namespace_in(config)
        wanted = get_checkpoint_id(config)
        fence: Fence | None = config["configurable"].get(FENCE)

        if fence is not None and fence.version is None:
            # An empty append writes nothing, and returns the version.
            store_id = store_thread_id(thread_id)
            fence.version = await self._threads.cp.append(store_id, [])

        thread = await self._read(thread_id, ns, wanted)
        checkpoint = thread.namespace(ns).get(wanted)

        if checkpoint is None:
            return None

        found = Found.at(thread, ns, checkpoint).load(self.serde)

        # If the run appends to these lists, only the new items are stored.
        for channel, value in checkpoint[1].values.items():
            if type(value) is not Value or channel not in checkpoint[1].versions:
                continue

            known = thread.known.get((ns, channel))

            if known is None or known.record_id != value.record_id:
                thread.known[ns, channel] = Known(value.record_id, value=value)

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
            return matching(thread, config, filter, before, limit, self.serde)

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

        if thread.must_be_read:
            thread = await self._read(thread_id, ns, None)

        draft, known = self._composer.checkpoint(
            thread, config, checkpoint, metadata, new_versions
        )
        # Before it is stored: a full checkpoint with a lower id may be put meanwhile.
        thread.note_newest(ns, checkpoint["id"])

        if not await self._appends.append(thread, draft, config):
            # The thread was deleted, and with it the values that this record builds on.
            thread = self._threads.get(thread_id)
            draft, known = self._composer.checkpoint(
                thread, config, checkpoint, metadata, new_versions, is_full=True
            )
            thread.note_newest(ns, checkpoint["id"])
            await self._appends.append(thread, draft, config)

        record = draft.stored

        thread.known.update(known)
        thread.note(ns, checkpoint["id"], checkpoint["channel_versions"])

        for channel in record["empty"]:
            thread.empty[ns, channel] = checkpoint["channel_versions"][channel]

        # Otherwise it was noted when the thread took the record.
        if is_full(record) and record["id"] in thread.appended:
            thread.note_full(thread.ensure_namespace(ns), record)

        return config_for(thread_id, namespace_in(config), checkpoint["id"])

    async def _read(self, thread_id: object, ns: str, wanted: str | None) -> Thread:
        """Return the thread, or a window that has this checkpoint, or the newest."""

        def is_enough(thread: Thread) -> bool:
            space = thread.namespace(ns)
            return _is_certain(space, wanted, space.get(wanted))

        return await self._threads.find(
            thread_id, ns, is_enough, oldest=wanted is not None
        )

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
        draft = self._composer.writes(thread, config, writes, task_id, task_path)
        record = draft.record
        thread.note_early_writes(record["ns"], record["checkpoint_id"])
        await self._appends.append(thread, draft, config)

    async def claim(self, thread_id: str) -> str:
        """Make a new run the owner of the thread; return its token."""
        return await self._appends.claim(thread_id)

    async def copy(self, source_thread_id: str, target_thread_id: str) -> None:
        target = self._threads.get(target_thread_id)
        source = self._threads.get(source_thread_id)

        if source is target:
            return

        _, records = await self._threads.load(source.store_id)
        # The owner is a run of the source.
        copies = [
            {**record, "first": None} for record in records if record["type"] != "owner"
        ]

        for copy in copies:
            copy.pop("thread_id", None)

            if thread_id_in(target.store_id) is None:
                copy["thread_id"] = target.thread_id

        await self._threads.cp.append(target.store_id, copies)

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
                            self.serde.loads_typed(from_json(write.data)),
                        )
                    )

            for channel in wanted & stored.values.keys():
                history[channel]["seed"] = load(stored.values[channel], self.serde)
                wanted.remove(channel)

            parent = stored.parent

        for found in history.values():
            found["writes"].reverse()

        return history


def _is_certain(
    space: Namespace, wanted: str | None, found: tuple[str, Stored] | None
) -> bool:
    """Return whether a thread that was read in part has the right checkpoint.

    The newest checkpoint is uncertain if an earlier record may have a higher id. So
    are its writes if the window begins at a checkpoint of another namespace.
    """
    if found is None or not found[1].is_complete:
        return False

    if not "" < space.first_full <= found[0]:
        return False

    return bool(wanted) or found[0] >= space.newest
