"""Calls of a store: limited in time, repeated if they are proven not to have run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar

from cpkit.driver.backoff import Backoff
from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import Store
from cpkit.driver.writes import Fate, Outcome, StoreFailure, Write
from cpkit.errors import BackendUnavailable, CheckpointerError

__all__ = ["Deadline", "StoreCalls", "TimeLimit", "is_late"]

T = TypeVar("T")

_BACKOFF = Backoff(first=0.01, longest=0.25)

# Seconds for a cancelled call to end. After them the store counts as stuck.
_GRACE = 1.0


class StoreCalls:
    """The one way from a handle to its store.

    ``timeout`` limits a call with all its repeats, in seconds. ``None`` is for a store
    that limits its own waiting; its calls are not repeated. ``retry`` limits for how
    many seconds a call that did not run is repeated.
    """

    def __init__(self, lifecycle: Lifecycle, store: Store, retry: float) -> None:
        self.timeout = store.timeout
        self._lifecycle = lifecycle
        self._store = store
        self._retry = retry
        self._stuck: StoreFailure | None = None
        self._limit = None if store.timeout is None else TimeLimit(store.timeout)

    async def read(self, query: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Return what the store answers, or raise the contract's error.

        Runs in the caller's task, and is cancelled with it. A read is safe to repeat.
        """
        self._lifecycle.in_flight += 1

        try:
            if self._stuck is not None:
                raise self._stuck

            if self._limit is None:
                return await query(*args)

            return await self._read_in_time(self._limit, query, *args)
        except Exception as exc:
            raise self.error(exc, is_write=False) from exc
        finally:
            self._lifecycle.ended()

    async def close(self) -> None:
        """Close the store, also one that ignored a cancellation."""
        self._stuck = None

        try:
            await self.read(self._store.close)
        finally:
            if self._limit is not None:
                self._limit.close()

    async def _read_in_time(
        self, limit: TimeLimit, query: Callable[..., Awaitable[T]], *args: Any
    ) -> T:
        pauses: Iterator[float] | None = None
        deadline = limit.begin()

        try:
            while True:
                try:
                    return await query(*args)
                except StoreFailure as failure:
                    pauses = pauses or self._pauses()

                    if failure.fate == "rejected" or deadline.is_over:
                        raise

                    if (pause := next(pauses, None)) is None:
                        raise

                await asyncio.sleep(pause)
        except (asyncio.CancelledError, StoreFailure) as exc:
            if not deadline.is_timeout():
                raise

            raise self._late("not sent") from exc
        finally:
            limit.end(deadline)

    def _pauses(self) -> Iterator[float]:
        """Yield the pauses before repeats, until the time for them is over."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._retry

        for pause in _BACKOFF.pauses():
            if clock() >= until:
                return

            yield pause

    async def commit(
        self, writes: list[Write], on_stuck: Callable[[Exception], None]
    ) -> Sequence[Outcome | Exception]:
        """Return an outcome for each write, or the exception that stands for it.

        If the store ignores a cancellation after ``timeout``, ``on_stuck`` is called
        with the failure of these writes, and every later call fails.
        """
        if self._stuck is not None:
            return [self._stuck] * len(writes)

        pauses: Iterator[float] | None = None
        fate: Fate = "unknown"
        limit = self._limit
        deadline = (
            None if limit is None else limit.begin(partial(self._mark_stuck, on_stuck))
        )

        try:
            while True:
                try:
                    outcomes = await self._store.commit(writes)

                    if outcomes and len(outcomes) == len(writes):
                        return outcomes

                    raise TypeError(
                        f"commit must return one outcome for each of {len(writes)} "
                        f"writes, not {outcomes!r:.100}"
                    )
                except Exception as exc:
                    failure = exc

                if deadline is None or deadline.is_over or not _did_not_run(failure):
                    break

                pauses = pauses or self._pauses()

                if (pause := next(pauses, None)) is None:
                    break

                fate = "not sent"
                await asyncio.sleep(pause)
                fate = "unknown"

            return await self._one_by_one(writes, deadline, failure)
        except asyncio.CancelledError:
            if deadline is None or not deadline.is_timeout():
                raise

            return [self._late(fate)] * len(writes)
        finally:
            if limit is not None and deadline is not None:
                limit.end(deadline)

    async def _one_by_one(
        self, writes: list[Write], deadline: Deadline | None, failure: Exception
    ) -> Sequence[Outcome | Exception]:
        """Repeat a refused batch one write at a time: one of them may be the reason."""
        outcomes: list[Outcome | Exception] = []

        if len(writes) > 1 and _wrote_nothing(failure):
            for write in writes:
                if deadline is not None and deadline.is_over:
                    break

                try:
                    (outcome,) = await self._store.commit([write])
                    outcomes.append(outcome)
                except asyncio.CancelledError:
                    if deadline is None or not deadline.is_timeout():
                        raise

                    outcomes.append(self._late("unknown"))
                except Exception as exc:
                    outcomes.append(exc)

        # The others were not tried again: nothing of them was written.
        return outcomes + [failure] * (len(writes) - len(outcomes))

    def _mark_stuck(self, on_stuck: Callable[[Exception], None]) -> None:
        reason = f"it ignored the cancellation of a write after {self.timeout:g} s"
        self._stuck = StoreFailure("not sent", f"{reason}: open the store again")
        on_stuck(StoreFailure("unknown", reason))

    def _late(self, fate: Fate) -> StoreFailure:
        return StoreFailure(fate, f"no answer within {self.timeout:g} s")

    def error(self, failure: Exception, *, is_write: bool) -> CheckpointerError:
        """Return the contract's error; callers of one batch do not share an object."""
        error: CheckpointerError

        if isinstance(failure, CheckpointerError):
            error = copy(failure)
        elif isinstance(failure, StoreFailure):
            error = BackendUnavailable(
                self._store.name,
                failure.reason,
                maybe_applied=is_write and failure.fate == "unknown",
                rejected=failure.fate == "rejected",
            )
        else:
            error = BackendUnavailable(
                self._store.name,
                f"unexpected {type(failure).__name__}: {failure}",
                maybe_applied=is_write,
            )

        error.__cause__ = failure.__cause__ or failure
        return error


def _did_not_run(failure: Exception) -> bool:
    return isinstance(failure, StoreFailure) and failure.fate == "not sent"


def _wrote_nothing(failure: Exception) -> bool:
    if isinstance(failure, StoreFailure):
        return failure.fate != "unknown"

    return isinstance(failure, CheckpointerError)


class Deadline:
    """The end of one call's time, and the task that waits for the call."""

    __slots__ = ("_cancelled_before", "at", "is_over", "on_stuck", "task")

    def __init__(
        self, task: asyncio.Task[object], at: float, on_stuck: Callable[[], None] | None
    ) -> None:
        self.task = task
        self.at = at
        self.on_stuck = on_stuck
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
    cancellation. Here ``on_stuck`` is called a second later.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Both are in the order of their times.
        self._running: dict[Deadline, None] = {}
        self._cancelled: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, on_stuck: Callable[[], None] | None = None) -> Deadline:
        """Limit the time of a call that the current task makes."""
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        deadline = Deadline(task, loop.time() + self._seconds, on_stuck)
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

                if deadline.on_stuck is not None:
                    deadline.on_stuck()

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
