"""A lease: one runner for each thread, across processes and machines.

::

    async with thread_lease(cp, "thread-1") as lease:
        data = await lease.load()
        version = 0 if data is None else data.version
        await cp.append("thread-1", messages, expected_version=version)

How it is made
    Of the six methods alone, in a thread of its own. A term is a call whose key is
    that of the lease: the claim takes it, a failed result ends it, and ``attempt``,
    one higher for each term, is the fencing ``token``. The holder renews by writing a
    sign of life into that thread's extra; who waits watches the sign by its own
    monotonic clock, and ends the term of a holder that shows none for ``stale_after``
    seconds. No clocks are compared.

What it promises
    While nobody is paused for longer than ``stale_after``, one runner at a time. The
    holder counts its lease as lost when it could not renew for so long, before anybody
    else may take it. What no lease can promise is that a paused process knows that it
    was. So begin with `Lease.load` and fence every append with the version that it
    gave, counted on by the term's own appends: once a successor has written, its
    predecessor gets ``VersionConflict``. And pass ``token`` on to what compares tokens.

When the lease is lost
    The block is cancelled at its next await, and `LeaseLost` raised from the ``async
    with``, as ``asyncio.timeout`` does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from hashlib import sha256
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from cpkit.driver.backoff import Backoff
from cpkit.driver.ids import MAX_ID_BYTES, check_id
from cpkit.errors import BackendUnavailable, CheckpointerError, UnknownCall
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, CheckpointData, JsonValue, ToolCall
from cpkit.waiting import StaleDetector, retry_unclear

__all__ = ["Lease", "LeaseLost", "LeaseTimeout", "thread_lease"]

log = logging.getLogger("cpkit.lease")


class LeaseLost(CheckpointerError):
    """The lease was taken over, could not be renewed in time, or was given back."""

    def __init__(self, thread_id: str, token: int, reason: str) -> None:
        super().__init__(thread_id, token, reason)
        self.thread_id = thread_id
        self.token = token
        self.reason = reason

    def __str__(self) -> str:
        return f"the lease of thread {self.thread_id!r} was lost: {self.reason}"


class LeaseTimeout(CheckpointerError):
    """Another runner holds the lease, and did so for as long as one would wait."""

    def __init__(self, thread_id: str, seconds: float, holder: str) -> None:
        super().__init__(thread_id, seconds, holder)
        self.thread_id = thread_id
        self.seconds = seconds
        self.holder = holder

    def __str__(self) -> str:
        return (
            f"thread {self.thread_id!r} is run by {self.holder}; "
            f"waited {self.seconds:g} s for its lease"
        )


def thread_lease(
    cp: Checkpointer[Any],
    thread_id: str,
    *,
    stale_after: float = 15.0,
    timeout: float | None = None,
    holder: str | None = None,
    backoff: Backoff | None = None,
) -> Lease:
    """Return a context manager that holds the thread's lease while its block runs.

    ``stale_after`` seconds without a sign of life end a term; those who wait go by
    what the holder promised. ``timeout`` bounds the waiting (``None``: without end).
    ``holder`` is how people read who it is; by default host and process.

    Entering raises ``LeaseTimeout`` and what the store raises; leaving raises
    ``LeaseLost``.
    """
    return Lease(
        cp, thread_id, stale_after, timeout, holder or _this_process(), backoff
    )


class Lease:
    """A term as the runner of a thread; made by `thread_lease`, entered once.

    ``token`` is the term's number, higher than that of every earlier one.
    """

    def __init__(
        self,
        cp: Checkpointer[Any],
        thread_id: str,
        stale_after: float,
        timeout: float | None,
        holder: str,
        backoff: Backoff | None,
    ) -> None:
        if stale_after <= 0:
            raise ValueError("stale_after must be positive")

        self.thread_id = check_id("thread_id", thread_id)
        self.token = 0
        self._cp = cp
        self._place = _lease_thread(self.thread_id)
        self._stale_after = stale_after
        self._timeout = timeout
        self._holder = holder
        self._backoff = backoff or Backoff()
        self._reason: str | None = None
        self._told = False
        self._renewed = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._call = self._new_call()

    def __repr__(self) -> str:
        return f"<Lease of {self.thread_id!r}, token {self.token}>"

    @property
    def lost(self) -> bool:
        """Whether the lease is known to be lost, or was given back."""
        return self._reason is not None

    async def load(self) -> CheckpointData[Any] | None:
        """Return the thread as it was while the lease was certainly held.

        A load alone does not say that: its runner may have been paused before it and
        see what a successor wrote, as if that were its own to go on from. Raises
        ``LeaseLost``.
        """
        data = await self._cp.load(self.thread_id)
        await self.check()
        return data

    async def check(self) -> None:
        """Ask the store; raise ``LeaseLost`` unless the lease is held right now."""
        if self._reason is None and not await self._holds():
            self._lose("another runner has taken it over")

        if self._reason is not None:
            raise LeaseLost(self.thread_id, self.token, self._reason)

    async def __aenter__(self) -> Self:
        try:
            await self._acquire()
        except (asyncio.CancelledError, BackendUnavailable):
            # The claim may have arrived, and nobody would renew or release it.
            await self._release()
            raise

        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._renewer = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._renewer.cancel()
        # Whoever finds it lost from here on has no block to stop.
        task, self._task = self._task, None
        stopped = False

        if self._told:
            assert task is not None
            stopped = task.uncancel() <= self._cancelling

            if stopped and exc is None:
                await self._deliver()

        try:
            await asyncio.wait([self._renewer])
        finally:
            reason, self._reason = self._reason, self._reason or "it was released"

            if reason is None:
                await self._release()

        if reason and (exc is None or (stopped and kind is asyncio.CancelledError)):
            raise LeaseLost(self.thread_id, self.token, reason) from exc

    async def _deliver(self) -> None:
        """Take the cancellation that the block ended too early to see."""
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            log.debug("the block had ended when its lease was lost")

    # Coming to hold it

    async def _acquire(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        silence: StaleDetector | None = None
        watched = ""

        for pause in self._backoff.pauses(self._stale_after / 4):
            asked = clock()
            record = await self._claim()

            if record is None:
                # Nobody could have seen this term as silent from an earlier moment.
                self._renewed = asked
                return

            if record.call.call_id != watched:
                watched = record.call.call_id
                silence = StaleDetector(_promised(record.call.args, self._stale_after))

            assert silence is not None

            if await silence.is_stale(self._sign):
                await self._end(watched, "taken over: its holder fell silent")
                log.warning("took the lease of %r over", self.thread_id)
                continue

            if self._timeout is not None:
                left = began + self._timeout - clock()
                pause = min(pause, left)

                if left <= 0:
                    holder = record.call.args.get("holder", "another")
                    raise LeaseTimeout(self.thread_id, self._timeout, str(holder))

            await asyncio.sleep(pause)

    def _new_call(self) -> ToolCall:
        return ToolCall(
            f"lease:{uuid4().hex}",
            "cpkit:lease",
            {
                "thread_id": self.thread_id,
                "holder": self._holder,
                "stale_after": self._stale_after,
            },
            sha256(f"cpkit:lease:{self.thread_id}".encode()).hexdigest(),
        )

    async def _claim(self) -> CallRecord | None:
        """Take the lease (``None``), or return the term that is on."""
        record = await self._ask()

        if record is None:
            # Asking for what is on record writes nothing, and returns it.
            record = await self._ask() or await self._ask()

        assert record is not None

        if record.call.call_id != self._call.call_id:
            return record

        if record.status == "issued":
            self.token = record.attempt
            return None

        # The claim arrived, its answer was lost, and somebody ended the term since.
        self._call = self._new_call()
        return await self._claim()

    async def _ask(self) -> CallRecord | None:
        return await retry_unclear(
            lambda: self._cp.record_issued(self._place, self._call),
            self._backoff,
            self._stale_after,
        )

    async def _sign(self) -> JsonValue:
        data = await self._cp.load(self._place)
        return None if data is None else data.extra.get("renewed")

    # Keeping it, and letting go

    async def _keep(self) -> None:
        """Renew until cancelled, or until the lease is lost."""
        count = 0

        while self._reason is None:
            await asyncio.sleep(self._stale_after / 3)
            count += 1

            try:
                async with asyncio.timeout_at(self._renewed + self._stale_after):
                    await self._renew(count)
            except TimeoutError:
                self._lose(f"it could not be renewed for {self._stale_after:g} s")

    async def _renew(self, count: int) -> None:
        clock = asyncio.get_running_loop().time

        for pause in self._backoff.pauses(self._stale_after / 4):
            began = clock()

            try:
                if not await self._holds():
                    self._lose("another runner has taken it over")
                    return

                # One key for all terms, so that it does not grow. A term that was
                # lost in between writes it once more at most, which its successor's
                # next renewal covers.
                sign: JsonValue = [self._call.call_id, count]
                await self._cp.save_extra(self._place, {"renewed": sign})
                self._renewed = began
                return
            except Exception:
                # Of any kind: a renewer that died unseen would be a lease held in vain.
                log.warning("renewing the lease of %r", self.thread_id, exc_info=True)

            await asyncio.sleep(pause)

    async def _holds(self) -> bool:
        data = await self._cp.load(self._place)
        pending = () if data is None else data.pending
        return any(record.call.call_id == self._call.call_id for record in pending)

    def _lose(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            log.warning("the lease of %r was lost: %s", self.thread_id, reason)

            # Who asks in the block itself gets the error instead.
            if self._task is not None and self._task is not asyncio.current_task():
                self._told = True
                self._task.cancel()

    async def _release(self) -> None:
        try:
            await self._end(self._call.call_id, "released")
        except asyncio.CancelledError:
            # Ending it twice is ending it once, and else all others wait for silence.
            await self._end(self._call.call_id, "released")
            raise
        except BackendUnavailable:
            # The block did its work; who comes next waits until the term is stale.
            log.warning("could not release %r", self.thread_id, exc_info=True)

    async def _end(self, call_id: str, reason: str) -> None:
        try:
            await retry_unclear(
                lambda: self._cp.record_result(
                    self._place, call_id, {"released": reason}, success=False
                ),
                self._backoff,
                self._stale_after,
            )
        except UnknownCall:
            log.debug("the lease thread of %r was forgotten", self.thread_id)


def _lease_thread(thread_id: str) -> str:
    """Return the id of the lease's own thread; two threads never share one."""
    name = f"cpkit:lease:{thread_id}"

    if len(name.encode()) <= MAX_ID_BYTES:
        return name

    return f"cpkit:lease-of:{sha256(thread_id.encode()).hexdigest()}"


def _promised(args: Mapping[str, JsonValue], default: float) -> float:
    """Return the silence that the term's holder allows itself."""
    promised = args.get("stale_after")
    return float(promised) if isinstance(promised, (int, float)) else default


def _this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
