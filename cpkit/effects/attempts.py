"""Attempts in the store: claim them, record their outcome, see if they are alive.

An attempt proves that it lives by heartbeats, from its claim until its outcome is
recorded, whatever lease its run holds or does not hold. They are written to a thread of
their own, named after the effect's key; each attempt overwrites one key of its extra.
The process that records the outcome deletes this thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from cpkit.effects.effect import (
    Landed,
    NotLanded,
    Verify,
    call_callback,
    reopen_key,
    reopened_key,
)
from cpkit.effects.records import (
    Outcome,
    effect_of,
    error_envelope,
    error_type_of,
    exception_message,
    exception_type,
    heartbeat_thread,
    next_call_id,
    released_envelope,
    value_envelope,
)
from cpkit.effects.tracing import log
from cpkit.errors import (
    CheckpointerError,
    Closed,
    PayloadTooLarge,
    SerializationError,
    UnknownCall,
)
from cpkit.lease import WaitHook
from cpkit.protocol import Checkpointer, ErasesThreads, KeepsReceipts
from cpkit.records import CallRecord, JsonValue, ToolCall
from cpkit.runs import TAKEN_OVER, RunThread, stale_after_of
from cpkit.waiting import StaleDetector, check_interval, retry_unclear
from cpkit.wakeups import Reader, SharedWaits

__all__ = [
    "Attempts",
    "CallsWait",
    "Heartbeat",
    "Resumed",
    "delete_heartbeats",
    "find_silent",
    "running_calls",
]

_running: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def running_calls(cp: Any) -> set[str]:
    """Return the ids of the calls that this process runs with a handle."""
    try:
        return _running.setdefault(cp, set())
    except TypeError:  # no weak reference: then heartbeats alone show what lives
        return set()


class Attempts:
    """Claims, outcomes and reads of calls; writes are repeated if an answer was lost.

    Raises ``TypeError`` for a store without receipts: it does not show which attempt
    holds a key, so no process could tell a dead holder from a live one.
    """

    def __init__(self, cp: Checkpointer[Any]) -> None:
        if not isinstance(cp, KeepsReceipts):
            raise TypeError(
                f"an EffectLedger needs a store with list_calls and find_call "
                f"(KeepsReceipts), and {cp!r:.80} has not; all stores of cpkit have"
            )

        self.cp: Any = cp
        self.waits = SharedWaits.of(cp)
        self.running = running_calls(cp)

    async def claim(
        self, thread_id: str, call: ToolCall, *, happened: bool = False
    ) -> CallRecord | None:
        """Claim the call's key. ``None`` means that this call holds the key.

        Make a new id for each attempt. An issued record with that id is then this
        attempt's own. ``happened`` is for a claim after the effect: it is repeated also
        while the store cannot be reached. Messages that a cadence buffers are not
        written first, because their conflict would stop it.
        """
        cp = getattr(self.cp, "unbuffered", self.cp) if happened else self.cp
        record: CallRecord | None = await retry_unclear(
            lambda: cp.record_issued(thread_id, call), retry_rejected=happened
        )

        if record is None or record.erased or record.call.call_id != call.call_id:
            return record

        return None if record.status == "issued" else record

    async def find(self, key: str) -> CallRecord | None:
        """Return the issued or completed record of a key."""
        found: CallRecord | None = await self.cp.find_call(key)
        return found

    async def find_claimed(self, call: ToolCall) -> CallRecord | None:
        """Return the record of a claimed call, or ``None`` if it has lost its key."""
        found: CallRecord | None = await retry_unclear(
            lambda: self.cp.find_call(call.idempotency_key),
            retry_rejected=True,  # an error here would leave the key held
        )
        is_own = found is not None and found.call.call_id == call.call_id
        return found if is_own else None

    async def newest(self, key: str) -> tuple[str, CallRecord | None]:
        """Return the key under which an effect runs now, and its record.

        It is another key if a person reopened a final failure.
        """
        while True:
            record = await self.find(key)

            if record is None or error_type_of(record) is None:
                return key, record

            again = await self.find(reopen_key(key))

            if again is None or again.status != "completed":
                return key, record

            key = reopened_key(key)

    def wait_for(
        self, holder: CallRecord, stale_after: float | None
    ) -> AbstractAsyncContextManager[Reader]:
        """Wait, in the block, until the holder's attempt is over, or stale."""
        key = holder.call.idempotency_key
        limit = None if stale_after is None else _limit(holder, stale_after)
        return self.waits.join(
            key,
            holder,
            self.cp,
            lambda: self.find(key),
            limit,
            partial(read_heartbeat, self.cp),
        )

    async def resolve(
        self, attempt: CallRecord, outcome: Outcome, *, retry: bool = False
    ) -> CallRecord:
        """Record an outcome, and return the record as it is stored now.

        ``retry`` is for an outcome that exists nowhere else: it is also repeated while
        the store cannot be reached.
        """
        thread_id, call_id = attempt.thread_id, attempt.call.call_id
        result, success = outcome.result, outcome.success
        record: CallRecord = await retry_unclear(
            lambda: self.cp.record_result(thread_id, call_id, result, success=success),
            retry_rejected=retry,
        )
        self.waits.post(record.call.idempotency_key, record)
        return record

    async def record(
        self, attempt: CallRecord, outcome: Outcome, *, retry: bool = True
    ) -> tuple[CallRecord, Outcome]:
        """Record a handler's outcome, as `close`; return the outcome too.

        It is an error if the store cannot hold the result: the effect has happened.
        """
        try:
            return await self.close(attempt, outcome, retry=retry), outcome
        except (PayloadTooLarge, SerializationError) as exc:
            outcome = Outcome(error_envelope(exc), raised=exc)
            return await self.close(attempt, outcome, retry=retry), outcome

    async def close(
        self, attempt: CallRecord, outcome: Outcome, *, retry: bool = False
    ) -> CallRecord:
        """Record the outcome of an attempt, and return the record that stands.

        With ``success`` the effect has happened. If the attempt was released meanwhile,
        the result is recorded as a new attempt, so that the next run does not repeat
        the effect. If another attempt holds the key already, its record is returned.
        """
        while True:
            record = await self.resolve(attempt, outcome, retry=retry)

            if not outcome.success or record.status != "failed" or record.erased:
                return record

            # The new id follows from the old one: a caller that closes again after an
            # error makes the same ids.
            call = replace(attempt.call, call_id=next_call_id(attempt.call.call_id))
            other = await self.claim(attempt.thread_id, call, happened=retry)

            if other is not None and other.call.call_id != call.call_id:
                return other

            attempt = replace(attempt, call=call)

    async def close_silent(
        self,
        holder: CallRecord,
        verify: Verify | None,
        stale: StaleDetector | None,
        reason: str,
    ) -> Resumed:
        """Close the attempt of a silent holder.

        With ``verify``, the attempt is released only after it said that the effect did
        not land; without, at once. ``stale`` is the detector that found the holder
        silent, ``None`` if its lease was taken over.
        """
        answer: Landed | NotLanded | str = NotLanded()

        if verify is not None:
            answer = await ask_verify(verify, holder)

        if isinstance(answer, str):
            return Resumed(holder, "surfaced", answer)

        # The callbacks took time, and a holder that was only slow may be alive again.
        if stale is not None and not await stale.is_stale(
            partial(read_heartbeat, self.cp, holder)
        ):
            return Resumed(holder, "alive", "a run is executing it")

        outcome = Outcome(released_envelope(reason), success=False)

        if isinstance(answer, Landed):
            outcome = Outcome(value_envelope(answer.result))

        try:
            stored, closed_here = await self.close_orphan(holder, outcome)
        except (PayloadTooLarge, SerializationError) as exc:
            why = f"its result cannot be stored: {exc}"
            return Resumed(holder, "surfaced", why)

        if not closed_here:
            return await self.look_again(stored)

        if outcome.success:
            return Resumed(stored, "landed", "verify found it")

        return Resumed(stored, "released", reason)

    async def look_again(self, record: CallRecord) -> Resumed:
        """Return whether an attempt that was not silent, or its key's newest, lives."""
        found = None if record.erased else await self.find(record.call.idempotency_key)

        if found is not None and found.status == "issued":
            return Resumed(found, "alive", "a run is executing it")

        return Resumed(found or record, "finished", "it ended, or was erased")

    async def close_orphan(
        self, holder: CallRecord, outcome: Outcome
    ) -> tuple[CallRecord, bool]:
        """Close another process's attempt; return the record, and if it was done here.

        A record that was deleted with its thread is returned unchanged.
        """
        try:
            record = await self.close(holder, outcome)
        except UnknownCall:
            return holder, False

        await delete_heartbeats(self.cp, record.call.idempotency_key)
        return record, outcome.is_recorded_in(record)


# Heartbeats


class Heartbeat:
    """Writes a heartbeat every ``interval`` seconds, from `start` until `stop`.

    An attempt shorter than the interval writes none. A heartbeat that fails is logged,
    and the next one is tried. At worst another run takes over, and this run learns that
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

    def start(self) -> None:
        """Begin; the call counts as alive in this process, too."""
        running_calls(self._cp).add(self._call_id)
        # A timer instead of a task: most effects end before the first heartbeat.
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._begin)

    async def stop(self) -> None:
        """Write no more."""
        running_calls(self._cp).discard(self._call_id)

        if self._timer is not None:
            self._timer.cancel()

        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def end(self) -> None:
        """Stop, and delete the heartbeats if any were written: there is an outcome."""
        await self.stop()

        if self._count:
            await delete_heartbeats(self._cp, self._key)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self._count += 1

            try:
                await self._cp.save_extra(
                    heartbeat_thread(self._key), {self._call_id: self._count}
                )
            except Closed:  # the process has given up the store, and the call with it
                running_calls(self._cp).discard(self._call_id)
                return
            except Exception:
                log.warning("a heartbeat of %r failed", self._call_id, exc_info=True)

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


Action = Literal["discarded", "landed", "released", "surfaced", "alive", "finished"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What resume did with one pending call, and why.

    ``record`` is the call as it is stored now. ``action`` is one of

    - ``discarded``: the tool only reads; the key is free
    - ``landed``: ``verify`` found the effect; its result is recorded, as a new attempt
      if this one was released meanwhile
    - ``released``: ``verify`` says that nothing happened; the key is free
    - ``surfaced``: the outcome is unknown; the call stays issued, a person decides
    - ``alive``: its run has shown that it lives
    - ``finished``: its own run recorded an outcome during the resume, or it was erased
    """

    record: CallRecord
    action: Action
    reason: str

    def __str__(self) -> str:
        call = self.record.call
        effect = effect_of(self.record)
        args = call.args if effect is None else effect.args
        return (
            f"{self.action}: {call.tool_name} {dict(args)} "
            f"(attempt {self.record.attempt}, call {call.call_id}): {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class CallsWait:
    """A recovery watches ``calls`` calls of a thread before it takes them for dead."""

    thread_id: str
    calls: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"thread {self.thread_id!r}: {self.calls} without an outcome; this waits "
            f"up to {self.seconds:g} s for a heartbeat of each before it counts as dead"
        )


async def find_silent(
    attempts: Attempts,
    thread_id: str,
    calls: Sequence[CallRecord],
    stale_after: float | None,
    on_wait: WaitHook | None,
) -> dict[str, StaleDetector | None]:
    """Return the calls whose own holder has been silent, by call id.

    There are two proofs. A call carries the term of the lease under which it runs: if
    that term was taken over after silence, the value is ``None``. Else this watches the
    call's heartbeat for its ``stale_after``, and the value is the detector. A call that
    this process runs is alive.
    """
    if stale_after is not None:
        check_interval("stale_after", stale_after)

    silent: dict[str, StaleDetector | None] = {
        one.call.call_id: None for one in calls if await _was_taken_over(attempts, one)
    }
    watched = {
        one.call.call_id: (one, StaleDetector(_limit(one, stale_after)))
        for one in calls
        if one.call.call_id not in silent and one.call.call_id not in attempts.running
    }

    if watched:
        longest = max(stale.stale_after for _, stale in watched.values())
        wait = CallsWait(thread_id, len(watched), longest)
        log.warning("%s", wait)

        if on_wait is not None:
            on_wait(wait)

    while watched:
        for call_id, (record, stale) in list(watched.items()):
            if await stale.is_stale(partial(read_heartbeat, attempts.cp, record)):
                silent[call_id] = stale

            if call_id in silent or stale.changed or await _is_over(attempts, record):
                del watched[call_id]

        if watched:
            pause = min(stale.longest_pause for _, stale in watched.values())
            await asyncio.sleep(pause)

    return silent


def _limit(record: CallRecord, own: float | None) -> float:
    """Return the ``stale_after`` of an attempt or of its observer: the longer one."""
    return max(stale_after_of(record), own or 0.0)


async def _is_over(attempts: Attempts, record: CallRecord) -> bool:
    found = await attempts.find(record.call.idempotency_key)
    return (
        found is None
        or found.status != "issued"
        or found.call.call_id != record.call.call_id
    )


async def _was_taken_over(attempts: Attempts, record: CallRecord) -> bool:
    """Return whether the lease under which a call ran was taken over after silence.

    It may be the lease of another thread: a sub-agent runs under its main agent's.
    """
    match record.call.args.get("lease"):
        case [str(term), str(run_thread)]:
            run = RunThread(attempts.cp, run_thread)
            terms: list[CallRecord] = await attempts.cp.list_calls(run.name)
            return any(
                one.call.call_id == term
                and isinstance(one.result, dict)
                and one.result.get("released") == TAKEN_OVER
                for one in terms
            )

    return False


async def ask_verify(verify: Verify, holder: CallRecord) -> Landed | NotLanded | str:
    """Ask whether an attempt's effect landed; return why it is unclear, if it is."""
    effect = effect_of(holder)

    if effect is None:
        return "it was not recorded by a ledger"

    try:
        answer: Any = await call_callback(verify, effect)

        if isinstance(answer, Landed):
            value_envelope(answer.result)  # raises if it cannot be recorded
    except Exception as exc:
        log.warning("verify of %s failed", effect.tool, exc_info=True)
        return f"verify raised {exception_type(exc)}: {exception_message(exc)}"

    if isinstance(answer, (Landed, NotLanded)):
        return answer

    return "verify cannot know" if answer is None else "verify gave an unknown answer"
