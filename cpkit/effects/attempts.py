"""Attempts in the store: claim them, record their outcome, see if they are alive.

An attempt proves that it lives by heartbeats, from its claim until its outcome is
recorded: a count in the extra of a thread that is named after the attempt's id.
"""

from __future__ import annotations

import asyncio
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
from cpkit.effects.waits import Answer, SharedWaits
from cpkit.errors import (
    CheckpointerError,
    Closed,
    PayloadTooLarge,
    SerializationError,
    UnknownCall,
)
from cpkit.lease import Lease, note_effect
from cpkit.protocol import Checkpointer, ErasesThreads, KeepsReceipts
from cpkit.records import CallRecord, ToolCall
from cpkit.runs.threads import TAKEN_OVER, RunThread, stale_after_of
from cpkit.runs.waiting import StaleDetector, retry_unclear

__all__ = ["Attempts", "Heartbeat", "Resumed"]

_UNSTORABLE = PayloadTooLarge, SerializationError


class Attempts:
    """Claims, outcomes and reads of calls; a write without an answer is repeated."""

    def __init__(self, cp: Checkpointer[Any]) -> None:
        if not isinstance(cp, KeepsReceipts):  # no repr: a URL may have a password
            raise TypeError(
                "an EffectLedger takes an open checkpointer with list_calls and "
                f"find_call (KeepsReceipts), not a {type(cp).__qualname__}: write "
                "'async with open_checkpointer(url) as cp:', and EffectLedger(cp)"
            )

        self.cp: Any = cp
        self.waits = SharedWaits.of(cp)
        self.running: dict[str, Heartbeat] = self.waits.running

    async def find(self, key: str) -> CallRecord | None:
        """Return the issued or completed record of a key; ``None`` if it is free."""
        found: CallRecord | None = await self.cp.find_call(key)
        return found

    async def newest(self, key: str) -> tuple[str, CallRecord | None]:
        """Return the key of an effect, which may be reopened, and its record."""
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
        """Claim the call's key, perhaps after its effect; return the key's record."""
        # A conflict of messages that a cadence buffers would stop the claim.
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

    async def wait_for(self, holder: CallRecord, stale_after: float | None) -> Answer:
        """Wait until the holder's attempt is over, or silent."""
        if stale_after is not None:
            stale_after = max(stale_after, stale_after_of(holder))

        look = partial(self.find, holder.call.idempotency_key)
        return await self.waits.wait(self.cp, holder, look, stale_after, self.heartbeat)

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
        self.waits.post(record)
        return record

    async def close(
        self, thread_id: str, call: ToolCall, outcome: Outcome
    ) -> tuple[CallRecord, Outcome]:
        """Record the outcome of an attempt; return the record that stands, and it.

        If the effect has happened, and its attempt was released meanwhile, the outcome
        is that of a new attempt, unless another one holds the key already. A result
        that the store cannot hold becomes a failure.
        """
        while True:
            try:
                record = await self.resolve(thread_id, call, outcome)
            except _UNSTORABLE as exc:
                if not outcome.only_here or isinstance(outcome.raised, _UNSTORABLE):
                    raise

                outcome = Outcome.failure(exc)
                continue
            except UnknownCall:  # its thread was forgotten, and with it the call
                if (heartbeat := self.running.get(call.call_id)) is not None:
                    await heartbeat.end()

                raise

            if outcome.released or not is_released(record):
                return record, outcome

            # A caller that closes again makes the same id.
            call = replace(call, call_id=next_call_id(call.call_id))
            held = await self.claim(thread_id, call, outcome)

            if held is not None and held.call.call_id != call.call_id:
                return held, outcome

    # Attempts whose process is gone

    async def heartbeat(self, holder: CallRecord) -> object:
        """Return an attempt's last heartbeat; each sign of life changes it."""
        call_id = holder.call.call_id
        data = await self.cp.load(heartbeat_thread(call_id))
        # With the id: a proof that one attempt is silent says nothing of the next one.
        return call_id, None if data is None else data.extra.get(call_id)

    async def watch(self, record: CallRecord) -> StaleDetector | None:
        """Return the proof that an effect's own holder is silent; ``None`` without one.

        Its lease was taken over after silence, or this has watched its heartbeat.
        """
        call = record.call

        if call.call_id in self.running or effect_of(record) is None:
            return None

        is_dead = await self._lost_its_lease(record)
        stale = StaleDetector(0.0 if is_dead else stale_after_of(record))

        if not is_dead:
            log.warning(
                "thread %r: %s has no outcome; waits up to %g s for a heartbeat "
                "before it counts as dead",
                *(record.thread_id, call.tool_name, stale.stale_after),
            )

        while not await stale.is_stale(partial(self.heartbeat, record)):
            found = await self.find(call.idempotency_key)

            if found is None or found.call.call_id != call.call_id:
                return None

            if found.status != "issued" or stale.changed:
                return None

            await asyncio.sleep(stale.longest_pause)

        return stale

    async def _lost_its_lease(self, record: CallRecord) -> bool:
        """Return whether the lease of a call's run was taken over after silence."""
        # It may be another thread's: a sub-agent runs under its main agent's.
        match record.call.args.get("lease"):
            case [str(term), str(run_thread)]:
                run = RunThread(self.cp, run_thread)

                for one in await self.cp.list_calls(run.name):
                    if one.call.call_id == term and isinstance(one.result, dict):
                        return bool(one.result.get("released") == TAKEN_OVER)

        return False

    async def close_silent(
        self,
        holder: CallRecord,
        verify: Verify | None,
        stale: StaleDetector,
        reason: str,
    ) -> Resumed:
        """Close the attempt of a holder that ``stale`` found silent, as verify says."""
        outcome = await _found_by(verify, holder, reason)

        if isinstance(outcome, str):
            return Resumed(holder, "surfaced", outcome)

        # The callback took time, and a holder that was only slow may be alive again.
        if not await stale.is_stale(partial(self.heartbeat, holder)):
            return await self.look_again(holder)

        try:
            stored = await self.close_orphan(holder, outcome)
        except _UNSTORABLE as exc:
            return Resumed(holder, "surfaced", f"its result cannot be stored: {exc}")

        if not outcome.is_recorded_in(stored):
            return await self.look_again(stored)

        if outcome.released:
            return Resumed(stored, "released", reason)

        return Resumed(stored, "landed", "verify found it")

    async def look_again(self, record: CallRecord) -> Resumed:
        """Return whether the key of an attempt that was not silent is held."""
        found = None if record.erased else await self.find(record.call.idempotency_key)

        if found is not None and found.status == "issued":
            return Resumed(found, "alive", "a run is executing it")

        return Resumed(found or record, "finished", "it ended, or was erased")

    async def close_orphan(self, holder: CallRecord, outcome: Outcome) -> CallRecord:
        """Close another process's attempt, as `close`."""
        record, _ = await self.close(holder.thread_id, holder.call, outcome)
        await self.delete_heartbeats(holder.call.call_id)
        return record

    async def delete_heartbeats(self, call_id: str) -> None:
        """Delete the heartbeats of an attempt, if the store can delete threads."""
        if not isinstance(self.cp, ErasesThreads):
            return

        try:
            await self.cp.delete_thread(heartbeat_thread(call_id))
        except CheckpointerError:
            log.warning("could not delete heartbeats of %r", call_id, exc_info=True)


class Heartbeat:
    """Writes heartbeats of a call, from `start` until `stop`; made before its claim."""

    def __init__(self, attempts: Attempts, call: ToolCall, stale_after: float) -> None:
        self._attempts = attempts
        self.call = call
        self._stale_after = stale_after
        self._claimed_at = asyncio.get_running_loop().time()
        self.noted: tuple[list[Lease], str] = [], ""
        """The leases that know of the effect, and the key by which they do."""
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> bool:
        """Begin, unless the claim took so long that another run may take over soon."""
        loop, interval = asyncio.get_running_loop(), self._stale_after / 3

        if loop.time() - self._claimed_at > self._stale_after / 2:
            return False

        def begin() -> None:
            self._task = asyncio.create_task(self._beat(interval))

        # A timer instead of a task: most effects end before the first heartbeat.
        self._timer = loop.call_at(self._claimed_at + interval, begin)
        self._attempts.running[self.call.call_id] = self
        return True

    async def stop(self) -> None:
        """Write no more."""
        self._attempts.running.pop(self.call.call_id, None)

        if self._timer is not None:
            self._timer.cancel()

        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def end(self) -> None:
        """Stop, and delete the heartbeats if any were written: there is an outcome."""
        note_effect(*self.noted, None)
        await self.stop()

        if self._count:
            await self._attempts.delete_heartbeats(self.call.call_id)

    async def _beat(self, interval: float) -> None:
        call_id = self.call.call_id
        place = heartbeat_thread(call_id)

        while True:
            self._count += 1

            try:
                await self._attempts.cp.save_extra(place, {call_id: self._count})
            except Closed:  # the process has given up the store, and the call with it
                self._attempts.running.pop(call_id, None)
                return
            except Exception:  # at worst another run takes over
                log.warning("a heartbeat of %r failed", call_id, exc_info=True)

            await asyncio.sleep(interval)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What resume did with one pending call, and why.

    ``record`` is the call as it is stored now. It ``landed``: ``verify`` found the
    effect, and its result is recorded. It was ``released``: nothing happened, and the
    key is free. It is ``surfaced``: the outcome is unknown, and a person decides. It is
    ``alive``: a run is executing it. It is ``finished``: it ended, or was erased.
    """

    record: CallRecord
    action: Literal["landed", "released", "surfaced", "alive", "finished"]
    reason: str

    def __str__(self) -> str:
        call, effect = self.record.call, effect_of(self.record)
        args = call.args if effect is None else effect.args
        return (
            f"{self.action}: {call.tool_name} {dict(args)} "
            f"(attempt {self.record.attempt}, call {call.call_id}): {self.reason}"
        )


async def _found_by(
    verify: Verify | None, holder: CallRecord, reason: str
) -> Outcome | str:
    """Ask how a silent holder's effect ended; return why it is unclear, if it is."""
    if verify is None:
        return Outcome.release(reason)

    effect = effect_of(holder)

    if effect is None:
        return "it was not recorded by a ledger"

    try:
        match await call_callback(verify, effect):
            case Landed(result):
                return Outcome.result(result)  # raises if it cannot be recorded
            case NotLanded():
                return Outcome.release(reason)
            case None:
                return "verify cannot know"
    except Exception as exc:
        log.warning("verify of %s failed", effect.tool, exc_info=True)
        return f"verify raised {exception_type(exc)}: {exception_message(exc)}"

    return "verify gave an unknown answer"
