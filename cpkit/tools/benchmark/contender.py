"""The interface between a measured store and the workloads.

`Stored` implements it for any checkpointer, with the checkpointer's public methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, Self
from uuid import uuid4

from cpkit.protocol import (
    Checkpointer,
    ErasesThreads,
    ReadsRanges,
    StatesDurability,
)
from cpkit.records import JsonValue, ToolCall
from cpkit.registry import open_checkpointer
from cpkit.tools.benchmark.messages import Message

__all__ = ["CALL_ARGS", "CALL_RESULT", "Contender", "Stored"]

Kind = Literal["floor", "cpkit", "peer"]

CALL_ARGS: dict[str, JsonValue] = {"amount": 1000, "currency": "eur", "card": "4WQ150"}
CALL_RESULT: JsonValue = {"charge": "ch_1", "status": "succeeded"}

# `fill` runs this many appends concurrently, and the last ones one after another: the
# workloads read the last messages back, and concurrent appends have no fixed order.
_CONCURRENT_APPENDS = 256
_ORDERED_APPENDS = 20


class Contender:
    """One way to store threads, measured together with others.

    ``driver`` is the kind of store, and ``name`` the library that uses it.
    ``abilities`` are the operations that it implements (``append``, ``load``, ``tail``,
    ``calls``, ``extra``, ``open``); the workloads call no others. ``durability`` is a
    text about what an acknowledged write survives, and is set once it is open.
    """

    kind: Kind = "peer"
    abilities: frozenset[str] = frozenset({"append", "load", "open"})
    durability = ""

    def __init__(self, driver: str, name: str) -> None:
        self.driver = driver
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.driver}: {self.name}>"

    def another(self) -> Contender:
        """Return a contender on the same store that is not open."""
        raise NotImplementedError

    async def open(self) -> None:
        """Create the store if it is missing, and connect to it."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release everything except the stored data."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def native(self, messages: Sequence[Message]) -> list[Any]:
        """Convert messages to the type that `append` takes; this is not timed."""
        return list(messages)

    def thread(self, label: str) -> str:
        """Return a new thread id."""
        return f"{label}-{uuid4().hex[:12]}"

    async def append(self, thread: str, message: Any) -> None:
        """Append one message durably."""
        raise NotImplementedError

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        """Append many messages as fast as possible; this is not timed."""
        raise NotImplementedError

    async def forget(self, threads: Sequence[str]) -> None:
        """Drop caches and open files of threads that are not used any more."""

    async def load(self, thread: str) -> list[Any]:
        """Return all messages, decoded."""
        raise NotImplementedError

    async def tail(self, thread: str, count: int) -> list[Any]:
        """Return the last messages."""
        raise NotImplementedError

    async def cycle(self, thread: str, name: str) -> JsonValue:
        """Claim a call, record its result, and return the result that is found."""
        raise NotImplementedError

    async def replay(self, thread: str, name: str) -> JsonValue:
        """Return the recorded result of an earlier `cycle`."""
        raise NotImplementedError

    async def merge(self, thread: str, values: Mapping[str, JsonValue]) -> None:
        """Merge keys into the thread's extra."""
        raise NotImplementedError

    async def extra(self, thread: str) -> Mapping[str, JsonValue]:
        """Return the thread's extra."""
        raise NotImplementedError


class Stored(Contender):
    """A checkpointer, opened by URL and used through its public methods.

    The ids of its threads start with ``prefix``. `erase` deletes these threads.
    """

    kind: Kind = "cpkit"

    def __init__(
        self, driver: str, url: str, *, name: str = "cpkit", prefix: str = "bench"
    ) -> None:
        super().__init__(driver, name)
        self.url = url
        self.prefix = prefix
        self._threads: set[str] = set()
        self._stack = AsyncExitStack()
        self._cp: Checkpointer[Any]

    def another(self) -> Stored:
        return Stored(self.driver, self.url, name=self.name, prefix=self.prefix)

    async def open(self) -> None:
        self.use(await self._stack.enter_async_context(open_checkpointer(self.url)))

    def use(self, cp: Checkpointer[Any]) -> None:
        """Measure this open handle."""
        self._cp = cp
        self.abilities = frozenset(
            {"append", "load", "calls", "extra", "open"}
            | ({"tail"} if isinstance(cp, ReadsRanges) else set())
        )

        if isinstance(cp, StatesDurability):
            self.durability = str(cp.durability)

    async def close(self) -> None:
        await self._stack.aclose()

    def thread(self, label: str) -> str:
        thread = f"{self.prefix}:{super().thread(label)}"
        self._threads.add(thread)
        return thread

    async def erase(self) -> int:
        """Delete the threads of this contender; return how many cannot be deleted."""
        if isinstance(self._cp, ErasesThreads):
            while self._threads:
                await self._cp.delete_thread(self._threads.pop(), forget_keys=True)

        return len(self._threads)

    async def append(self, thread: str, message: Any) -> None:
        await self._cp.append(thread, [message])

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        # One message for each append, as in real use: a store may keep the messages of
        # one append together, and read them faster.
        rest = max(0, len(messages) - _ORDERED_APPENDS)

        for start in range(0, rest, _CONCURRENT_APPENDS):
            some = messages[start : min(start + _CONCURRENT_APPENDS, rest)]
            await asyncio.gather(*(self.append(thread, one) for one in some))

        for one in messages[rest:]:
            await self.append(thread, one)

    async def load(self, thread: str) -> list[Any]:
        data = await self._cp.load(thread)
        return [] if data is None else data.messages

    async def tail(self, thread: str, count: int) -> list[Any]:
        assert isinstance(self._cp, ReadsRanges)
        found: list[Any] = await self._cp.read(thread, -count)
        return found

    async def cycle(self, thread: str, name: str) -> JsonValue:
        key = f"{thread}:{name}"
        call = ToolCall(name, "charge", CALL_ARGS, key)
        await self._cp.record_issued(thread, call)
        await self._cp.record_result(thread, name, CALL_RESULT)
        return await self.replay(thread, name)

    async def replay(self, thread: str, name: str) -> JsonValue:
        record = await self._cp.find_completed(f"{thread}:{name}")
        return None if record is None else record.result

    async def merge(self, thread: str, values: Mapping[str, JsonValue]) -> None:
        await self._cp.save_extra(thread, values)

    async def extra(self, thread: str) -> Mapping[str, JsonValue]:
        data = await self._cp.load(thread)
        return {} if data is None else data.extra
