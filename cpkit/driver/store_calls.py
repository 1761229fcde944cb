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

__all__ = ["StoreCalls"]

T = TypeVar("T")

# Seconds for a cancelled commit to end. After them the store counts as stuck.
_GRACE = 1.0

_BACKOFF = Backoff(first=0.01, longest=0.25)


class _TimeLimit:
    """Cancels the current task after ``seconds``; then, a second later, gives it up.

    ``asyncio.timeout`` cancels only once: it would wait for ever for a store that
    ignores the cancellation.
    """

    __slots__ = ("_give_up", "_task", "_timer", "is_over")

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.is_over = False
        self._task = task
        self._give_up = give_up
        self._timer = task.get_loop().call_later(seconds, self._cancel)

    def _cancel(self) -> None:
        self.is_over = True
        self._task.cancel()
        self._timer = self._task.get_loop().call_later(_GRACE, self._give_up)

    def end(self) -> None:
        self._timer.cancel()

        if self.is_over:
            self._task.uncancel()


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

    async def read(self, query: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Return what the store answers, or raise the contract's error.

        Runs in the caller's task, and is cancelled with it. A read is safe to repeat.
        """
        limit: asyncio.Timeout | None = None
        self._lifecycle.in_flight += 1

        try:
            if self._stuck is not None:
                raise self._stuck

            if self.timeout is None:
                return await query(*args)

            async with asyncio.timeout(self.timeout) as limit:
                return await self._repeat(limit, query, *args)
        except Exception as exc:
            if limit is not None and limit.expired():
                raise self.error(self._late("not sent"), is_write=False) from exc

            raise self.error(exc, is_write=False) from exc
        finally:
            self._lifecycle.ended()

    async def close(self) -> None:
        """Close the store, also one that ignored a cancellation."""
        self._stuck = None
        await self.read(self._store.close)

    async def _repeat(
        self, limit: asyncio.Timeout, query: Callable[..., Awaitable[T]], *args: Any
    ) -> T:
        pauses: Iterator[float] | None = None

        while True:
            try:
                return await query(*args)
            except StoreFailure as failure:
                pauses = pauses or self._pauses()

                if failure.fate == "rejected" or limit.expired():
                    raise

                if (pause := next(pauses, None)) is None:
                    raise

            await asyncio.sleep(pause)

    def _pauses(self) -> Iterator[float]:
        """Yield the pauses before repeats, until the time for them is over."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._retry

        for pause in _BACKOFF.pauses():
            if clock() >= until:
                return

            yield pause

    async def commit(
        self, writes: list[Write], give_up: Callable[[Exception], None]
    ) -> Sequence[Outcome | Exception]:
        """Return an outcome for each write, or the exception that stands for it.

        If the store ignores a cancellation after ``timeout``, ``give_up`` is called
        with the failure of these writes, and every later call fails.
        """
        if self._stuck is not None:
            return [self._stuck] * len(writes)

        limit: _TimeLimit | None = None
        pauses: Iterator[float] | None = None
        fate: Fate = "unknown"

        if self.timeout is not None:
            limit = _TimeLimit(self.timeout, partial(self._give_up, give_up))

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

                if limit is None or limit.is_over or not _did_not_run(failure):
                    break

                pauses = pauses or self._pauses()

                if (pause := next(pauses, None)) is None:
                    break

                fate = "not sent"
                await asyncio.sleep(pause)
                fate = "unknown"

            return await self._one_by_one(writes, limit, failure)
        except asyncio.CancelledError:
            if limit is None or not limit.is_over:
                raise

            return [self._late(fate)] * len(writes)
        finally:
            if limit is not None:
                limit.end()

    async def _one_by_one(
        self, writes: list[Write], limit: _TimeLimit | None, failure: Exception
    ) -> Sequence[Outcome | Exception]:
        """Repeat a refused batch one write at a time: one of them may be the reason."""
        outcomes: list[Outcome | Exception] = []

        if len(writes) > 1 and _wrote_nothing(failure):
            for write in writes:
                if limit is not None and limit.is_over:
                    break

                try:
                    (outcome,) = await self._store.commit([write])
                    outcomes.append(outcome)
                except asyncio.CancelledError:
                    if limit is None or not limit.is_over:
                        raise

                    outcomes.append(self._late("unknown"))
                except Exception as exc:
                    outcomes.append(exc)

        # The others were not tried again: nothing of them was written.
        return outcomes + [failure] * (len(writes) - len(outcomes))

    def _give_up(self, give_up: Callable[[Exception], None]) -> None:
        reason = f"it ignored the cancellation of a write after {self.timeout:g} s"
        self._stuck = StoreFailure("not sent", f"{reason}: open the store again")
        give_up(StoreFailure("unknown", reason))

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
