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
from cpkit.integrations.langgraph.names import OWNER
from cpkit.integrations.langgraph.serializer import DefaultSerializer
from cpkit.integrations.langgraph.threads import Threads
from cpkit.integrations.langgraph.upkeep import Upkeep
from cpkit.protocol import Checkpointer
from cpkit.sync import SyncCheckpointer

__all__ = ["CheckpointSaver"]

# A run uses one thread many times. Few servers have more runs at a time.
_CACHED_THREADS = 128


class CheckpointSaver(BaseCheckpointSaver[str]):
    """Keeps LangGraph's checkpoints in a store, each thread in one thread of the store.

    ``cp`` is an open checkpointer of JSON objects, and the saver is created on its
    event loop. For programs without a loop, ``cp`` is an open `SyncCheckpointer`. Async
    methods may be called from any loop. Synchronous methods may be called from any
    thread except that of the store's loop, where they raise ``RuntimeError``.

    Each ``put`` and ``put_writes`` is atomic, and those of one thread that come at the
    same time share an append. When a put returns, it is as durable as the store
    promises. `records` describes what is stored. A read fetches the records that are
    new since the last read. The records of ``cached_threads`` threads stay in memory,
    at most about ``cached_bytes`` of them.

    ``serde`` defaults to LangGraph's serializer without pickle and without imports. It
    loads models, dataclasses and enums that the application has imported, and the types
    that LangGraph calls safe. Reading another type raises ``TypeRefused``, unless you
    allow it with ``JsonPlusSerializer(allowed_msgpack_modules=[...])``. Raises
    ``ValueError`` for a serializer that falls back to pickle.
    """

    def __init__(
        self,
        cp: Checkpointer[Any] | SyncCheckpointer[Any],
        *,
        serde: SerializerProtocol | None = None,
        cached_threads: int = _CACHED_THREADS,
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
        # Longer numbers of earlier versions of cpkit start with more zeros.
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

        A config without a namespace matches all namespaces of the thread. With a
        ``limit``, about as much is read as is returned, and what was stored after
        ``before``. Without a config, every thread is read. Then the store must list
        threads, or ``Unsupported`` is raised.
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

        Pass the config to the graph. If another run claims the thread later, the next
        checkpoint or write of this run is refused with ``NotOwner``. A run without a
        claim is not refused.
        """
        thread_id = config["configurable"]["thread_id"]
        token = await self._bridge.go(self._stored.claim(thread_id))
        return _owned(config, token)

    def claim(self, config: RunnableConfig) -> RunnableConfig:
        """Return a config for a run that owns the thread, as `aclaim` does."""
        thread_id = config["configurable"]["thread_id"]
        return _owned(config, self._bridge.wait(self._stored.claim(thread_id)))

    async def adelete_thread(self, thread_id: str) -> None:
        """Erase the thread from the store, in all namespaces.

        A run that continues writes its next checkpoint completely, and so creates the
        thread again. Raises ``Unsupported`` if the store cannot erase.
        """
        await self._bridge.go(self._upkeep.delete(thread_id))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of these runs, in all threads.

        They are hidden at once. Where that halves a thread, the others are stored again
        and the thread is trimmed, as by `aprune`; otherwise a later deletion or prune
        frees the bytes. Other runs stay, for time travel too. Reads the whole store.
        Raises ``Unsupported`` if the store cannot list threads.
        """
        await self._bridge.go(self._delete_for_runs(_several("run_ids", run_ids)))

    async def acopy_thread(
        self,
        source_thread_id: str,
        target_thread_id: str,
        *,
        last: int | None = None,
    ) -> None:
        """Append all records of a thread to another thread, some at a time.

        With ``last``, only so many of the newest checkpoints of each namespace are
        copied, with their writes: 1 is a fork that has the state and no history. A
        delta channel adds the checkpoints from which it is rebuilt.

        The run that owns the source does not own the copy. Without ``last`` it raises
        ``VersionConflict`` if another writer appends to the target meanwhile. If the
        process dies, the target has the oldest checkpoints.
        """
        await self._bridge.go(self._copy(source_thread_id, target_thread_id, last))

    async def aprune(
        self, thread_ids: Sequence[str], *, strategy: str = "keep_latest"
    ) -> None:
        """Free all but the newest checkpoint of each namespace, with its writes.

        They are stored again, whole, and the thread is trimmed before them. A run that
        is writing the thread goes on. Earlier checkpoints are gone, as with LangGraph's
        own savers. What a delta channel is rebuilt from stays, hidden. A store that
        cannot trim hides the others. The strategy ``"delete"`` deletes the threads.

        Raises ``VersionConflict`` where other writers append all the time; nothing of
        the thread is lost then.
        """
        await self._bridge.go(self._prune(_several("thread_ids", thread_ids), strategy))

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
        self._bridge.wait(self._delete_for_runs(_several("run_ids", run_ids)))

    def copy_thread(
        self,
        source_thread_id: str,
        target_thread_id: str,
        *,
        last: int | None = None,
    ) -> None:
        self._bridge.wait(self._copy(source_thread_id, target_thread_id, last))

    def prune(
        self, thread_ids: Sequence[str], *, strategy: str = "keep_latest"
    ) -> None:
        self._bridge.wait(self._prune(_several("thread_ids", thread_ids), strategy))

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return self._bridge.wait(self._stored.history(config, channels))

    async def _delete_for_runs(self, run_ids: Sequence[str]) -> None:
        for thread_id in await self._upkeep.hide_runs(run_ids):
            await self._stored.free_hidden(thread_id)

    async def _prune(self, thread_ids: Sequence[str], strategy: str) -> None:
        if strategy not in ("keep_latest", "delete"):
            raise ValueError(
                f"strategy must be 'keep_latest' or 'delete', not {strategy!r}"
            )

        prune = {"delete": self._upkeep.delete, "keep_latest": self._stored.keep_newest}

        for thread_id in thread_ids:
            await prune[strategy](thread_id)

    async def _copy(self, source: str, target: str, last: int | None) -> None:
        if last is None:
            await self._upkeep.copy(source, target)
        else:
            await self._stored.copy_newest(source, target, last)

    @property
    def _stored(self) -> Checkpoints:
        # `with_allowlist` clones a saver with another serde.
        if self._checkpoints is None or self._checkpoints.serde is not self.serde:
            self._checkpoints = Checkpoints(self._threads, self.serde)

        return self._checkpoints

    @property
    def _upkeep(self) -> Upkeep:
        return Upkeep(self._threads, self.serde)


def _owned(config: RunnableConfig, token: str) -> RunnableConfig:
    owned: RunnableConfig = {**config}
    owned["configurable"] = {**config["configurable"], OWNER: token}
    return owned


def _several(name: str, ids: Sequence[str]) -> Sequence[str]:
    """Refuse a single string, whose letters would be taken for ids."""
    if isinstance(ids, str):
        raise TypeError(f"{name} must be a sequence of ids, not the str {ids[:40]!r}")

    return ids


def _refuse_pickle(serde: object) -> None:
    """Raise ``ValueError`` for a serializer that may pickle, also inside a cipher."""
    while serde is not None:
        if getattr(serde, "pickle_fallback", False):
            raise ValueError(
                "a serde with pickle_fallback would run stored code; "
                "use JsonPlusSerializer(pickle_fallback=False)"
            )

        serde = getattr(serde, "serde", None)
