"""Watching through the synchronous facade and through a buffering wrapper."""

from __future__ import annotations

import threading
from typing import Any

from cpkit import Closed, MemoryCheckpointer, WatchesThreads
from cpkit.cadence import Cadence, with_cadence
from cpkit.sync import SyncCheckpointer


def test_a_thread_without_a_loop_watches() -> None:
    """The facade's watch is a plain context manager of a plain iterator."""
    with SyncCheckpointer("memory://") as cp:
        watching: Any = cp

        with watching.watch("t") as changes:
            cp.append("t", [{"n": 1}])
            assert next(changes) == "t"

        assert next(changes, None) is None


def test_closing_ends_a_watch_in_another_thread() -> None:
    """close does not wait for a thread that watches; that thread gets Closed."""
    seen: list[BaseException] = []
    entered = threading.Event()
    cp = SyncCheckpointer("memory://")

    def watch() -> None:
        watching: Any = cp

        with watching.watch("t") as changes:
            entered.set()

            try:
                next(changes)
            except BaseException as exc:
                seen.append(exc)

    with cp:
        thread = threading.Thread(target=watch)
        thread.start()
        entered.wait()

    thread.join()
    assert [type(one) for one in seen] == [Closed]


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
