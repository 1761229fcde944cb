"""Calls of a store: limited in time, repeated if they are proven not to have run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from cpkit.driver.backoff import backoff_pauses
from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import Store
from cpkit.driver.writes import Fate, StoreFailure
from cpkit.errors import BackendUnavailable, CheckpointerError

__all__ = ["StoreCalls", "is_late"]

T = TypeVar("T")

# Seconds for a cancelled call to end. After them the store counts as stuck.
_GRACE = 1.0


@dataclass(eq=False, slots=True)
class _Deadline:
    """The end of one call's time, and the task that waits for the call.

    ``fate`` is that of a write if the limit cancels it now.
    """

    task: asyncio.Task[object]
    cancelled_before: int
    at: float
    on_stuck: Callable[[Exception], None] | None
    pauses: Iterator[float]
    is_over: bool = False
    fate: Fate = "unknown"

    def is_timeout(self) -> bool:
        """Tell whether the limit cancelled the task, and nothing else did."""
        return self.is_over and self.task.cancelling() == self.cancelled_before + 1


def is_late(exc: BaseException) -> bool:
    """Tell whether an exception cancels a call of the store because of its limit."""
    return isinstance(exc, asyncio.CancelledError) and any(
        isinstance(arg, _Deadline) for arg in exc.args
    )


class StoreCalls:
    """The one way from a handle to its store.

    ``retry`` limits for how many seconds a call that did not run is repeated, within
    the ``timeout`` of the store.

    ``asyncio.timeout`` would set and cancel a timer for each call, which is a tenth of
    the calls of an append to Postgres, and wait for ever for a store that ignores the
    cancellation. Here all calls share one timer.
    """

    def __init__(self, lifecycle: Lifecycle, store: Store, retry: float) -> None:
        self.timeout = store.timeout
        self._lifecycle = lifecycle
        self._store = store
        self._retry = retry
        self._stuck = ""
        self._running: dict[_Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, query: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Return what the store answers, or raise the contract's error.

        Runs in the caller's task, and is cancelled with it. A read is safe to repeat.
        """
        self._lifecycle.in_flight += 1

        try:
            if self.timeout is None:
                return await query(*args)

            return await self.call(None, query, *args)
        except Exception as exc:
            raise self.error(exc, is_write=False) from exc
        finally:
            self._lifecycle.ended()

    async def close(self) -> None:
        """Close the store, also one that ignored a cancellation."""
        self._stuck = ""

        try:
            await self.read(self._store.close)
        finally:
            if self._timer is not None:
                self._timer.cancel()  # no call is under way any more

    async def call(
        self,
        on_stuck: Callable[[Exception], None] | None,
        query: Callable[..., Awaitable[T]],
        *args: Any,
    ) -> T:
        """Return what the store answers, or raise its error.

        A write has ``on_stuck``, a read has not. A write is repeated only if it did not
        run. If the store ignores its cancellation after ``timeout``, ``on_stuck`` is
        called with the failure, and every later call fails. Without a ``timeout`` a
        store limits and repeats its own waits.
        """
        deadline = None if self.timeout is None else self._begin(self.timeout, on_stuck)
        repeats = ("not sent", "unknown") if on_stuck is None else ("not sent",)

        try:
            while not self._stuck:
                try:
                    return await query(*args)
                except StoreFailure as exc:
                    if deadline is None or deadline.is_over or exc.fate not in repeats:
                        raise

                    if (pause := next(deadline.pauses, None)) is None:
                        raise

                deadline.fate = "not sent"
                await asyncio.sleep(pause)
                deadline.fate = "unknown"

            raise StoreFailure("not sent", self._stuck)
        except (asyncio.CancelledError, StoreFailure) as exc:
            if deadline is None or not deadline.is_timeout():
                raise

            fate = exc.fate if isinstance(exc, StoreFailure) else deadline.fate
            raise StoreFailure(fate, f"no answer within {self.timeout:g} s") from exc
        finally:
            if deadline is not None:
                self._end(deadline)

    def _pauses(self) -> Iterator[float]:
        """Yield the pauses before repeats, until the time for them is over."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._retry
        yield from takewhile(lambda _: clock() < until, backoff_pauses(0.01, 0.25))

    def _begin(
        self, timeout: float, on_stuck: Callable[[Exception], None] | None
    ) -> _Deadline:
        """Limit the time of a call that the current task makes."""
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        at = loop.time() + timeout
        deadline = _Deadline(task, task.cancelling(), at, on_stuck, self._pauses())
        self._running[deadline] = None

        # A timer that is set fires no later than this: it is for an older call.
        if self._timer is None:
            self._timer = loop.call_at(at, self._end_late, timeout)

        return deadline

    def _end(self, deadline: _Deadline) -> None:
        """Forget a call that has ended; take back the limit's cancellation."""
        self._running.pop(deadline, None)

        if deadline.is_over:
            deadline.task.uncancel()

    def _end_late(self, timeout: float) -> None:
        """Cancel the calls that are late; set the timer for the next one."""
        loop = asyncio.get_running_loop()
        now = loop.time()

        for deadline in [one for one in self._running if one.at <= now]:
            if not deadline.is_over:
                deadline.is_over = True
                deadline.at = now + min(_GRACE, timeout)
                deadline.task.cancel(deadline)
                continue

            del self._running[deadline]

            if deadline.on_stuck is not None:
                reason = f"it ignored the cancellation of a write after {timeout:g} s"
                self._stuck = f"{reason}: open the store again"
                deadline.on_stuck(StoreFailure("unknown", reason))

        ends = [one.at for one in self._running]
        self._timer = loop.call_at(min(ends), self._end_late, timeout) if ends else None

    def error(self, failure: Exception, *, is_write: bool) -> CheckpointerError:
        """Return the contract's error; callers of one batch do not share an object."""
        error: CheckpointerError

        if isinstance(failure, CheckpointerError):
            error = copy(failure)
        else:
            fate = failure.fate if isinstance(failure, StoreFailure) else "unknown"
            reason = f"unexpected {type(failure).__name__}: {failure}"
            error = BackendUnavailable(
                self._store.name,
                failure.reason if isinstance(failure, StoreFailure) else reason,
                maybe_applied=is_write and fate == "unknown",
                rejected=fate == "rejected",
            )

        error.__cause__ = failure.__cause__ or failure
        return error
