"""The durable state of AI agents: one contract of six methods, and any store behind it.

::

    async with open_checkpointer("sqlite:///agent.db") as cp:
        await cp.append("thread-1", [{"role": "user", "content": "hello"}])
        data = await cp.load("thread-1")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpkit.errors import (
        BackendUnavailable,
        CallMismatch,
        CheckpointerError,
        Closed,
        CorruptThread,
        InvalidId,
        InvalidURL,
        KeyMissing,
        KeyTaken,
        PayloadTooLarge,
        SchemaMismatch,
        SerializationError,
        UnknownCall,
        VersionConflict,
        WrongEventLoop,
    )
    from cpkit.fenced import append_once, read_range
    from cpkit.memory import MemoryCheckpointer
    from cpkit.protocol import (
        Checkpointer,
        ErasesCalls,
        ErasesThreads,
        FullCheckpointer,
        JsonCheckpointer,
        KeepsReceipts,
        ListsThreads,
        MovesThreads,
        ReadsRanges,
        SearchesThreads,
        StatesDurability,
        TrimsThreads,
        WatchesThreads,
    )
    from cpkit.records import (
        CallRecord,
        CheckpointData,
        Durability,
        JsonValue,
        Survives,
        ThreadDump,
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
    "ErasesCalls",
    "ErasesThreads",
    "FullCheckpointer",
    "InvalidId",
    "InvalidURL",
    "JsonCheckpointer",
    "JsonValue",
    "KeepsReceipts",
    "KeyMissing",
    "KeyTaken",
    "ListsThreads",
    "MemoryCheckpointer",
    "MovesThreads",
    "PayloadTooLarge",
    "ReadsRanges",
    "SchemaMismatch",
    "SearchesThreads",
    "SerializationError",
    "StatesDurability",
    "Survives",
    "ThreadDump",
    "ThreadInfo",
    "ToolCall",
    "TrimsThreads",
    "UnknownCall",
    "VersionConflict",
    "WatchesThreads",
    "WrongEventLoop",
    "append_once",
    "open_checkpointer",
    "read_range",
]

# A name is imported when it is first used, as pydantic does it. A program that needs
# only an exception does not load the validation and the event loop.
_HOMES = {
    "BackendUnavailable": "cpkit.errors",
    "CallMismatch": "cpkit.errors",
    "CheckpointerError": "cpkit.errors",
    "Closed": "cpkit.errors",
    "CorruptThread": "cpkit.errors",
    "InvalidId": "cpkit.errors",
    "InvalidURL": "cpkit.errors",
    "KeyMissing": "cpkit.errors",
    "KeyTaken": "cpkit.errors",
    "PayloadTooLarge": "cpkit.errors",
    "SchemaMismatch": "cpkit.errors",
    "SerializationError": "cpkit.errors",
    "UnknownCall": "cpkit.errors",
    "VersionConflict": "cpkit.errors",
    "WrongEventLoop": "cpkit.errors",
    "append_once": "cpkit.fenced",
    "read_range": "cpkit.fenced",
    "MemoryCheckpointer": "cpkit.memory",
    "Checkpointer": "cpkit.protocol",
    "ErasesCalls": "cpkit.protocol",
    "ErasesThreads": "cpkit.protocol",
    "FullCheckpointer": "cpkit.protocol",
    "JsonCheckpointer": "cpkit.protocol",
    "KeepsReceipts": "cpkit.protocol",
    "ListsThreads": "cpkit.protocol",
    "MovesThreads": "cpkit.protocol",
    "ReadsRanges": "cpkit.protocol",
    "SearchesThreads": "cpkit.protocol",
    "StatesDurability": "cpkit.protocol",
    "TrimsThreads": "cpkit.protocol",
    "WatchesThreads": "cpkit.protocol",
    "CallRecord": "cpkit.records",
    "CheckpointData": "cpkit.records",
    "Durability": "cpkit.records",
    "JsonValue": "cpkit.records",
    "Survives": "cpkit.records",
    "ThreadDump": "cpkit.records",
    "ThreadInfo": "cpkit.records",
    "ToolCall": "cpkit.records",
    "open_checkpointer": "cpkit.registry",
}


__version__: str

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":  # reading a package's metadata takes milliseconds
            found = globals()[name] = import_module("importlib.metadata").version(
                "cpkit"
            )
            return found

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
