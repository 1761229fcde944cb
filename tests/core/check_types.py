"""The types of the public names: checked by mypy, never run."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, TypedDict, assert_type

from pydantic import BaseModel

from cpkit import (
    CallRecord,
    CheckpointData,
    Checkpointer,
    Durability,
    ErasesThreads,
    FullCheckpointer,
    JsonCheckpointer,
    KeepsReceipts,
    ListsThreads,
    MemoryCheckpointer,
    ReadsRanges,
    StatesDurability,
    ThreadInfo,
    ToolCall,
    TrimsThreads,
    open_checkpointer,
)
from cpkit.effects import Effect
from cpkit.effects.effect import Handler, Policy
from cpkit.messages import Message, UserMessage
from cpkit.sync import SyncCheckpointer
from cpkit_sqlite import SQLiteCheckpointer


class Turn(BaseModel):
    text: str


class Line(TypedDict):
    text: str


def check_opening() -> None:
    """The type of messages is inferred from ``message_type``, also from a union."""
    assert_type(
        open_checkpointer("memory://", max_payload=1),
        AbstractAsyncContextManager[JsonCheckpointer],
    )
    assert_type(
        open_checkpointer(message_type=Turn),
        AbstractAsyncContextManager[FullCheckpointer[Turn]],
    )
    assert_type(
        open_checkpointer("memory://", message_type=Line),
        AbstractAsyncContextManager[FullCheckpointer[Line]],
    )
    assert_type(
        open_checkpointer("memory://", message_type=Message),
        AbstractAsyncContextManager[FullCheckpointer[Message]],
    )
    assert_type(
        open_checkpointer("memory://", message_type=Turn | UserMessage),
        AbstractAsyncContextManager[FullCheckpointer[Turn | UserMessage]],
    )
    assert_type(
        SyncCheckpointer("memory://", message_type=Turn | UserMessage),
        SyncCheckpointer[Turn | UserMessage],
    )


async def check_the_six_methods(cp: Checkpointer[Turn]) -> None:
    """Messages have the checkpointer's message type."""
    data = await cp.load("t")
    assert_type(data, CheckpointData[Turn] | None)
    assert data is not None
    assert_type(data.messages, list[Turn])
    assert_type(data.extra, dict[str, Any])
    assert_type(data.pending, list[CallRecord])
    assert_type(data.version, int)

    assert_type(await cp.append("t", [Turn(text="")], expected_version=0), int)
    await cp.append("t", [UserMessage(content="")])  # type: ignore[list-item]  # not a Turn

    call = ToolCall("c", "tool", {"a": [1]}, "k")
    assert_type(await cp.record_issued("t", call), CallRecord | None)
    assert_type(await cp.record_result("t", "c", {}, success=False), CallRecord)
    assert_type(await cp.find_completed("k"), CallRecord | None)
    await cp.save_extra("t", {"plan": {"step": 1}})
    await cp.save_extra("t", {"plan": {1}})  # type: ignore[dict-item]  # JSON has no set


async def check_json(cp: JsonCheckpointer, line: Line) -> None:
    """Any mapping goes in; what comes back is read as JSON."""
    message = {"role": "user", "content": "hello"}
    await cp.append("t", [message])
    await cp.append("t", [line], expected_version=1)
    await cp.append("t", ["words"])  # type: ignore[list-item]  # not a mapping
    assert_type(await cp.read("t", -1), list[dict[str, Any]])
    assert_type(await cp.list_threads(), list[ThreadInfo])
    assert_type(cp.durability, Durability)
    data = await cp.load("t")
    assert data is not None
    assert data.messages[0]["content"].startswith("h")
    assert data.extra["plan"]["step"] > 0
    assert data.pending[0].call.args["price"] > 300

    async with cp.watch("t") as changes:
        assert_type(await anext(changes), str)


def check_that_one_fits_the_other(cp: JsonCheckpointer) -> None:
    """A function that asks for less takes it."""
    six: Checkpointer[dict[str, Any]] = cp
    full: FullCheckpointer[dict[str, Any]] = cp
    some: Checkpointer[Any] = cp
    print(six, full, some)  # noqa: T201  # never run


def check_effects() -> None:
    """Arguments and results are read as JSON."""
    expensive: Policy = lambda effect: effect.args["price"] > 300  # noqa: E731

    async def pay(effect: Effect) -> dict[str, list[str]]:
        return {"receipts": [effect.args["to"].upper()]}

    handler: Handler = pay
    print(expensive, handler)  # noqa: T201  # never run


async def check_the_abilities(cp: Checkpointer[Turn]) -> None:
    """``isinstance`` narrows to an optional protocol."""
    if isinstance(cp, ListsThreads):
        assert_type(await cp.list_threads(prefix="a", limit=1), list[ThreadInfo])

    if isinstance(cp, KeepsReceipts):
        assert_type(await cp.list_calls("t"), list[CallRecord])

    if isinstance(cp, StatesDurability):
        assert_type(cp.durability, Durability)


def check_the_drivers() -> None:
    """A driver's class fits the protocols, the optional ones too."""
    memory: MemoryCheckpointer[Turn] = MemoryCheckpointer(message_type=Turn)
    sqlite: SQLiteCheckpointer[Turn] = SQLiteCheckpointer("x.db", message_type=Turn)
    six: list[Checkpointer[Turn]] = [memory, sqlite]
    lists: list[ListsThreads] = [memory, sqlite]
    reads: list[ReadsRanges[Turn]] = [memory, sqlite]
    keeps: list[KeepsReceipts] = [memory, sqlite]
    erases: list[ErasesThreads] = [memory, sqlite]
    trims: list[TrimsThreads] = [memory, sqlite]
    states: list[StatesDurability] = [memory, sqlite]
    print(six, lists, reads, keeps, erases, trims, states)  # noqa: T201  # never run
