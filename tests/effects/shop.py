"""What the tests work with: a store's type, a quick ledger, and a shop to charge at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from cpkit import (
    CallRecord,
    Checkpointer,
    ErasesThreads,
    JsonValue,
    KeepsReceipts,
    ListsThreads,
    ToolCall,
)
from cpkit.effects import Backoff, Effect, EffectLedger

__all__ = ["Counting", "OnlySix", "Shop", "Store", "claim", "quick", "until"]

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[P, Coroutine[Any, Any, T]]

QUICK = Backoff(0.001, 0.02)


class Store(Checkpointer[Any], KeepsReceipts, ErasesThreads, ListsThreads, Protocol):
    """A store as the tests look into it."""


class OnlySix:
    """A store without any optional ability."""

    def __init__(self, cp: Checkpointer[Any]) -> None:
        self.load = cp.load
        self.append = cp.append
        self.save_extra = cp.save_extra
        self.record_issued = cp.record_issued
        self.record_result = cp.record_result
        self.find_completed = cp.find_completed


class Counting:
    """A store that notes what is asked of it, with or without its other abilities."""

    def __init__(self, cp: Store, receipts: bool) -> None:
        self.asked: list[str] = []
        self.load = self._noted(cp.load)
        self.append = self._noted(cp.append)
        self.save_extra = self._noted(cp.save_extra)
        self.record_issued = self._noted(cp.record_issued)
        self.record_result = self._noted(cp.record_result)
        self.find_completed = self._noted(cp.find_completed)

        if receipts:
            self.list_calls = self._noted(cp.list_calls)
            self.find_call = self._noted(cp.find_call)
            self.delete_thread = self._noted(cp.delete_thread)

    def _noted(self, method: Method[P, T]) -> Method[P, T]:
        async def noted(*args: P.args, **options: P.kwargs) -> T:
            self.asked.append(method.__name__)
            return await method(*args, **options)

        return noted


def quick(cp: Checkpointer[Any], **options: Any) -> EffectLedger:
    """Return a ledger that looks often and gives up soon."""
    return EffectLedger(cp, **{"backoff": QUICK, "timeout": 10.0, **options})


@dataclass
class Shop:
    """Counts the charges; ``result`` is what each returns, or raises."""

    result: Any = field(default_factory=lambda: {"charge": 1})
    effects: list[Effect] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event | None = None

    async def charge(self, effect: Effect) -> JsonValue:
        """Charge a card, when the gate is open."""
        self.effects.append(effect)
        self.began.set()

        if self.gate is not None:
            await self.gate.wait()

        if isinstance(self.result, Exception):
            raise self.result

        result: JsonValue = self.result
        return result

    def charge_now(self, effect: Effect) -> JsonValue:
        """Charge a card in a sync handler."""
        self.effects.append(effect)
        result: JsonValue = self.result
        return result


async def until(condition: Any, patience: float = 10.0) -> None:
    """Wait until an async condition holds."""
    async with asyncio.timeout(patience):
        while not await condition():  # noqa: ASYNC110  # in a store, no event tells
            await asyncio.sleep(0.005)


async def claim(
    cp: Checkpointer[Any],
    thread: str,
    key: str,
    args: Mapping[str, JsonValue],
    tool: str = "charge",
) -> CallRecord:
    """Leave an issued effect behind, as a process that was killed does."""
    call = ToolCall(f"effect:{key[:8]}", tool, {"args": dict(args)}, key)
    assert await cp.record_issued(thread, call) is None
    record = await cp.record_issued(thread, call)
    assert record is not None
    return record
