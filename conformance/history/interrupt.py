"""Cancel an operation at its n-th await, or after some time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

__all__ = ["cancelled_after", "cancelled_at"]


async def cancelled_at(work: Coroutine[Any, Any, Any], suspension: int) -> bool:
    """Run work, cancel it at its n-th await, and return whether it was cancelled."""
    return await _was_cancelled(asyncio.create_task(_run(_Counted(work, suspension))))


async def cancelled_after(work: Coroutine[Any, Any, Any], seconds: float) -> bool:
    """Run work, cancel it after a time, and return whether it was cancelled."""
    task = asyncio.create_task(_run(work))
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    return await _was_cancelled(task)


async def _run(work: Any) -> None:
    await work


async def _was_cancelled(task: asyncio.Task[None]) -> bool:
    await asyncio.wait([task])

    if task.cancelled():
        return True

    task.result()
    return False


class _Counted:
    """Awaits a coroutine and cancels the current task at the n-th await."""

    def __init__(self, work: Coroutine[Any, Any, Any], suspension: int) -> None:
        self._work = work
        self._left = suspension

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        inner = self._work.__await__()

        try:
            waits = inner.send(None)

            while True:
                self._left -= 1

                if self._left == 0:
                    task.get_loop().call_soon(task.cancel)

                try:
                    sent = yield waits
                except BaseException as exc:
                    waits = inner.throw(exc)
                else:
                    waits = inner.send(sent)
        except StopIteration as stop:
            return stop.value
