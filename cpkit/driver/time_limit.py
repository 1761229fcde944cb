"""A limit of time for each call of a store, kept by one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Deadline", "TimeLimit", "is_late"]

# Seconds for a cancelled call to end. After them the store counts as stuck.
_GRACE = 1.0


class Deadline:
    """The end of one call's time, and the task that waits for the call."""

    __slots__ = ("_cancelled_before", "at", "give_up", "is_over", "task")

    def __init__(
        self, task: asyncio.Task[object], at: float, give_up: Callable[[], None] | None
    ) -> None:
        self.task = task
        self.at = at
        self.give_up = give_up
        self.is_over = False
        self._cancelled_before = task.cancelling()

    def is_timeout(self) -> bool:
        """Tell whether the limit cancelled the task, and nothing else did."""
        return self.is_over and self.task.cancelling() == self._cancelled_before + 1


def is_late(exc: BaseException) -> bool:
    """Tell whether an exception cancels a call of the store because of its limit."""
    return isinstance(exc, asyncio.CancelledError) and any(
        isinstance(arg, Deadline) for arg in exc.args
    )


class TimeLimit:
    """Cancels the task of a call that takes longer than ``seconds``.

    ``asyncio.timeout`` sets and cancels a timer for each call, which is a tenth of the
    calls of an append to Postgres; and it waits for ever for a call that ignores the
    cancellation. Here ``give_up`` is called a second later.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Both are in the order of their times.
        self._running: dict[Deadline, None] = {}
        self._cancelled: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, give_up: Callable[[], None] | None = None) -> Deadline:
        """Limit the time of a call that the current task makes."""
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        deadline = Deadline(task, loop.time() + self._seconds, give_up)
        self._running[deadline] = None

        # A timer that is set fires no later than this: it is for an older call.
        if self._timer is None:
            self._timer = loop.call_at(deadline.at, self._look)

        return deadline

    def end(self, deadline: Deadline) -> None:
        """Forget a call that has ended; take back the limit's cancellation."""
        if deadline.is_over:
            self._cancelled.pop(deadline, None)
            deadline.task.uncancel()
        else:
            del self._running[deadline]

    def close(self) -> None:
        """Cancel the timer. No call is under way any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Cancel the calls that are late; set the timer for the next one."""
        loop = asyncio.get_running_loop()
        now = loop.time()

        for deadline in [*self._cancelled]:
            if deadline.at <= now:
                del self._cancelled[deadline]

                if deadline.give_up is not None:
                    deadline.give_up()

        for deadline in [*self._running]:
            if deadline.at > now:
                break

            del self._running[deadline]
            self._cancelled[deadline] = None
            deadline.at = now + min(_GRACE, self._seconds)
            deadline.is_over = True
            deadline.task.cancel(deadline)

        left = [
            next(iter(some)).at for some in (self._running, self._cancelled) if some
        ]
        self._timer = loop.call_at(min(left), self._look) if left else None
