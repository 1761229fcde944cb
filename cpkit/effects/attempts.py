"""Attempts in the store: claim them, record their outcome, see if they are alive.

Heartbeats are written to a thread of their own, named after the effect's key. Each
attempt overwrites one key of its extra, so more heartbeats take no more room. If the
store can delete threads, the process that records the outcome deletes this thread.
Unclear answers of ``verify`` are in the same place, so that a person can read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NamedTuple

from cpkit.driver.backoff import Backoff
from cpkit.effects.effect import Landed, NotLanded, Verdict, Verify, call_callback
from cpkit.effects.records import (
    doubt_name,
    effect_of,
    exception_message,
    exception_type,
    heartbeat_thread,
    next_call_id,
    value_envelope,
)
from cpkit.effects.tracing import log
from cpkit.errors import CheckpointerError, UnknownCall
from cpkit.protocol import Checkpointer, ErasesThreads, KeepsReceipts
from cpkit.records import CallRecord, JsonValue, ToolCall
from cpkit.waiting import retry_unclear
from cpkit.wakeups import Reader, SharedWaits

__all__ = [
    "Attempts",
    "Doubt",
    "Heartbeat",
    "ask_verify",
    "close_attempt",
    "delete_heartbeats",
    "read_doubt",
    "read_heartbeat",
    "run_shielded",
    "store_doubt",
]

_LONGEST_DOUBT = 500
"""Characters kept of what ``verify`` said: enough to recognize the error."""

_LONGEST_SHIELD = 30.0
"""Seconds that a cancelled run still waits for the store to record its outcome."""


class Attempts:
    """Claims, outcomes and reads of calls; writes are repeated if an answer was lost.

    ``retry_timeout`` bounds the retries of one operation, in seconds.
    """

    def __init__(
        self, cp: Checkpointer[Any], backoff: Backoff, retry_timeout: float
    ) -> None:
        self.cp = cp
        self.backoff = backoff
        self.retry_timeout = retry_timeout
        self.receipts = cp if isinstance(cp, KeepsReceipts) else None
        self.waits = SharedWaits.of(cp)

    async def claim(
        self, thread_id: str, call: ToolCall, *, retry_rejected: bool = False
    ) -> CallRecord | None:
        """Claim the call's key. ``None`` means that this call holds the key.

        Make a new id for each attempt. An issued record with that id is then this
        attempt's own. ``retry_rejected`` as for `issue`.
        """
        record = await self.issue(thread_id, call, retry_rejected=retry_rejected)

        if record is None or record.erased or not _is_call(record, call):
            return record

        return None if record.status == "issued" else record

    async def issue(
        self, thread_id: str, call: ToolCall, *, retry_rejected: bool = False
    ) -> CallRecord | None:
        """Do what ``record_issued`` does, with retries.

        ``retry_rejected`` is for a claim after the effect happened. It is repeated also
        while the store cannot be reached. Messages that a cadence buffers are not
        written first, because their conflict would stop it.
        """
        cp = getattr(self.cp, "unbuffered", self.cp) if retry_rejected else self.cp
        return await retry_unclear(
            lambda: cp.record_issued(thread_id, call),
            self.backoff,
            self.retry_timeout,
            retry_rejected=retry_rejected,
        )

    async def find_claimed(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        """Return the record of a claimed call, or ``None`` if it has lost its key."""
        receipts = self.receipts

        if receipts is not None:
            found = await retry_unclear(
                lambda: receipts.find_call(call.idempotency_key),
                self.backoff,
                self.retry_timeout,
                retry_rejected=True,  # an error here would leave the key held
            )
        else:
            # Issuing a call on record returns its record. After a deletion with
            # ``forget_keys`` the first issue writes it, and the second returns it.
            found = await self.issue(thread_id, call) or await self.issue(
                thread_id, call
            )

        if found is None or not _is_call(found, call) or found.status == "failed":
            return None

        return found

    async def find_holder(self, key: str) -> CallRecord | None:
        """Return a key's completed record, or its issued one if the store shows it."""
        if self.receipts is not None:
            return await self.receipts.find_call(key)

        return await self.cp.find_completed(key)

    def wait_for(
        self, holder: CallRecord, stale_after: float | None
    ) -> AbstractAsyncContextManager[Reader]:
        """Wait, in the block, until the holder's attempt is over."""
        key = holder.call.idempotency_key
        return self.waits.join(
            key,
            holder,
            self.cp,
            lambda: self.find_holder(key),
            self.backoff,
            self.retry_timeout,
            blind=self.receipts is None,
            stale_after=stale_after,
            read_heartbeat=lambda record: read_heartbeat(self.cp, record),
        )

    async def resolve(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool,
        retry_rejected: bool = False,
    ) -> CallRecord:
        """Record an outcome, and return the record as it is stored now.

        With ``retry_rejected``, also retry while the store cannot be reached: use it
        for an outcome that exists nowhere else.
        """
        record = await retry_unclear(
            lambda: self.cp.record_result(thread_id, call_id, result, success=success),
            self.backoff,
            self.retry_timeout,
            retry_rejected=retry_rejected,
        )
        self.waits.post(record.call.idempotency_key, record)
        return record

    async def close(
        self,
        attempt: CallRecord,
        result: JsonValue,
        *,
        success: bool,
        retry_rejected: bool = False,
    ) -> CallRecord:
        """Record the outcome of an attempt, and return the record that stands.

        With ``success`` the effect has happened. If the attempt was released meanwhile,
        the result is recorded as a new attempt, so that the next run does not repeat
        the effect. If another attempt holds the key already, its record is returned.
        """
        thread_id, call = attempt.thread_id, attempt.call

        while True:
            record = await self.resolve(
                thread_id,
                call.call_id,
                result,
                success=success,
                retry_rejected=retry_rejected,
            )

            if not success or record.status != "failed" or record.erased:
                return record

            # The new id follows from the old one: a caller that closes again after an
            # error makes the same ids.
            call = replace(call, call_id=next_call_id(call.call_id))
            other = await self.claim(thread_id, call, retry_rejected=retry_rejected)

            if other is not None and not _is_call(other, call):
                return other


async def run_shielded(work: Callable[[], Awaitable[None]]) -> None:
    """Wait until ``work`` is done; log what it raises. Each try has 30 seconds.

    If the caller is cancelled, ``work`` continues, however often that happens (anyio
    cancels again at every await). The cancellation is raised afterwards. ``work`` must
    be idempotent: it is called again if its own task is cancelled, which
    ``asyncio.run`` does when it ends.
    """

    async def bounded() -> None:
        try:
            async with asyncio.timeout(_LONGEST_SHIELD):
                await work()
        except Exception:
            log.warning("could not record an outcome", exc_info=True)

    cancelled: asyncio.CancelledError | None = None

    for _ in range(2):
        task = asyncio.create_task(bounded())

        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as exc:
                cancelled = exc

        if not task.cancelled():
            break

    if cancelled is not None:
        raise cancelled


def _is_call(record: CallRecord, call: ToolCall) -> bool:
    return record.call.call_id == call.call_id


# Heartbeats


class Heartbeat:
    """Writes a heartbeat every ``interval`` seconds while its block runs.

    A block shorter than the interval writes none. A heartbeat that fails is logged, and
    the next one is tried. At worst another run takes over, and this run learns that
    when it records its outcome.
    """

    def __init__(
        self, cp: Checkpointer[Any], key: str, call_id: str, interval: float
    ) -> None:
        self._cp = cp
        self._key = key
        self._call_id = call_id
        self._interval = interval
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        # A timer instead of a task: most effects end before the first heartbeat.
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._start)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()

        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def delete(self) -> None:
        """Delete the heartbeats of an effect that ended, if any were written."""
        if self._count:
            await delete_heartbeats(self._cp, self._key)

    async def write(self) -> None:
        """Write one heartbeat now; a failure is logged."""
        self._count += 1
        place = heartbeat_thread(self._key)

        try:
            await self._cp.save_extra(place, {self._call_id: self._count})
        except Exception:
            log.warning("a heartbeat of %r failed", self._call_id, exc_info=True)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await self.write()
            await asyncio.sleep(self._interval)


async def read_heartbeat(
    cp: Checkpointer[Any], holder: CallRecord
) -> tuple[str, JsonValue]:
    """Return an attempt's call id and last heartbeat; a sign of life changes them."""
    call_id = holder.call.call_id
    data = await cp.load(heartbeat_thread(holder.call.idempotency_key))
    return call_id, None if data is None else data.extra.get(call_id)


async def delete_heartbeats(cp: Checkpointer[Any], key: str) -> None:
    """Delete the heartbeats of a key, if the store can delete threads.

    Those of a newer attempt are deleted too. Its watchers see that as one more
    sign of life.
    """
    if not isinstance(cp, ErasesThreads):
        return

    try:
        await cp.delete_thread(heartbeat_thread(key))
    except CheckpointerError:
        log.warning("could not delete %r", heartbeat_thread(key), exc_info=True)


# Attempts whose process is gone


class Doubt(NamedTuple):
    """The last answer of ``verify`` about an attempt, if it was not clear.

    ``at`` is the ISO time by the clock of the process that asked.
    """

    said: str
    at: str


async def ask_verify(
    cp: Checkpointer[Any], verify: Verify, holder: CallRecord
) -> Verdict:
    """Ask whether an attempt's effect landed; ``None`` for an unclear answer.

    An unclear answer is stored; see `read_doubt`. ``verify`` is not asked about a call
    that a ledger did not record.
    """
    effect = effect_of(holder)

    if effect is None:
        return None

    try:
        verdict: Any = await call_callback(verify, effect)

        if isinstance(verdict, Landed):
            value_envelope(verdict.result)  # raises if it cannot be recorded
    except Exception as exc:
        log.warning("verify of %s failed", effect.tool, exc_info=True)
        said = f"it raised {exception_type(exc)}: {exception_message(exc)}"
    else:
        if isinstance(verdict, (Landed, NotLanded)):
            return verdict

        said = "it cannot know" if verdict is None else "its answer is not a verdict"

    await store_doubt(cp, holder, said)
    return None


async def store_doubt(cp: Checkpointer[Any], holder: CallRecord, said: str) -> None:
    """Store what ``verify`` said about an attempt; a failure is logged."""
    call = holder.call
    doubt: list[JsonValue] = [said[:_LONGEST_DOUBT], datetime.now(UTC).isoformat()]
    place = heartbeat_thread(call.idempotency_key)

    try:
        await cp.save_extra(place, {doubt_name(call.call_id): doubt})
    except CheckpointerError:
        log.warning("could not store what verify said", exc_info=True)


async def read_doubt(cp: Checkpointer[Any], record: CallRecord) -> Doubt | None:
    """Return what ``verify`` said about an attempt that has no outcome yet.

    ``None`` if it was not asked.
    """
    data = await cp.load(heartbeat_thread(record.call.idempotency_key))

    match None if data is None else data.extra.get(doubt_name(record.call.call_id)):
        case [str(said), str(at)]:
            return Doubt(said, at)

    return None


async def close_attempt(
    attempts: Attempts,
    holder: CallRecord,
    result: dict[str, JsonValue],
    *,
    success: bool,
) -> tuple[CallRecord, bool]:
    """Record the outcome of another process's attempt.

    Returns the stored record, as `Attempts.close` does, and whether it has this result.
    A record that was deleted with its thread is returned unchanged.
    """
    try:
        record = await attempts.close(holder, result, success=success)
    except UnknownCall:
        return holder, False

    await delete_heartbeats(attempts.cp, record.call.idempotency_key)
    return record, record.result == result
