"""The durable state of AI agents: one contract of six methods, and any store behind it.

::

    async with open_checkpointer("sqlite:///agent.db") as cp:
        await cp.append("thread-1", [{"role": "user", "content": "hello"}])
        data = await cp.load("thread-1")
"""

from cpkit.errors import (
    BackendUnavailable,
    CallMismatch,
    CheckpointerError,
    Closed,
    CorruptThread,
    InvalidId,
    InvalidURL,
    PayloadTooLarge,
    SchemaMismatch,
    SerializationError,
    UnknownCall,
    VersionConflict,
    WrongEventLoop,
)
from cpkit.memory import MemoryCheckpointer
from cpkit.protocol import (
    Checkpointer,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    ReadsRanges,
    StatesDurability,
)
from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    Survives,
    ThreadInfo,
    ToolCall,
)
from cpkit.registry import open_checkpointer

__all__ = [
    "BackendUnavailable",
    "CallMismatch",
    "CallRecord",
    "CheckpointData",
    "Checkpointer",
    "CheckpointerError",
    "Closed",
    "CorruptThread",
    "Durability",
    "ErasesThreads",
    "InvalidId",
    "InvalidURL",
    "JsonValue",
    "KeepsReceipts",
    "ListsThreads",
    "MemoryCheckpointer",
    "PayloadTooLarge",
    "ReadsRanges",
    "SchemaMismatch",
    "SerializationError",
    "StatesDurability",
    "Survives",
    "ThreadInfo",
    "ToolCall",
    "UnknownCall",
    "VersionConflict",
    "WrongEventLoop",
    "open_checkpointer",
]
