"""Watching through a buffering wrapper."""

from __future__ import annotations

from typing import Any

from cpkit import MemoryCheckpointer, WatchesThreads
from cpkit.cadence import Cadence, with_cadence


async def test_a_buffered_message_shows_when_it_is_written() -> None:
    """The buffering wrapper watches the store: a flush wakes, a buffered append not."""
    async with (
        MemoryCheckpointer[Any]() as cp,
        with_cadence(cp, Cadence()) as buffered,
    ):
        assert isinstance(buffered, WatchesThreads)

        async with buffered.watch("t", "other") as changes:
            await buffered.append("t", [{"n": 1}])
            await cp.append("other", [{"n": 1}])
            assert await anext(changes) == "other"
            await buffered.flush()
            assert await anext(changes) == "t"
