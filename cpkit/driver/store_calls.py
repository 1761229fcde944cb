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
from cpkit.driver.time_limit import Deadline, TimeLimit
from cpkit.driver.writes import Fate, Outcome, StoreFailure, Write
from cpkit.errors import BackendUnavailable, CheckpointerError

__all__ = ["StoreCalls"]

T = TypeVar("T")

_BACKOFF = Backoff(first=0.01, longest=0.25)


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
        self, writes: list[Write], give_up: Callable[[Exception], None]
    ) -> Sequence[Outcome | Exception]:
        """Return an outcome for each write, or the exception that stands for it.

        If the store ignores a cancellation after ``timeout``, ``give_up`` is called
        with the failure of these writes, and every later call fails.
        """
        if self._stuck is not None:
            return [self._stuck] * len(writes)

        pauses: Iterator[float] | None = None
        fate: Fate = "unknown"
        limit = self._limit
        deadline = (
            None if limit is None else limit.begin(partial(self._give_up, give_up))
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
