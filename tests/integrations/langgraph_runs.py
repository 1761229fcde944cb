"""A scripted run of the saver, and the checkpoints that it reads."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    CheckpointTuple,
    empty_checkpoint,
)
from langgraph.checkpoint.base.id import uuid6

from cpkit.integrations.langgraph import CheckpointSaver

__all__ = ["Run", "found", "thread", "values"]


def thread(thread_id: Any = "t", ns: str = "") -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ns}}


class Run:
    """A run that puts one checkpoint after the other."""

    def __init__(self, saver: CheckpointSaver, thread_id: Any = "t") -> None:
        self.saver = saver
        self.config = thread(thread_id)
        self.versions: ChannelVersions = {}

    async def put(self, /, **values: Any) -> RunnableConfig:
        """Put a checkpoint with these channels, which are all new."""
        new: ChannelVersions = {
            name: self.saver.get_next_version(str(self.versions.get(name, 0)), None)
            for name in values
        }
        self.versions |= new
        checkpoint = empty_checkpoint() | {
            "id": str(uuid6()),
            "channel_values": values,
            "channel_versions": dict(self.versions),
        }
        self.config = await self.saver.aput(
            self.config, checkpoint, {"source": "loop", "step": 1}, new
        )
        return self.config


async def found(saver: CheckpointSaver, config: RunnableConfig) -> CheckpointTuple:
    there = await saver.aget_tuple(config)
    assert there is not None
    return there


async def values(saver: CheckpointSaver, config: RunnableConfig) -> dict[str, Any]:
    return (await found(saver, config)).checkpoint["channel_values"]
