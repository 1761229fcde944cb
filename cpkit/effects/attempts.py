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
    exception_message,
    exception_type,
    failure_of,
    heartbeat_thread,
    is_released,
    next_call_id,
)
from cpkit.effects.tracing import log
from cpkit.errors import (
    CheckpointerError,
    Closed,
    PayloadTooLarge,
    SerializationError,
    UnknownCall,
)
from cpkit.protocol import Checkpointer, ErasesThreads, KeepsReceipts
from cpkit.records import CallRecord, JsonValue, ToolCall
from cpkit.registry import redacted
from cpkit.runs import TAKEN_OVER, RunThread, stale_after_of
from cpkit.waiting import StaleDetector, retry_unclear
from cpkit.wakeups import Reader, SharedWaits

__all__ = [
    "Attempts",
    "Heartbeat",
    "Resumed",
    "find_silent",
]

_UNSTORABLE = PayloadTooLarge, SerializationError


class Attempts:
    """Claims, outcomes and reads of calls; writes are repeated if an answer was lost.

    Raises ``TypeError`` for a store without receipts: it does not show which attempt
    holds a key, so no process could tell a dead holder from a live one.
    """

    def __init__(self, cp: Checkpointer[Any]) -> None:
        if isinstance(cp, str):
            raise TypeError(
                f"an EffectLedger takes an open checkpointer, not {redacted(cp)!r}: "
                "write 'async with open_checkpointer(url) as cp:', and EffectLedger(cp)"
            )

        if not isinstance(cp, KeepsReceipts):
            raise TypeError(
                f"an EffectLedger needs a store with list_calls and find_call "
                f"(KeepsReceipts), and {cp!r:.80} has not; all stores of cpkit have"
            )

        self.cp: Any = cp
        self.waits = SharedWaits.of(cp)
        self.running = self.waits.running

    async def find(self, key: str) -> CallRecord | None:
        """Return the issued or completed record of a key; ``None`` if it is free."""
        found: CallRecord | None = await self.cp.find_call(key)
        return found

    async def newest(self, key: str) -> tuple[str, CallRecord | None]:
        """Return the key under which an effect runs now, and its record as `find`.

        It is another key if a person reopened a final failure.
        """
        while True:
            record = await self.find(key)

            # The content of a failure may be erased: then it is looked up as well.
            if record is None or not (record.erased or failure_of(record)):
                return key, record

            again = await self.find(reopen_key(key))

            if again is None or again.status != "completed":
                return key, record

            key = reopened_key(key)

    async def claim(
        self, thread_id: str, call: ToolCall, outcome: Outcome | None = None
    ) -> CallRecord | None:
        """Claim the call's key; return the record that holds the key now, as `find`.

        The claim succeeded if it has the call's id, so make a new id for each attempt.
        The key is free if the claim was released before this process learned of it.
        With an ``outcome`` the claim comes after its effect. Messages that a cadence
        buffers are not written before it then, as their conflict would stop it.
        """
        cp = self.cp if outcome is None else getattr(self.cp, "unbuffered", self.cp)
        held: CallRecord | None = await retry_unclear(
            lambda: cp.record_issued(thread_id, call),
            retry_rejected=outcome is not None and outcome.only_here,
        )

        if held is None or held.call.call_id == call.call_id:
            held = await retry_unclear(
                lambda: self.find(call.idempotency_key),
                retry_rejected=True,  # an error here would leave the key held
            )

        return held

    def wait_for(
        self, holder: CallRecord, stale_after: float | None
    ) -> AbstractAsyncContextManager[Reader]:
        """Wait, in the block, until the holder's attempt is over, or stale."""
        key = holder.call.idempotency_key
        limit = None

        if stale_after is not None:
            limit = max(stale_after, stale_after_of(holder))

        return self.waits.join(
            key,
            holder,
            self.cp,
            lambda: self.find(key),
            limit,
            partial(read_heartbeat, self.cp),
        )

    async def resolve(
        self, thread_id: str, call: ToolCall, outcome: Outcome
    ) -> CallRecord:
        """Record the outcome of a call; return its record, whose outcome counts."""
        record: CallRecord = await retry_unclear(
            lambda: self.cp.record_result(
                thread_id, call.call_id, outcome.stored, success=not outcome.released
            ),
            retry_rejected=outcome.only_here,
        )
        self.waits.post(record.call.idempotency_key, record)
        return record

    async def close(
        self, thread_id: str, call: ToolCall, outcome: Outcome
    ) -> tuple[CallRecord, Outcome]:
        """Record the outcome of an attempt; return the record that stands.

        If the effect has happened, and its attempt was released meanwhile, the outcome
        is recorded as a new attempt, so that the next run does not repeat the effect.
        If another attempt holds the key already, its record is returned. The outcome is
        returned too: if the store cannot hold what a handler returned, it is a failure.
        """
        while True:
            try:
                record = await self.resolve(thread_id, call, outcome)
            except _UNSTORABLE as exc:
                if not outcome.only_here or isinstance(outcome.raised, _UNSTORABLE):
                    raise

                outcome = Outcome.failure(exc)
                continue

            if outcome.released or not is_released(record):
                return record, outcome

            # The new id follows from the old one: a caller that closes again after an
            # error makes the same ids.
            call = replace(call, call_id=next_call_id(call.call_id))
            held = await self.claim(thread_id, call, outcome)

            if held is not None and held.call.call_id != call.call_id:
                return held, outcome

    async def close_silent(
        self,
        holder: CallRecord,
        verify: Verify | None,
        stale: StaleDetector,
        reason: str,
    ) -> Resumed:
        """Close the attempt of a silent holder.

        With ``verify``, the attempt is released only after it said that the effect did
        not land; without, at once. ``stale`` found the holder silent.
        """
        answer: Landed | NotLanded | str = NotLanded()

        if verify is not None:
            answer = await ask_verify(verify, holder)

        if isinstance(answer, str):
            return Resumed(holder, "surfaced", answer)

        # The callbacks took time, and a holder that was only slow may be alive again.
        if not await stale.is_stale(partial(read_heartbeat, self.cp, holder)):
            return Resumed(holder, "alive", "a run is executing it")

        outcome = Outcome.release(reason)

        if isinstance(answer, Landed):
            outcome = Outcome.result(answer.result)

        try:
            stored = await self.close_orphan(holder, outcome)
        except _UNSTORABLE as exc:
            why = f"its result cannot be stored: {exc}"
            return Resumed(holder, "surfaced", why)

        if not outcome.is_recorded_in(stored):
            return await self.look_again(stored)

        if outcome.released:
            return Resumed(stored, "released", reason)

        return Resumed(stored, "landed", "verify found it")

    async def look_again(self, record: CallRecord) -> Resumed:
        """Return whether an attempt that was not silent, or its key's newest, lives."""
        found = None if record.erased else await self.find(record.call.idempotency_key)

        if found is not None and found.status == "issued":
            return Resumed(found, "alive", "a run is executing it")

        return Resumed(found or record, "finished", "it ended, or was erased")

    async def close_orphan(self, holder: CallRecord, outcome: Outcome) -> CallRecord:
        """Close another process's attempt, as `close`.

        A record that was deleted with its thread is returned unchanged.
        """
        try:
            record, _ = await self.close(holder.thread_id, holder.call, outcome)
        except UnknownCall:
            return holder

        await self.delete_heartbeats(record.call.idempotency_key)
        return record

    async def delete_heartbeats(self, key: str) -> None:
        """Delete the heartbeats of a key, if the store can delete threads.

        Those of a newer attempt are deleted too. Its watchers see that as one more
        sign of life.
        """
        if not isinstance(self.cp, ErasesThreads):
            return

        try:
            await self.cp.delete_thread(heartbeat_thread(key))
        except CheckpointerError:
            log.warning("could not delete %r", heartbeat_thread(key), exc_info=True)


# Heartbeats


class Heartbeat:
    """Writes heartbeats of a call, from `start` until `stop`.

    An attempt shorter than the interval writes none. A heartbeat that fails is logged,
    and the next one is tried. At worst another run takes over, and this run learns that
    when it records its outcome.
    """

    def __init__(self, attempts: Attempts, call: ToolCall) -> None:
        self._attempts = attempts
        self._key = call.idempotency_key
        self._call_id = call.call_id
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, claimed_at: float, stale_after: float) -> None:
        """Begin; the call counts as alive in this process, too."""
        self._attempts.running.add(self._call_id)
        interval = stale_after / 3
        loop = asyncio.get_running_loop()

        def begin() -> None:
            self._task = loop.create_task(self._beat(interval))

        # A timer instead of a task: most effects end before the first heartbeat.
        self._timer = loop.call_at(claimed_at + interval, begin)

    async def stop(self) -> None:
        """Write no more."""
        self._attempts.running.discard(self._call_id)

        if self._timer is not None:
            self._timer.cancel()

        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def end(self) -> None:
        """Stop, and delete the heartbeats if any were written: there is an outcome."""
        await self.stop()

        if self._count:
            await self._attempts.delete_heartbeats(self._key)

    async def _beat(self, interval: float) -> None:
        while True:
            self._count += 1
            beat: dict[str, JsonValue] = {self._call_id: self._count}

            try:
                await self._attempts.cp.save_extra(heartbeat_thread(self._key), beat)
            except Closed:  # the process has given up the store, and the call with it
                self._attempts.running.discard(self._call_id)
                return
            except Exception:
                log.warning("a heartbeat of %r failed", self._call_id, exc_info=True)

            await asyncio.sleep(interval)


async def read_heartbeat(
    cp: Checkpointer[Any], holder: CallRecord
) -> tuple[str, JsonValue]:
    """Return an attempt's call id and last heartbeat; a sign of life changes them."""
    call_id = holder.call.call_id
    data = await cp.load(heartbeat_thread(holder.call.idempotency_key))
    return call_id, None if data is None else data.extra.get(call_id)


# Attempts whose process is gone


Action = Literal["landed", "released", "surfaced", "alive", "finished"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What resume did with one pending call, and why.

    ``record`` is the call as it is stored now. ``action`` is one of

    - ``landed``: ``verify`` found the effect; its result is recorded, as a new attempt
      if this one was released meanwhile
    - ``released``: ``verify`` says that nothing happened, or the tool only reads; the
      key is free
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


async def find_silent(
    attempts: Attempts,
    thread_id: str,
    calls: Sequence[CallRecord],
) -> dict[str, StaleDetector]:
    """Return the calls whose own holder is silent, by call id, with the proof.

    There are two proofs. A call carries the term of the lease under which it runs, and
    that term was taken over after silence. Else this watches the call's heartbeat for
    its ``stale_after``. A call that this process runs is alive.
    """
    silent: dict[str, StaleDetector] = {}
    watched: dict[str, tuple[CallRecord, StaleDetector]] = {}

    for one in calls:
        if one.call.call_id not in attempts.running:
            is_dead = await _was_taken_over(attempts, one)
            seconds = 0.0 if is_dead else stale_after_of(one)
            watched[one.call.call_id] = one, StaleDetector(seconds)

    if waits := [one.stale_after for _, one in watched.values() if one.stale_after]:
        log.warning(
            "thread %r: %d without an outcome; waits up to %g s for a heartbeat of "
            "each before it counts as dead",
            *(thread_id, len(waits), max(waits)),
        )

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
            Outcome.result(answer.result)  # raises if it cannot be recorded
    except Exception as exc:
        log.warning("verify of %s failed", effect.tool, exc_info=True)
        return f"verify raised {exception_type(exc)}: {exception_message(exc)}"

    if isinstance(answer, (Landed, NotLanded)):
        return answer

    return "verify cannot know" if answer is None else "verify gave an unknown answer"
