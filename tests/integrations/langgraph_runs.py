"""A scripted run of the saver, what it reads, and a store that counts its calls."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    CheckpointTuple,
    empty_checkpoint,
)
from langgraph.checkpoint.base.id import uuid6

from cpkit import BackendUnavailable
from cpkit.integrations.langgraph import CheckpointSaver

__all__ = ["Recorder", "Run", "found", "thread", "values"]


def thread(thread_id: Any = "t", ns: str = "") -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ns}}


class Run:
    """A run that puts one checkpoint after the other."""

    def __init__(self, saver: CheckpointSaver, thread_id: Any = "t") -> None:
        self.saver = saver
        self.config = thread(thread_id)
        self.versions: ChannelVersions = {}
        self.values: dict[str, Any] = {}

    async def put(
        self, checkpoint_id: str | None = None, /, **values: Any
    ) -> RunnableConfig:
        """Put a checkpoint in which these channels are new, and others as before."""
        new: ChannelVersions = {
            name: self.saver.get_next_version(str(self.versions.get(name, 0)), None)
            for name in values
        }
        self.versions |= new
        self.values |= values
        checkpoint = empty_checkpoint() | {
            "id": checkpoint_id or str(uuid6()),
            "channel_values": dict(self.values),
            "channel_versions": dict(self.versions),
        }
        self.config = await self.saver.aput(
            self.config, checkpoint, {"source": "loop", "step": 1}, new
        )
        return self.config


class Recorder:
    """A store that reads ranges and counts its calls."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.appends: list[list[Any]] = []
        self.reads = 0
        self.returned = 0
        self.fails = False

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        if self.fails:
            raise BackendUnavailable("recorder", "gone")

        self.appends.append(messages)
        version: int = await self.inner.append(thread_id, messages, **options)
        return version

    async def load(self, thread_id: str) -> Any:
        raise AssertionError("the thread was reloaded")

    async def read(self, *args: Any) -> Any:
        found = await self.inner.read(*args)
        self.reads += 1
        self.returned += len(found)
        return found

    async def load_range(self, *args: Any) -> Any:
        data = await self.inner.load_range(*args)
        self.reads += 1
        self.returned += len(data.messages) if data else 0
        return data

    def __getattr__(self, name: str) -> Any:
        if name in ("list_threads", "delete_thread", "durability"):
            raise AttributeError(name)

        return getattr(self.inner, name)


async def found(saver: CheckpointSaver, config: RunnableConfig) -> CheckpointTuple:
    there = await saver.aget_tuple(config)
    assert there is not None
    return there


async def values(saver: CheckpointSaver, config: RunnableConfig) -> dict[str, Any]:
    return (await found(saver, config)).checkpoint["channel_values"]
