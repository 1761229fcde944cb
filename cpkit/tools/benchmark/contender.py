"""What can be measured: a store behind the operations that the workloads do.

`Stored` puts any checkpointer behind them, through its public methods alone.
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

# Appends of a fill that are under way at once, and those at its end that are not: only
# one after another are sure to be in order, and what is read back is the end.
_AT_ONCE = 256
_IN_TURN = 20


class Contender:
    """One way to keep threads, to be measured beside others.

    ``driver`` is the kind of store and ``name`` who keeps it; ``abilities`` are the
    operations, by name, that it has (``append``, ``load``, ``tail``, ``calls``,
    ``extra``, ``open``), and only these are asked for. ``durability`` says in words
    what its acknowledgement is worth, and is known once it is open.
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
        """Return an unopened contender on the same store, to open and close."""
        raise NotImplementedError

    async def open(self) -> None:
        """Get ready; what it takes to create the store is done here."""
        raise NotImplementedError

    async def close(self) -> None:
        """Let go of everything but what is stored."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def native(self, messages: Sequence[Message]) -> list[Any]:
        """Return the messages as what `append` takes; this part is not timed."""
        return list(messages)

    def thread(self, label: str) -> str:
        """Return the id of a thread that nobody has used."""
        return f"{label}-{uuid4().hex[:12]}"

    async def append(self, thread: str, message: Any) -> None:
        """Add one message, durably."""
        raise NotImplementedError

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        """Add many messages as quickly as may be; this is not timed."""
        raise NotImplementedError

    async def forget(self, threads: Sequence[str]) -> None:
        """Let go of what is kept open or in memory for threads that are done with."""

    async def load(self, thread: str) -> list[Any]:
        """Return all messages, decoded."""
        raise NotImplementedError

    async def tail(self, thread: str, count: int) -> list[Any]:
        """Return the last messages."""
        raise NotImplementedError

    async def cycle(self, thread: str, name: str) -> JsonValue:
        """Claim a call, record its result, find it; return what was found."""
        raise NotImplementedError

    async def replay(self, thread: str, name: str) -> JsonValue:
        """Return the recorded result of a call that `cycle` has made."""
        raise NotImplementedError

    async def merge(self, thread: str, values: Mapping[str, JsonValue]) -> None:
        """Set keys of the thread's extra."""
        raise NotImplementedError

    async def extra(self, thread: str) -> Mapping[str, JsonValue]:
        """Return the thread's extra."""
        raise NotImplementedError


class Stored(Contender):
    """A checkpointer, by URL; what it is asked goes through its public methods.

    Its threads' ids start with ``prefix``, and `erase` deletes them again.
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
        """Measure this handle, which is open."""
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
        """Delete the threads made here; return how many stay, where it cannot."""
        if isinstance(self._cp, ErasesThreads):
            while self._threads:
                await self._cp.delete_thread(self._threads.pop(), forget_keys=True)

        return len(self._threads)

    async def append(self, thread: str, message: Any) -> None:
        await self._cp.append(thread, [message])

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        # One by one, as threads grow: a store may keep together what came together.
        rest = max(0, len(messages) - _IN_TURN)

        for start in range(0, rest, _AT_ONCE):
            some = messages[start : min(start + _AT_ONCE, rest)]
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
