"""A limit of time for each of a handle's operations, kept by one timer."""

from __future__ import annotations

import asyncio

__all__ = ["Deadline", "TimeLimit"]


class Deadline:
    """The end of one operation's time, and the task that runs the operation."""

    __slots__ = ("_cancelled_before", "at", "passed", "task")

    def __init__(self, task: asyncio.Task[object], at: float) -> None:
        self.task = task
        self.at = at
        self.passed = False
        self._cancelled_before = task.cancelling()

    def is_cancelled(self) -> bool:
        """Tell whether the task was cancelled during the operation."""
        return self.task.cancelling() > self._cancelled_before

    def is_timeout(self) -> bool:
        """Tell whether the limit cancelled the task, and nothing else did."""
        return self.passed and self.task.cancelling() == self._cancelled_before + 1


class TimeLimit:
    """Cancels the task of an operation that takes longer than ``seconds``.

    `start` an operation, and `end` it in a ``finally``. One timer serves all of them:
    ``asyncio.timeout`` sets and cancels a timer for each, which was measured to take
    6 of 66 µs of an append to Redis. Without ``seconds`` nothing is late.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._running: dict[Deadline, None] = {}  # the next to pass comes first
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> Deadline:
        """Return the deadline of an operation that the current task begins."""
        task = asyncio.current_task()
        assert task is not None

        if self.seconds is None:
            return Deadline(task, 0)

        loop = task.get_loop()
        deadline = Deadline(task, loop.time() + self.seconds)
        self._running[deadline] = None

        if self._timer is None:
            self._timer = loop.call_at(deadline.at, self._look, loop)

        return deadline

    def end(self, deadline: Deadline) -> None:
        """Forget an operation that has ended; take back the limit's cancellation."""
        self._running.pop(deadline, None)

        if deadline.passed:
            deadline.task.uncancel()

    def close(self) -> None:
        """Cancel the timer. No operation is running any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the operations that are late; set the timer for the next one."""
        self._timer = None

        for deadline in list(self._running):
            if deadline.at > loop.time():
                self._timer = loop.call_at(deadline.at, self._look, loop)
                break

            del self._running[deadline]
            deadline.passed = True
            deadline.task.cancel()
