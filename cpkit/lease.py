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
    Pass ``token`` to systems that compare tokens.

When the lease is lost
    The block is cancelled at its next await, and `LeaseLost` is raised from the ``async
    with``, as ``asyncio.timeout`` does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
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

    A holder without a heartbeat for ``stale_after`` seconds loses its term. Waiting
    runners use the value of the holder, which its claim records. ``timeout`` bounds the
    wait; ``None`` means without limit. ``holder`` names the runner for people; the
    default is the host name and the process id.

    Entering raises ``LeaseTimeout`` and what the store raises. Leaving raises
    ``LeaseLost``.
    """
    return Lease(
        cp, thread_id, stale_after, timeout, holder or _this_process(), backoff
    )


class Lease:
    """A term as the runner of a thread; made by `thread_lease`, entered once.

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
    ) -> None:
        if stale_after <= 0:
            raise ValueError(f"stale_after must be positive, not {stale_after!r}")

        self.thread_id = check_id("thread_id", thread_id)
        self.token = 0
        self._cp = cp
        self._lease_thread = _lease_thread_id(self.thread_id)
        self._stale_after = stale_after
        self._timeout = timeout
        self._holder = holder
        self._backoff = backoff or Backoff()
        self._reason: str | None = None
        self._cancelled_block = False
        self._renewed_at = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._call = self._new_call()

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

    async def __aenter__(self) -> Self:
        try:
            await self._acquire()
        except (asyncio.CancelledError, BackendUnavailable):
            # The claim may have been applied, and no task would renew or release it.
            await self._release()
            raise

        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._renewer = asyncio.create_task(self._renew_until_lost())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._renewer.cancel()
        # A loss that is found from here on must not cancel the block, which has ended.
        task, self._task = self._task, None
        stopped = False

        if self._cancelled_block:
            assert task is not None
            stopped = task.uncancel() <= self._cancelling

            if stopped and exc is None:
                await self._absorb_cancellation()

        try:
            await asyncio.wait([self._renewer])
        finally:
            reason, self._reason = self._reason, self._reason or "it was released"

            if reason is None:
                await self._release()

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
        started = clock()
        stale: StaleDetector | None = None
        watched = ""

        for pause in self._backoff.pauses(self._stale_after / 4):
            asked = clock()
            record = await self._claim()

            if record is None:
                # No other runner can measure this term's silence from an earlier time.
                self._renewed_at = asked
                return

            if record.call.call_id != watched:
                watched = record.call.call_id
                stale = StaleDetector(_stale_after_of(record, self._stale_after))

            assert stale is not None

            if await stale.is_stale(self._read_heartbeat):
                await self._end(watched, "taken over: its holder fell silent")
                log.warning("took over the lease of %r", self.thread_id)
                continue

            if self._timeout is not None:
                left = started + self._timeout - clock()
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
        """Take the lease and return ``None``, or return the current term."""
        record = await self._issue()

        if record is None:
            # Issuing a recorded call again writes nothing and returns its record. The
            # record has the attempt, which is the token.
            record = await self._issue() or await self._issue()

        assert record is not None

        if record.call.call_id != self._call.call_id:
            return record

        if record.status == "issued":
            self.token = record.attempt
            return None

        # The claim was applied, its answer was lost, and another runner has ended the
        # term since.
        self._call = self._new_call()
        return await self._claim()

    async def _issue(self) -> CallRecord | None:
        return await retry_unclear(
            lambda: self._cp.record_issued(self._lease_thread, self._call),
            self._backoff,
            self._stale_after,
        )

    async def _read_heartbeat(self) -> JsonValue:
        data = await self._cp.load(self._lease_thread)
        return None if data is None else data.extra.get("renewed")

    # Renew and release

    async def _renew_until_lost(self) -> None:
        """Renew the lease until this task is cancelled or the lease is lost."""
        count = 0

        while self._reason is None:
            await asyncio.sleep(self._stale_after / 3)
            count += 1

            try:
                async with asyncio.timeout_at(self._renewed_at + self._stale_after):
                    await self._renew(count)
            except TimeoutError:
                self._lose(f"it could not be renewed for {self._stale_after:g} s")

    async def _renew(self, count: int) -> None:
        clock = asyncio.get_running_loop().time

        for pause in self._backoff.pauses(self._stale_after / 4):
            started = clock()

            try:
                if not await self._holds():
                    self._lose("another runner took it over")
                    return

                # All terms share one extra key, so that extra does not grow. A lost
                # term may still write it, one time at most. The successor's next
                # renewal overwrites that.
                heartbeat: JsonValue = [self._call.call_id, count]
                await self._cp.save_extra(self._lease_thread, {"renewed": heartbeat})
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
        data = await self._cp.load(self._lease_thread)
        pending = () if data is None else data.pending
        return any(record.call.call_id == self._call.call_id for record in pending)

    def _lose(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            log.warning("the lease of %r was lost: %s", self.thread_id, reason)

            # A check in the block itself raises the error instead.
            if self._task is not None and self._task is not asyncio.current_task():
                self._cancelled_block = True
                self._task.cancel()

    async def _release(self) -> None:
        try:
            await self._end(self._call.call_id, "released")
        except asyncio.CancelledError:
            # Recording is idempotent. Without it, the next runner must wait until the
            # term is stale.
            await self._end(self._call.call_id, "released")
            raise
        except BackendUnavailable:
            # The block did its work. The next runner waits until the term is stale.
            log.warning(
                "could not release the lease of %r", self.thread_id, exc_info=True
            )

    async def _end(self, call_id: str, reason: str) -> None:
        try:
            await retry_unclear(
                lambda: self._cp.record_result(
                    self._lease_thread, call_id, {"released": reason}, success=False
                ),
                self._backoff,
                self._stale_after,
            )
        except UnknownCall:
            log.debug("the lease thread of %r was forgotten", self.thread_id)


def _lease_thread_id(thread_id: str) -> str:
    """Return the id of the lease's own thread, different for every thread."""
    name = f"cpkit:lease:{thread_id}"

    if len(name.encode()) <= MAX_ID_BYTES:
        return name

    return f"cpkit:lease-of:{sha256(thread_id.encode()).hexdigest()}"


def _stale_after_of(record: CallRecord, default: float) -> float:
    """Return the ``stale_after`` that the term's holder recorded."""
    recorded = record.call.args.get("stale_after")
    return float(recorded) if isinstance(recorded, (int, float)) else default


def _this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
