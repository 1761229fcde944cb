"""A lease: one runner for each thread, across processes and machines.

::

    async with thread_lease(cp, "thread-1") as lease:
        data = await lease.load()
        version = 0 if data is None else data.version
        await cp.append("thread-1", messages, expected_version=version)

How it works
    The lease uses only the six methods, in a thread of its own (`cpkit.runs`). A term
    is a call whose key is the lease's key. The claim starts the term, and a failed
    result ends it. ``attempt`` is one higher for each term, and is the fencing
    ``token``. The holder renews the lease: it writes a heartbeat. A waiting runner
    watches the heartbeat by its own monotonic clock, and ends the term of a holder
    without a new heartbeat for ``stale_after`` seconds. No clocks are compared.

When a run has ended
    The block is a run of the thread. It has ended well if it raised nothing (or only
    ``EffectDenied``, or ``EffectTimeout`` for a request that is not decided yet), and
    if no effect that began in it is still open. Every other run is unfinished, also
    after Ctrl-C or a cancelled web request: the thread stays on the list of runs
    (``cpkit runs``), and a worker runs it again.

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
from collections.abc import Iterator
from contextvars import ContextVar
from math import inf
from types import TracebackType
from typing import Any, Literal, Self

from cpkit.driver.backoff import backoff_pauses
from cpkit.driver.ids import check_id
from cpkit.errors import BackendUnavailable, CheckpointerError, VersionConflict
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, CheckpointData, JsonValue
from cpkit.runs.threads import RunState, RunThread, Wake, holder_of, stale_after_of
from cpkit.runs.waiting import (
    STALE_AFTER,
    StaleDetector,
    Wakeups,
    check_interval,
    check_limit,
    run_shielded,
)

__all__ = [
    "Lease",
    "LeaseLost",
    "LeaseTimeout",
    "held_leases",
    "note_effect",
    "this_process",
    "thread_lease",
]

log = logging.getLogger("cpkit.lease")

_held: ContextVar[tuple[Lease, ...]] = ContextVar("cpkit leases", default=())
"""The leases of the current task and of those that started it, outermost first."""


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
    stale_after: float = STALE_AFTER,
    timeout: float | None = None,
    holder: str | None = None,
) -> Lease:
    """Return a context manager that holds the thread's lease while its block runs.

    A holder without a heartbeat for ``stale_after`` seconds loses its term. Waiting
    runners use the holder's value, which is stored in the term, and not their own.
    ``timeout`` bounds the wait; ``None`` means without limit. ``holder`` names the
    runner for people; the default is the host name and the process id. While another
    runner holds the lease, the log says at once for whom this runner waits and how
    long. A task that holds the lease already, and gives no timeout, gets
    ``LeaseTimeout`` at once: it would wait for itself.

    A ``stale_after`` or ``timeout`` that is not a finite number of seconds raises
    ``ValueError``. Entering raises ``LeaseTimeout`` and what the store raises. Leaving
    raises ``LeaseLost``.
    """
    return Lease(cp, thread_id, stale_after, timeout, holder or this_process())


class Lease:
    """The right to run one thread, for one term; made by `thread_lease`, entered once.

    ``token`` is the number of the term, higher than that of every earlier term.
    ``wakes`` says why the thread needed a run when the term began, with the events that
    were recorded for it.
    """

    unattended = False
    """Whether a worker runs the thread, so that an effect does not wait for people."""

    def __init__(
        self,
        cp: Checkpointer[Any],
        thread_id: str,
        stale_after: float,
        timeout: float | None,
        holder: str,
    ) -> None:
        check_interval("stale_after", stale_after)
        check_limit("timeout", timeout)
        self.thread_id = check_id("thread_id", thread_id)
        self.token = 0
        self.began = RunState()
        self.seen: set[str] = set()
        """Call ids of requests that need no further run once this one ends well."""
        self.effects: dict[str, Literal["running", "waiting"]] = {}
        """Effects that began in this run and have no outcome; by key. Those that are
        ``waiting`` wait for a person, whose decision wakes the thread."""
        self._cp = cp
        self._stale_after = stale_after
        self._timeout = timeout
        self._holder = holder
        self._run = RunThread(cp, self.thread_id)
        self._term = self._run.new_term(holder, stale_after)
        self._runs_agent = True
        self._reason: str | None = None
        self._cancelled_block = False
        self._cancelling = 0
        self._renewed_at = 0.0
        self._heartbeats = 0
        self._entered = False
        self._task: asyncio.Task[Any] | None = None
        self._renewer: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Lease of {self.thread_id!r}, token {self.token}>"

    @property
    def lost(self) -> bool:
        """Whether the lease is known to be lost, or was released."""
        return self._reason is not None

    @property
    def term_id(self) -> str:
        """The id of the term's call, which the calls made under it carry."""
        return self._term.call_id

    @property
    def wakes(self) -> tuple[Wake, ...]:
        """Why the thread needed a run when the term began."""
        return self.began.wakes

    @property
    def is_unfinished(self) -> bool:
        """Whether an effect of this run is open, and not only waits for a person."""
        return "running" in self.effects.values()

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

    def run_no_agent(self) -> None:
        """Say that this term runs no agent, so that what called for a run stays."""
        self._runs_agent = False

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError(f"{self!r} was entered before: call thread_lease again")

        self._entered = True

        try:
            await self._acquire()
        except (asyncio.CancelledError, BackendUnavailable):
            # The claim may have been applied, and no task would renew or release it.
            await run_shielded(self._release)
            raise

        self._task = current_task()
        assert self._task is not None
        self._before = _held.get()
        _held.set((*self._before, self))
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
        _held.set(self._before)
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
                # Shielded: a web framework cancels again at every await.
                await run_shielded(lambda: self._end_run(exc))

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

        while True:
            asked = clock()
            holder = await self._run.claim(self._term)

            if holder is None or self._is_own(holder):
                self.began = await self._run.look()

                if self._is_own(self.began.term):
                    # Waiting runners count from the claim or later, so this is safe.
                    self._renewed_at = asked
                    assert self.began.term is not None
                    self.token = self.began.term.attempt
                    return

                # The claim was applied, and another runner has ended the term since.
                await self._run.end(self._term.call_id, "not begun")
                self._term = self._run.new_term(self._holder, self._stale_after)
            elif holder.erased:
                # The run's thread was deleted. The term shows nowhere, and holds the
                # key for ever.
                await self._run.end(holder.call.call_id, "its thread was deleted")
            else:
                await self._wait_for_end(holder, deadline)

    async def _wait_for_end(self, record: CallRecord, deadline: float) -> None:
        """Wait until another runner's term is over; end it once it is stale."""
        clock = asyncio.get_running_loop().time
        call_id, holder = record.call.call_id, holder_of(record)
        stale = StaleDetector(stale_after_of(record, self._stale_after))
        state = RunState(term=record)

        if self._timeout is None:
            self._check_not_own(call_id)

        async def read() -> JsonValue:
            nonlocal state
            state = await self._run.look()
            return state.heartbeat

        if clock() < deadline:
            log.warning(
                "waiting for the lease of thread %r: %s has it (term %d); if it is "
                "dead, this runner takes over after %g s without a heartbeat",
                *(self.thread_id, holder, record.attempt, stale.stale_after),
            )

        async with Wakeups(self._cp, self._run.name) as wakeups:
            for pause in backoff_pauses(longest=min(1.0, stale.longest_pause)):
                is_stale = await stale.is_stale(read)

                if state.term is None or state.term.call.call_id != call_id:
                    return

                if is_stale:
                    await self._run.take_over(state)
                    return

                if (left := deadline - clock()) <= 0:
                    assert self._timeout is not None
                    raise LeaseTimeout(self.thread_id, self._timeout, holder)

                await wakeups.wait(min(pause, left), min(stale.longest_pause, left))

    def _check_not_own(self, call_id: str) -> None:
        """Raise if the current task would wait for itself, for ever."""
        if any(lease.term_id == call_id for lease in held_leases(self._cp)):
            raise LeaseTimeout(
                self.thread_id, 0.0, "this task: pass its lease on, or set a timeout"
            )

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

        for pause in backoff_pauses(longest=min(1.0, self._stale_after / 4)):
            started = clock()
            # A new heartbeat in each try. The try before may have been applied, and
            # waiting runners count from what they saw then.
            self._heartbeats += 1

            try:
                if not await self._holds():
                    self._lose("another runner took it over")
                    return

                await self._run.renew(self._term, self._heartbeats)
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
        return self._is_own((await self._run.look()).term)

    def _is_own(self, term: CallRecord | None) -> bool:
        return term is not None and term.call.call_id == self._term.call_id

    def _lose(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            log.warning("the lease of %r was lost: %s", self.thread_id, reason)

            # If the block itself called `check`, that raises; do not cancel it too.
            if self._task is not None and self._task is not current_task():
                self._cancelled_block = True
                self._task.cancel()

    # End the run

    async def _end_run(self, exc: BaseException | None) -> None:
        """Record how the run ended, and release the lease; log what the store raises.

        If that fails, the next runner waits until the term is stale.
        """
        if self.would_end_well(exc):
            await self._finish()
        elif self._runs_agent:
            why = "an effect is open" if exc is None else type(exc).__name__
            await self._run.add(wake={"why": f"ended: {why}", "by": self._holder})

        await self._release()

    async def _release(self) -> None:
        await self._run.end(self._term.call_id, "released")

    def would_end_well(self, exc: BaseException | None) -> bool:
        """Tell whether the run is over, or waits for people alone, after this error."""
        if self.is_unfinished:
            return False

        return exc is None or all(
            getattr(one, "ends_run", False) for one in _leaves(exc)
        )

    async def _finish(self) -> None:
        """Take off the list of runs what this run has done, or all of it.

        The fence of the deletion tells no run that began since from this one, if
        neither has an event. So a holder that was silent for long deletes nothing.
        """
        clock = asyncio.get_running_loop().time
        state, done = self.began, []

        if self._runs_agent:
            done = [wake.position for wake in state.wakes if wake.is_due]

        while not (
            any(wake.position not in done for wake in state.wakes)
            or state.asks.keys() - self.seen
            or clock() >= self._renewed_at + self._stale_after
        ):
            try:
                if await self._run.start_again(state.version):
                    return

                break
            except VersionConflict:
                state = await self._run.look()

        if done or self.seen:
            await self._run.add(ran=[*done], saw=[*sorted(self.seen)])


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group, as a ``TaskGroup`` raises it, or the one."""
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        yield exc


def held_leases(cp: Checkpointer[Any]) -> list[Lease]:
    """Return the leases under which the current task runs, outermost first.

    They are those that the task holds, and those of the tasks that started it.
    """
    return [one for one in _held.get() if one._cp is cp and not one.lost]


def note_effect(
    leases: list[Lease], key: str, state: Literal["running", "waiting"] | None
) -> None:
    """Note in these leases that an effect runs, waits for a person, or has ended."""
    for lease in leases:
        if state is None:
            lease.effects.pop(key, None)
        else:
            lease.effects[key] = state


def this_process() -> str:
    """Return the name of this process for people: its host and its id."""
    return f"{socket.gethostname()}:{os.getpid()}"
