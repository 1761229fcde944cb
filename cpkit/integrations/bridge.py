"""Run coroutines on a store's event loop, from any thread or other loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_one
from typing import Any, TypeVar

from cpkit.protocol import Checkpointer
from cpkit.sync import SyncCheckpointer, running_loop

__all__ = ["Bridge", "completed"]

T = TypeVar("T")

# Seconds between two looks of a waiting caller whether the store's loop is still open.
_PAUSE = 1.0

_LOOP_ENDED = (
    "the event loop that the store was opened on does not run any more; for a program "
    "without a loop of its own, open the store with cpkit.sync.SyncCheckpointer"
)


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

        answer: asyncio.Future[T] = asyncio.wrap_future(self._submit(work))

        try:
            while not (await asyncio.wait([answer], timeout=_PAUSE))[0]:
                self._check_open(work)
        except BaseException:
            answer.cancel()
            raise

        # The store's loop cancels its tasks when it ends. This task is not cancelled.
        if answer.cancelled():
            raise RuntimeError(_LOOP_ENDED)

        return answer.result()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work on the store's loop, and block this thread until it is done.

        Raises ``RuntimeError`` on the store's loop itself, which the call would block.
        """
        if running_loop() is self._loop:
            work.close()
            raise RuntimeError(
                "a synchronous method would block the event loop that the store lives "
                "on; use the async one (ainvoke, aget_state, aput), call it from "
                "another thread, or open the store with cpkit.sync.SyncCheckpointer"
            )

        answer: Future[T] = self._submit(work)

        try:
            while not wait_for_one([answer], _PAUSE).done:
                self._check_open(work)

            return answer.result()
        except CancelledError:
            raise RuntimeError(_LOOP_ENDED) from None
        finally:
            answer.cancel()  # if this thread was interrupted, it is still running
            del answer  # the traceback of an error has this frame

    def _check_open(self, work: Coroutine[Any, Any, Any]) -> None:
        """Raise if the store's loop was closed before it ended the work."""
        if self._loop is not None and self._loop.is_closed():
            work.close()
            raise RuntimeError(_LOOP_ENDED)

    def _to_running_loop(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._running_loop(work))

    def _running_loop(
        self, work: Coroutine[Any, Any, Any]
    ) -> asyncio.AbstractEventLoop:
        if self._loop is None or not self._loop.is_running():
            work.close()
            raise RuntimeError(_LOOP_ENDED)

        return self._loop


async def completed(work: Coroutine[Any, Any, T]) -> T:
    """Complete the work even if the caller is cancelled, then raise the cancellation.

    The SDKs assume that no write is under way any more when a call ends, cancelled or
    not.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None

    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            cancelled = cancelled or exc

    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())

    return task.result()
