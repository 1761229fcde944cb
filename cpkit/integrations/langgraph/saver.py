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
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from cpkit.integrations.langgraph.bridge import Bridge
from cpkit.integrations.langgraph.cache import Threads
from cpkit.integrations.langgraph.checkpoints import Checkpoints, Filter
from cpkit.protocol import Checkpointer
from cpkit.sync import SyncCheckpointer

__all__ = ["CheckpointSaver"]

# A run uses one thread over and over; a server has this many runs at a time.
CACHED_THREADS = 128


class CheckpointSaver(BaseCheckpointSaver[str]):
    """Keeps LangGraph's checkpoints in a store, a thread of LangGraph in one thread.

    ``cp`` is an open checkpointer of JSON objects, and the saver is made on its loop;
    or it is an open `SyncCheckpointer`, for programs without a loop. Async methods may
    be called from any loop; synchronous ones from any thread but the store's loop,
    where they raise ``RuntimeError``.

    Each ``put`` and ``put_writes`` is one blind append, and is as durable as the store
    says when it returns. Values are stored once a version, and a list that grew by what
    was added. Reading fetches what is new since the last time; of ``cached_threads``
    threads what was read stays in memory, as bytes.

    ``serde`` is LangGraph's serializer without pickle, restricted to the types that
    LangGraph calls safe: others come back as plain data, unless you allow them with
    ``JsonPlusSerializer(allowed_msgpack_modules=[...])``. Raises ``ValueError`` for one
    that falls back to pickle.
    """

    def __init__(
        self,
        cp: Checkpointer[Any] | SyncCheckpointer[Any],
        *,
        serde: SerializerProtocol | None = None,
        cached_threads: int = CACHED_THREADS,
    ) -> None:
        if cached_threads < 1:
            raise ValueError("cached_threads is at least 1")

        _refuse_pickle(serde)
        super().__init__(
            serde=serde
            or JsonPlusSerializer(pickle_fallback=False, allowed_msgpack_modules=None)
        )
        self._bridge = Bridge(cp)
        self._threads = Threads(self._bridge.checkpointer, cached_threads)

    def get_next_version(self, current: str | int | None, channel: None) -> str:
        """Return a version above the current one, and different in each branch."""
        number = int(str(current).partition(".")[0]) if current is not None else 0
        return f"{number + 1:032}.{random.random():016}"

    # Async, from any loop

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint of that id, or the thread's newest."""
        return await self._bridge.go(self._stored.get(config))

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: Filter = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Yield matching checkpoints, the newest first.

        Without a namespace in the config, those of all of the thread's. Without a
        config, thread after thread, in the order of their ids; that reads the whole
        store, and needs one that lists threads (else raises ``Unsupported``).
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
        """Store a checkpoint, with the values of the new versions, in one append."""
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
        """Store what a task wrote, in one append; before its checkpoint or after.

        Of a task's writes at one place the first stays, whoever wrote it; errors,
        interrupts and resumptions are replaced.
        """
        await self._bridge.go(
            self._stored.put_writes(config, writes, task_id, task_path)
        )

    async def adelete_thread(self, thread_id: str) -> None:
        """Erase the thread from the store, in all namespaces.

        A run that goes on writes its next checkpoint whole, and the thread is there
        again. Raises ``Unsupported`` where the store cannot erase.
        """
        await self._bridge.go(self._stored.delete(thread_id))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Take the checkpoints of these runs out of sight, in all threads.

        Reads the whole store, and needs one that lists threads (else raises
        ``Unsupported``). The bytes stay until their thread is deleted.
        """
        await self._bridge.go(
            self._stored.delete_for_runs(_several("run_ids", run_ids))
        )

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Add all that a thread has to another, in one append."""
        await self._bridge.go(self._stored.copy(source_thread_id, target_thread_id))

    async def aprune(
        self, thread_ids: Sequence[str], *, strategy: str = "keep_latest"
    ) -> None:
        """Take all but the newest checkpoint of each namespace out of sight.

        Delta channels are still rebuilt from what is out of sight. The bytes stay until
        the thread is deleted; the strategy ``"delete"`` erases the threads at once.
        """
        await self._bridge.go(
            self._stored.prune(_several("thread_ids", thread_ids), strategy)
        )

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return each channel's nearest stored value, and what was written since."""
        return await self._bridge.go(self._stored.history(config, channels))

    # The same, from any thread but the store's loop

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
        self._bridge.wait(self._stored.delete(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        self._bridge.wait(self._stored.delete_for_runs(_several("run_ids", run_ids)))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self._bridge.wait(self._stored.copy(source_thread_id, target_thread_id))

    def prune(
        self, thread_ids: Sequence[str], *, strategy: str = "keep_latest"
    ) -> None:
        self._bridge.wait(
            self._stored.prune(_several("thread_ids", thread_ids), strategy)
        )

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return self._bridge.wait(self._stored.history(config, channels))

    @property
    def _stored(self) -> Checkpoints:
        # Made anew each time: a clone `with_allowlist` has a serializer of its own.
        return Checkpoints(self._threads, self.serde)


def _several(name: str, ids: Sequence[str]) -> Sequence[str]:
    """Refuse one string where several belong: its letters would pass for ids."""
    if isinstance(ids, str):
        raise TypeError(f"{name} is a sequence of ids, not a str")

    return ids


def _refuse_pickle(serde: object) -> None:
    """Raise ``ValueError`` for a serializer that would pickle, also under a cipher."""
    while serde is not None:
        if getattr(serde, "pickle_fallback", False):
            raise ValueError("a serde with pickle_fallback runs code that was stored")

        serde = getattr(serde, "serde", None)
