"""A lease: one runner for each thread, across processes and machines.

::

    async with thread_lease(cp, "thread-1") as lease:
        data = await lease.load()
        version = 0 if data is None else data.version
        await cp.append("thread-1", messages, expected_version=version)

How it works
    The lease uses only the six methods, in a thread of its own. A term is a call whose
    key is the lease's key. The claim starts the term, and a failed result ends it.
    ``attempt`` is one higher for each term, and is the fencing ``token``. The holder
    renews the lease: it writes a heartbeat into the extra of the lease's thread. A
    waiting runner watches the heartbeat by its own monotonic clock, and ends the term
    of a holder without a new heartbeat for ``stale_after`` seconds. No clocks are
    compared.

What it promises
    One runner at a time, as long as no process is paused for longer than
    ``stale_after``. A holder that could not renew for so long counts its lease as lost,
    before another runner may take it.

What it does not promise
    A paused process does not know that it was paused. So begin with `Lease.load`, and
    pass ``expected_version`` to every append, starting from the version that the load
    returned. Once a successor has written, its predecessor gets ``VersionConflict``.
    Pass ``token`` to systems that compare tokens. If a person deletes the lease's own
    thread, another runner may start before the holder's next heartbeat finds that out.

When the lease is lost
    The block is cancelled at its next await, and `LeaseLost` is raised from the ``async
    with``, as ``asyncio.timeout`` does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from asyncio import current_task
from math import inf
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from cpkit.driver.backoff import Backoff
from cpkit.driver.ids import check_id
from cpkit.errors import BackendUnavailable, CheckpointerError
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, CheckpointData, JsonValue
from cpkit.terms import (
    LeaseState,
    LeaseWait,
    Terms,
    WaitHook,
    holder_of,
    stale_after_of,
)
from cpkit.waiting import StaleDetector, check_interval, check_limit
from cpkit.wakeups import Wakeups

__all__ = [
    "Lease",
    "LeaseLost",
    "LeaseTimeout",
    "LeaseWait",
    "own_lease",
    "this_process",
    "thread_lease",
]

log = logging.getLogger("cpkit.lease")

_active: WeakSet[Lease] = WeakSet()
"""The leases that tasks of this process hold."""


class LeaseLost(CheckpointerError):
    """The lease was taken over, could not be renewed in time, or was released."""

    def __init__(self, thread_id: str, token: int, reason: str) -> None:
        super().__init__(thread_id, token, reason)
        self.thread_id = thread_id
        self.token = token
        self.reason = reason

    def __str__(self) -> str:
        return f"the lease of thread {self.thread_id!r} was lost: {self.reason}"


class LeaseTimeout(CheckpointerError):
    """Another runner held the lease for the whole ``timeout``."""

    def __init__(self, thread_id: str, seconds: float, holder: str) -> None:
        super().__init__(thread_id, seconds, holder)
        self.thread_id = thread_id
        self.seconds = seconds
        self.holder = holder

    def __str__(self) -> str:
        waited = f"; waited {self.seconds:g} s for its lease" if self.seconds else ""
        return f"thread {self.thread_id!r} is run by {self.holder}{waited}"


def thread_lease(
    cp: Checkpointer[Any],
    thread_id: str,
    *,
    stale_after: float = 15.0,
    timeout: float | None = None,
    holder: str | None = None,
    backoff: Backoff | None = None,
    on_wait: WaitHook | None = None,
) -> Lease:
    """Return a context manager that holds the thread's lease while its block runs.

    A holder without a heartbeat for ``stale_after`` seconds loses its term. Waiting
    runners use the holder's value, which is stored in the term, and not their own.
    ``timeout`` bounds the wait; ``None`` means without limit. ``holder`` names the
    runner for people; the default is the host name and the process id. While another
    runner holds the lease, the log says at once for whom this runner waits and how
    long, and ``on_wait`` is called with a `LeaseWait`. A task that holds the lease
    already, and gives no timeout, gets ``LeaseTimeout`` at once: it would wait for
    itself.

    A ``stale_after`` or ``timeout`` that is not a finite number of seconds raises
    ``ValueError``. Entering raises ``LeaseTimeout`` and what the store raises. Leaving
    raises ``LeaseLost``.
    """
    return Lease(
        cp, thread_id, stale_after, timeout, holder or this_process(), backoff, on_wait
    )


class Lease:
    """The right to run one thread, for one term; made by `thread_lease`, entered once.

    ``token`` is the number of the term, higher than that of every earlier term.
    """

    def __init__(
        self,
        cp: Checkpointer[Any],
        thread_id: str,
        stale_after: float,
        timeout: float | None,
        holder: str,
        backoff: Backoff | None,
        on_wait: WaitHook | None,
    ) -> None:
        check_interval("stale_after", stale_after)
        check_limit("timeout", timeout)
        self.thread_id = check_id("thread_id", thread_id)
        self.token = 0
        self._cp = cp
        self._stale_after = stale_after
        self._timeout = timeout
        self._holder = holder
        self._backoff = backoff or Backoff()
        self._on_wait = on_wait
        self._terms = Terms(cp, self.thread_id, self._backoff, stale_after)
        self._keeps_mark = False
        self._reason: str | None = None
        self._cancelled_block = False
        self._cancelling = 0
        self._renewed_at = 0.0
        self._heartbeats = 0
        self._entered = False
        self._task: asyncio.Task[Any] | None = None
        self._renewer: asyncio.Task[None] | None = None
        self._call = self._terms.new_call(holder, stale_after)

    def __repr__(self) -> str:
        return f"<Lease of {self.thread_id!r}, token {self.token}>"

    @property
    def lost(self) -> bool:
        """Whether the lease is known to be lost, or was released."""
        return self._reason is not None

    async def load(self) -> CheckpointData[Any] | None:
        """Return a snapshot of the thread, loaded while the lease was certainly held.

        ``cp.load`` alone does not prove that. A runner that was paused before the load
        sees what its successor wrote, and would append after it. Raises ``LeaseLost``.
        """
        data = await self._cp.load(self.thread_id)
        await self.check()
        return data

    async def check(self) -> None:
        """Ask the store; raise ``LeaseLost`` unless this runner holds the lease now."""
        if self._reason is None and not await self._holds():
            self._lose("another runner took it over")

        if self._reason is not None:
            raise LeaseLost(self.thread_id, self.token, self._reason)

    def keep_mark(self) -> None:
        """Do not clear the mark of a dead run at exit: this term runs no agent."""
        self._keeps_mark = True

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError(f"{self!r} was entered before: call thread_lease again")

        self._entered = True

        try:
            await self._acquire()
        except (asyncio.CancelledError, BackendUnavailable):
            # The claim may have been applied, and no task would renew or release it.
            await self._release(raises=False)
            raise

        self._task = current_task()
        assert self._task is not None
        _active.add(self)
        self._cancelling = self._task.cancelling()
        self._renewer = asyncio.create_task(self._renew_until_lost())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._renewer is not None
        self._renewer.cancel()
        _active.discard(self)
        # A loss that is found from here on must not cancel the block, which has ended.
        task = self._task
        self._task = None
        stopped = False

        if self._cancelled_block:
            assert task is not None
            stopped = task.uncancel() <= self._cancelling

            if stopped and exc is None:
                await self._absorb_cancellation()

        try:
            await asyncio.wait([self._renewer])
        finally:
            reason = self._reason
            self._reason = reason or "it was released"

            if reason is None:
                try:
                    if exc is None and not self._keeps_mark:
                        await self._clear_died()
                finally:
                    await self._release(raises=exc is None)

        if reason and (exc is None or (stopped and kind is asyncio.CancelledError)):
            raise LeaseLost(self.thread_id, self.token, reason) from exc

    async def _absorb_cancellation(self) -> None:
        """Receive a cancellation that came after the block's last await."""
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            log.debug("the lease was lost after the last await of its block")

    # Acquire

    async def _acquire(self) -> None:
        clock = asyncio.get_running_loop().time
        deadline = inf if self._timeout is None else clock() + self._timeout

        while (record := await self._claim()) is not None:
            await self._wait_for_end(record, deadline)

    async def _wait_for_end(self, record: CallRecord, deadline: float) -> None:
        """Wait until another runner's term is over; end it once it is stale."""
        clock = asyncio.get_running_loop().time
        call_id, holder = record.call.call_id, holder_of(record)
        stale = StaleDetector(stale_after_of(record, self._stale_after))
        state = LeaseState(record, None, None)

        if self._timeout is None:
            self._check_not_own(call_id)

        async def read() -> JsonValue:
            nonlocal state
            state = await self._terms.look()
            return state.heartbeat

        if clock() < deadline:
            self._report_wait(record, stale.stale_after)

        async with Wakeups(self._cp, self._terms.lease_thread) as wakeups:
            for pause in self._backoff.pauses(stale.longest_pause):
                is_stale = await stale.is_stale(read)

                if state.term is None or state.term.call.call_id != call_id:
                    return

                if is_stale:
                    await self._terms.take_over(call_id)
                    return

                if (left := deadline - clock()) <= 0:
                    assert self._timeout is not None
                    raise LeaseTimeout(self.thread_id, self._timeout, holder)

                await wakeups.wait(min(pause, left), min(stale.longest_pause, left))

    def _report_wait(self, record: CallRecord, stale_after: float) -> None:
        wait = LeaseWait(self.thread_id, holder_of(record), record.attempt, stale_after)
        log.warning("%s", wait)

        if self._on_wait is not None:
            self._on_wait(wait)

    def _check_not_own(self, call_id: str) -> None:
        """Raise if the current task would wait for itself, for ever."""
        for lease in _active:
            if lease._call.call_id == call_id and lease._task is current_task():
                raise LeaseTimeout(
                    self.thread_id,
                    0.0,
                    "this task: pass its lease on, or set a timeout",
                )

    async def _claim(self) -> CallRecord | None:
        """Take the lease and return ``None``, or return the current term."""
        while True:
            asked = asyncio.get_running_loop().time()
            record = await self._terms.claim(self._call)
            call_id = record.call.call_id

            if call_id != self._call.call_id and record.erased:
                # The lease's thread was deleted. Its term shows nowhere, and holds the
                # key for ever.
                await self._terms.take_over(call_id)
                continue

            if call_id != self._call.call_id:
                return record

            if record.status == "issued":
                # Waiting runners count from the claim or later, so this is safe.
                self._renewed_at = asked
                self.token = record.attempt
                return None

            # The claim was applied, its answer was lost, and another runner has ended
            # the term since.
            self._call = self._terms.new_call(self._holder, self._stale_after)

    # Renew and release

    async def _renew_until_lost(self) -> None:
        """Renew the lease until this task is cancelled or the lease is lost."""
        clock = asyncio.get_running_loop().time

        while self._reason is None:
            # Not from now: the answer to the claim or to a renewal may have come late.
            due = self._renewed_at + self._stale_after / 3
            await asyncio.sleep(max(0.0, due - clock()))

            try:
                async with asyncio.timeout_at(self._renewed_at + self._stale_after):
                    await self._renew()
            except TimeoutError:
                self._lose(f"it could not be renewed for {self._stale_after:g} s")

    async def _renew(self) -> None:
        clock = asyncio.get_running_loop().time

        for pause in self._backoff.pauses(self._stale_after / 4):
            started = clock()
            # A new heartbeat in each try. The try before may have been applied, and
            # waiting runners count from what they saw then.
            self._heartbeats += 1

            try:
                if not await self._holds():
                    self._lose("another runner took it over")
                    return

                await self._terms.renew(self._call, self._heartbeats)
                self._renewed_at = started
                return
            except Exception:
                # Any exception: without a renewer the lease is lost, and the block
                # would not learn of it.
                log.warning(
                    "could not renew the lease of %r", self.thread_id, exc_info=True
                )

            await asyncio.sleep(pause)

    async def _holds(self) -> bool:
        return self._is_own((await self._terms.look()).term)

    def _is_own(self, term: CallRecord | None) -> bool:
        return term is not None and term.call.call_id == self._call.call_id

    def _lose(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            log.warning("the lease of %r was lost: %s", self.thread_id, reason)

            # If the block itself called `check`, that raises; do not cancel it too.
            if self._task is not None and self._task is not current_task():
                self._cancelled_block = True
                self._task.cancel()

    async def _clear_died(self) -> None:
        """Remove the mark that an earlier run died: this one ended well.

        Not if the term is over: the mark may be that of the next one.
        """
        try:
            state = await self._terms.look()

            if state.died is not None and self._is_own(state.term):
                await self._terms.clear_died()
        except CheckpointerError:
            log.warning(
                "could not remove the mark that a run of %r died",
                self.thread_id,
                exc_info=True,
            )

    async def _release(self, *, raises: bool) -> None:
        """End the term. Without ``raises``, what the store raises is only logged."""
        try:
            await self._end(raises)
        except asyncio.CancelledError:
            # Try again: it is idempotent. Without it, the next runner waits until the
            # term is stale.
            await self._end(raises=False)
            raise

    async def _end(self, raises: bool) -> None:
        try:
            await self._terms.end(self._call.call_id, "released")
        except CheckpointerError as exc:
            if raises and not isinstance(exc, BackendUnavailable):
                raise

            # The block did its work, or its own error counts more. The next runner
            # waits until the term is stale.
            log.warning(
                "could not release the lease of %r", self.thread_id, exc_info=True
            )


def own_lease(cp: Checkpointer[Any], thread_id: str) -> Lease | None:
    """Return the lease of the thread that the current task holds, if it does."""
    for lease in _active:
        if (
            lease._cp is cp
            and lease.thread_id == thread_id
            and lease._task is current_task()
            and not lease.lost
        ):
            return lease

    return None


def this_process() -> str:
    """Return the name of this process for people: its host and its id."""
    return f"{socket.gethostname()}:{os.getpid()}"
