"""A pytest plugin: the stores of events in MCP's own tests become cpkit's.

`test_frameworks_own_tests` runs the tests of the MCP SDK with it, without their
``conftest.py``, which needs packages of its own.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import anyio
import pytest

from cpkit import MemoryCheckpointer
from cpkit.integrations.mcp import EventStore


class Substitute(EventStore):
    """Events of one session in memory, with what the tests' own store has."""

    def __init__(self) -> None:
        super().__init__(MemoryCheckpointer[Any](), "session")
        self._is_open = False
        self._stored: defaultdict[int, anyio.Event] = defaultdict(anyio.Event)

    async def store_event(self, stream_id: str, message: Any) -> str:
        await self._open()
        number = await super().store_event(stream_id, message)
        self._stored[int(number)].set()
        return number

    async def replay_events_after(self, last_event_id: str, send: Any) -> str | None:
        await self._open()
        return await super().replay_events_after(last_event_id, send)

    async def _open(self) -> None:
        """Open the store, on the loop of the test."""
        if not self._is_open:
            self._is_open = True
            await self._cp.__aenter__()  # type: ignore[attr-defined]  # a handle

    async def wait_until_stored(self, count: int) -> None:
        """Wait until this many events are stored."""
        await self._stored[count].wait()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of the tests."""
    return "asyncio"


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        for name in ("SequencedEventStore", "SimpleEventStore"):
            if hasattr(item.module, name):
                setattr(item.module, name, Substitute)
