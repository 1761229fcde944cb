"""Tools of the tests: a type for stores, a fast ledger, and a shop that charges."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from conformance.slowdown import slowdown
from cpkit import (
    CallRecord,
    Checkpointer,
    ErasesThreads,
    JsonValue,
    KeepsReceipts,
    ListsThreads,
    ToolCall,
)
from cpkit.effects import Decision, Effect, EffectLedger

__all__ = [
    "Counting",
    "OnlySix",
    "Plain",
    "Shop",
    "Store",
    "claim",
    "decision_on",
    "quick",
    "until",
]

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[P, Coroutine[Any, Any, T]]


class Store(Checkpointer[Any], KeepsReceipts, ErasesThreads, ListsThreads, Protocol):
    """A store with the optional abilities that the tests use."""


class OnlySix:
    """A store without any optional ability."""

    def __init__(self, cp: Checkpointer[Any]) -> None:
        self.load = cp.load
        self.append = cp.append
        self.save_extra = cp.save_extra
        self.record_issued = cp.record_issued
        self.record_result = cp.record_result
        self.find_completed = cp.find_completed


class Plain(OnlySix):
    """The six methods and receipts: the least that a ledger needs."""

    def __init__(self, cp: Any) -> None:
        super().__init__(cp)
        self.list_calls = cp.list_calls
        self.find_call = cp.find_call


class Counting:
    """A store that logs its calls."""

    def __init__(self, cp: Store) -> None:
        self.calls: list[str] = []
        self.load = self._logged(cp.load)
        self.append = self._logged(cp.append)
        self.save_extra = self._logged(cp.save_extra)
        self.record_issued = self._logged(cp.record_issued)
        self.record_result = self._logged(cp.record_result)
        self.find_completed = self._logged(cp.find_completed)
        self.list_calls = self._logged(cp.list_calls)
        self.find_call = self._logged(cp.find_call)
        self.delete_thread = self._logged(cp.delete_thread)
        self.list_threads = self._logged(cp.list_threads)

    def _logged(self, method: Method[P, T]) -> Method[P, T]:
        async def logged(*args: P.args, **options: P.kwargs) -> T:
            self.calls.append(method.__name__)
            return await method(*args, **options)

        return logged


def quick(cp: Checkpointer[Any], **options: Any) -> EffectLedger:
    """Return a ledger with a short timeout."""
    return EffectLedger(cp, **{"timeout": 10.0 * slowdown(), **options})


@dataclass
class Shop:
    """Counts charges. Each returns ``result``, or raises it if it is an exception."""

    result: Any = field(default_factory=lambda: {"charge": 1})
    effects: list[Effect] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event | None = None

    async def charge(self, effect: Effect) -> JsonValue:
        """Charge a card, once the gate is open."""
        self.effects.append(effect)
        self.began.set()

        if self.gate is not None:
            await self.gate.wait()

        if isinstance(self.result, Exception):
            raise self.result

        result: JsonValue = self.result
        return result

    def charge_now(self, effect: Effect) -> JsonValue:
        """Charge a card, as a sync handler."""
        self.effects.append(effect)
        result: JsonValue = self.result
        return result


async def until(condition: Any, timeout: float = 10.0) -> None:
    """Wait until an async condition holds; seconds of an idle machine."""
    async with asyncio.timeout(timeout * slowdown()):
        while not await condition():  # noqa: ASYNC110  # a store has no event
            await asyncio.sleep(0.005)


async def claim(
    cp: Checkpointer[Any],
    thread: str,
    key: str,
    args: Mapping[str, JsonValue],
    tool: str = "charge",
    stale_after: float = 0.2,
    **more: JsonValue,
) -> CallRecord:
    """Leave an issued effect behind, like a process that was killed."""
    stored: dict[str, JsonValue] = {
        "args": dict(args),
        "stale_after": stale_after,
        **more,
    }
    call = ToolCall(f"effect:{key[:8]}", tool, stored, key)
    assert await cp.record_issued(thread, call) is None
    record = await cp.record_issued(thread, call)
    assert record is not None
    return record


async def decision_on(ledger: EffectLedger, key: str, **which: Any) -> Decision | None:
    """Return the decision on a request."""
    request = await ledger.request(key, **which)
    assert request is not None
    return request.decision
