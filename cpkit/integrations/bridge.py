"""Calls from any thread or event loop to the event loop of a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from cpkit.protocol import Checkpointer
from cpkit.sync import SyncCheckpointer, running_loop

__all__ = ["Bridge"]

T = TypeVar("T")


class Bridge:
    """Runs coroutines on a store's event loop, where its methods must be called.

    A `SyncCheckpointer` has its own loop. Any other checkpointer belongs to the loop
    that runs now. If no loop runs, ``RuntimeError`` is raised; with ``wait_for_loop``
    the checkpointer belongs to the loop of the first call.
    """

    def __init__(
        self,
        cp: Checkpointer[Any] | SyncCheckpointer[Any],
        *,
        wait_for_loop: bool = False,
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = running_loop()
        self._submit: Callable[[Coroutine[Any, Any, Any]], Future[Any]]

        if isinstance(cp, SyncCheckpointer):
            self.checkpointer = cp.checkpointer
            self._loop = cp.loop
            self._submit = cp.submit
            return

        self.checkpointer = cp
        self._submit = self._to_running_loop

        if self._loop is None and not wait_for_loop:
            raise RuntimeError(
                "no event loop runs here; make the saver on the loop that the store "
                "was opened on, or open the store with cpkit.sync.SyncCheckpointer"
            )

    async def go(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work on the store's loop, from this loop or another."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()

        if asyncio.get_running_loop() is self._loop:
            return await work

        result: T = await asyncio.wrap_future(self._submit(work))
        return result

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work on the store's loop, and block this thread until it is done.

        Raises ``RuntimeError`` on the store's loop itself, which would block for ever.
        """
        if running_loop() is self._loop:
            work.close()
            raise RuntimeError(
                "a synchronous method would block the event loop that the store lives "
                "on; use the async one (ainvoke, aget_state, aput), call it from "
                "another thread, or open the store with cpkit.sync.SyncCheckpointer"
            )

        future = self._submit(work)

        try:
            result: T = future.result()
        except BaseException:
            # An interrupt of this thread, if the future is not done.
            future.cancel()
            raise

        return result

    def _to_running_loop(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop is None or not self._loop.is_running():
            work.close()
            raise RuntimeError(
                "the event loop that the store was opened on does not run any more; "
                "for a program without a loop of its own, open the store with "
                "cpkit.sync.SyncCheckpointer"
            )

        return asyncio.run_coroutine_threadsafe(work, self._loop)
