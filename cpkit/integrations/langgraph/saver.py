"""`CheckpointSaver`: LangGraph's checkpointer over any store."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from cpkit.integrations.bridge import Bridge
from cpkit.integrations.langgraph.checkpoints import Checkpoints, Filter
from cpkit.integrations.langgraph.serializer import DefaultSerializer
from cpkit.integrations.langgraph.threads import Threads
from cpkit.integrations.langgraph.upkeep import Upkeep
from cpkit.protocol import Checkpointer
from cpkit.sync import SyncCheckpointer

__all__ = ["CheckpointSaver"]


class CheckpointSaver(BaseCheckpointSaver[str]):
    """Keeps LangGraph's checkpoints in a store, each thread in one thread of the store.

    ``cp`` is an open checkpointer of JSON objects, and the saver is created on its
    event loop. For programs without a loop, ``cp`` is an open `SyncCheckpointer`. Async
    methods may be called from any loop. Synchronous methods may be called from any
    thread except that of the store's loop, where they raise ``RuntimeError``.

    Each ``put`` and ``put_writes`` is atomic, and as durable as the store promises.
    `records` describes what is stored. The records of the ``cached_threads`` threads
    that were used last stay in memory, at most about ``cached_bytes`` of them.

    ``serde`` defaults to LangGraph's serializer without pickle and without imports:
    reading a type that the application has not imported raises ``TypeRefused``. A
    serializer that falls back to pickle raises ``ValueError``.
    """

    def __init__(
        self,
        cp: Checkpointer[Any] | SyncCheckpointer[Any],
        *,
        serde: SerializerProtocol | None = None,
        cached_threads: int = 128,
        cached_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        if cached_threads < 1:
            raise ValueError(f"cached_threads must be at least 1, not {cached_threads}")

        _refuse_pickle(serde)
        super().__init__(serde=serde or DefaultSerializer())
        self._bridge = Bridge(cp)
        self._threads = Threads(self._bridge.checkpointer, cached_threads, cached_bytes)
        self._checkpoints: Checkpoints | None = None

    def get_next_version(self, current: str | int | None, channel: None) -> str:
        """Return a version above the current one that no other branch has."""
        number = int(str(current).partition(".")[0]) if current is not None else 0
        return f"{number + 1:010}.{random.getrandbits(48):012x}"

    # Async methods, for any event loop

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint with the config's id, or the last of the thread."""
        return await self._bridge.go(self._stored.get(config))

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: Filter = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Yield matching checkpoints, the last that was appended first.

        A config without a namespace matches all namespaces of the thread. Without a
        config, every thread is read; ``Unsupported`` is raised if the store cannot list
        threads.
        """
        for found in await self._bridge.go(
            self._stored.find(config, filter, before, limit)
        ):
            yield found.load(self.serde)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint with the values of the new versions, in one step."""
        return await self._bridge.go(
            self._stored.put(config, checkpoint, metadata, new_versions)
        )

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store the writes of a task in one step, before its checkpoint or after.

        If a task writes twice at one index, the first write stays. Errors, interrupts
        and resumptions are replaced instead.
        """
        await self._bridge.go(
            self._stored.put_writes(config, writes, task_id, task_path)
        )

    async def aclaim(self, config: RunnableConfig) -> RunnableConfig:
        """Return a config for a run that owns the thread from here on.

        Pass the config to the graph. After a later claim, the next checkpoint or write
        of this run is refused with ``NotOwner``. A run without a claim is not refused.
        """
        return await self._bridge.go(self._stored.claim(config))

    def claim(self, config: RunnableConfig) -> RunnableConfig:
        """Return a config for a run that owns the thread, as `aclaim` does."""
        return self._bridge.wait(self._stored.claim(config))

    async def adelete_thread(self, thread_id: str) -> None:
        """Erase the thread from the store, in all namespaces.

        A run that continues writes its next checkpoint completely, and so creates the
        thread again. Raises ``Unsupported`` if the store cannot erase.
        """
        await self._bridge.go(self._upkeep.delete(thread_id))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of these runs, in all threads.

        They are hidden at once. Their bytes are freed where that halves a thread, and
        otherwise by a later deletion or prune. Reads the whole store. Raises
        ``Unsupported`` if the store cannot list threads.
        """
        await self._bridge.go(self._upkeep.delete_runs(run_ids))

    async def acopy_thread(
        self, source_thread_id: str, target_thread_id: str, *, last: int | None = None
    ) -> None:
        """Append all records of a thread to another thread, some at a time.

        With ``last``, only so many of the newest checkpoints of each namespace are
        copied, with their writes and what a delta channel is rebuilt from: 1 is a fork.
        Without, ``VersionConflict`` is raised if another writer appends to the target
        meanwhile. If the process dies, the target has the oldest checkpoints. The run
        that owns the source does not own the copy.
        """
        await self._bridge.go(
            self._upkeep.copy(source_thread_id, target_thread_id, last)
        )

    async def aprune(
        self, thread_ids: Sequence[str], *, strategy: str = "keep_latest"
    ) -> None:
        """Free all but the newest checkpoint of each namespace, with its writes.

        A run that is writing the thread goes on. What a delta channel is rebuilt from
        stays, hidden. On a store that cannot trim, the others are hidden. The strategy
        ``"delete"`` deletes the threads. Raises ``VersionConflict`` where other writers
        append all the time; nothing of the thread is lost then.
        """
        await self._bridge.go(self._upkeep.prune(thread_ids, strategy))

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return each channel's nearest stored value, and the writes after it."""
        return await self._bridge.go(self._stored.history(config, channels))

    # Synchronous methods, for any thread except that of the store's loop

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return self._bridge.wait(self._stored.get(config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: Filter = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        for found in self._bridge.wait(
            self._stored.find(config, filter, before, limit)
        ):
            yield found.load(self.serde)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return self._bridge.wait(
            self._stored.put(config, checkpoint, metadata, new_versions)
        )

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        self._bridge.wait(self._stored.put_writes(config, writes, task_id, task_path))

    def delete_thread(self, thread_id: str) -> None:
        self._bridge.wait(self._upkeep.delete(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        self._bridge.wait(self._upkeep.delete_runs(run_ids))

    def copy_thread(
        self, source_thread_id: str, target_thread_id: str, *, last: int | None = None
    ) -> None:
        self._bridge.wait(self._upkeep.copy(source_thread_id, target_thread_id, last))

    def prune(
        self, thread_ids: Sequence[str], *, strategy: str = "keep_latest"
    ) -> None:
        self._bridge.wait(self._upkeep.prune(thread_ids, strategy))

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return self._bridge.wait(self._stored.history(config, channels))

    @property
    def _stored(self) -> Checkpoints:
        # `with_allowlist` clones a saver with another serde.
        if self._checkpoints is None or self._checkpoints.serde is not self.serde:
            self._checkpoints = Checkpoints(self._threads, self.serde)

        return self._checkpoints

    @property
    def _upkeep(self) -> Upkeep:
        return Upkeep(self._threads, self.serde)


def _refuse_pickle(serde: object) -> None:
    """Raise ``ValueError`` for a serializer that may pickle, also inside a cipher."""
    while serde is not None:
        if getattr(serde, "pickle_fallback", False):
            raise ValueError(
                "a serde with pickle_fallback would run stored code; "
                "use JsonPlusSerializer(pickle_fallback=False)"
            )

        serde = getattr(serde, "serde", None)
