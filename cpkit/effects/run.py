"""One caller's way through one effect: the protocol itself.

1. Look it up: a completed effect is replayed, for one read.
2. Have the approval, where the policy asks for one.
3. Claim the key under an id that was never used. Where somebody holds it, wait for the
   result, and where the holder has fallen silent, take over.
4. Run the handler, and show signs of life while it takes.
5. Record the outcome, and act on the record that comes back.

A crash before 3 leaves nothing or a request, one after it an issued call: what ran
cannot be told from what did not, so nothing but ``verify``, a person, or a handler that
passes the key downstream (who asks for it with ``stale_after``) lets it run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from cpkit.canonical import canonical_json
from cpkit.effects import envelope
from cpkit.effects.approvals import Approvals
from cpkit.effects.calls import Calls
from cpkit.effects.effect import (
    Effect,
    Handler,
    Landed,
    NoEffect,
    NotLanded,
    Verdict,
    Verify,
    called,
)
from cpkit.effects.errors import EffectErased, EffectTimeout, KeyReused
from cpkit.effects.heartbeat import Heartbeat, last_beat
from cpkit.effects.keys import KeyKind, fresh_call_id
from cpkit.effects.tracing import Trail, log
from cpkit.errors import PayloadTooLarge, SerializationError, UnknownCall
from cpkit.patience import Silence
from cpkit.records import CallRecord, JsonValue, ToolCall

__all__ = ["EffectRun", "Outcome", "Plan", "Settled", "ask_verify", "reported"]

SupersededHook = Callable[[Effect, CallRecord], Awaitable[object] | object]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done once, and how long to wait for what.

    Times are in seconds, ``None`` without end; ``stale_after`` ``None`` is never.
    """

    effect: Effect
    kind: KeyKind
    verify: Verify | None
    timeout: float | None
    approval_timeout: float | None
    stale_after: float | None
    heartbeat: float
    release_failures: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a handler came to: an envelope, and the exception where it raised one."""

    result: dict[str, JsonValue]
    success: bool = True
    raised: Exception | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """How a run ended: the record that stands, and what is this caller's alone.

    ``raised`` is the exception of the caller's own handler; ``in_hand`` is the result
    of a caller whose record was erased or forgotten while its handler ran.
    """

    record: CallRecord | None
    replayed: bool
    raised: Exception | None = None
    in_hand: Outcome | None = None

    def value(self) -> JsonValue:
        """Return the effect's result, or raise its failure."""
        if self.raised is not None:
            raise self.raised

        if self.in_hand is not None:
            return self.in_hand.result["value"]

        assert self.record is not None
        return envelope.replayed(self.record)

    def failure(self) -> str | None:
        """Return the type of the error that it ended with, if it failed."""
        if self.raised is not None:
            return envelope.type_name(self.raised)

        return None if self.record is None else envelope.failure(self.record)


class EffectRun:
    """One run of one effect."""

    def __init__(
        self,
        calls: Calls,
        approvals: Approvals,
        plan: Plan,
        trail: Trail,
        running: set[str],
        on_superseded: SupersededHook | None,
    ) -> None:
        self._calls = calls
        self._approvals = approvals
        self._plan = plan
        self._trail = trail
        self._running = running
        self._on_superseded = on_superseded
        self._call: ToolCall

    async def settle(self, handler: Handler, *, wants_attempt: bool = True) -> Settled:
        """Run the effect, or wait for whoever does, or replay what is on record.

        The handler's ``attempt`` is 0 unless ``wants_attempt``: it costs a read.
        """
        key = self._plan.effect.key
        record = await self._calls.cp.find_completed(key)

        if record is not None:
            return self._replay(record)

        await self._approve()
        self._renew_call()
        outcome: Outcome | None = None

        while True:
            record = await self._acquire()

            if record is not None:
                return self._replay(record)

            self._running.add(self._call.call_id)

            try:
                settled = await self._perform(handler, outcome, wants_attempt)
            finally:
                self._running.discard(self._call.call_id)

            if isinstance(settled, Settled):
                return settled

            # Superseded, with an outcome in hand or before the handler was called.
            outcome = settled or outcome
            self._renew_call()

    async def begin(self) -> tuple[CallRecord, bool]:
        """Claim the effect; return the key's record and whether it is ours to run."""
        record = await self._calls.cp.find_completed(self._plan.effect.key)

        if record is None:
            await self._approve()
            self._renew_call()

        while record is None:
            record = await self._claim()

            if record is None:
                mine = await self._calls.on_record(self._thread_id, self._call)

                if mine is not None and mine.status == "issued":
                    self._check(mine)
                    self._running.add(mine.call.call_id)
                    return mine, True

                self._renew_call()

        self._check(record)
        return record, False

    @property
    def _thread_id(self) -> str:
        return self._plan.effect.thread_id

    def _renew_call(self) -> None:
        effect = self._plan.effect
        self._call = ToolCall(
            fresh_call_id(),
            effect.tool,
            envelope.issued(effect.args, effect.tool_call_id),
            effect.key,
        )

    async def _approve(self) -> None:
        plan = self._plan
        await self._approvals.granted(
            plan.effect, plan.kind, plan.approval_timeout, self._trail
        )

    # Holding the key

    async def _claim(self) -> CallRecord | None:
        """Claim the key; ``None`` where the run holds it, else the record that does."""
        while True:
            record = await self._calls.claim(self._thread_id, self._call)

            if record is None or record.status != "failed":
                return record

            # Our own attempt, released by somebody who took it for dead before its
            # claim was known to have arrived.
            self._renew_call()

    async def _acquire(self) -> CallRecord | None:
        """Come to hold the key (``None``), or to its completed record."""
        record = await self._claim()

        if record is None or record.status == "completed":
            return record

        self._trail.note("waiting", attempt=record.attempt)
        return await self._wait(record)

    async def _wait(self, holder: CallRecord) -> CallRecord | None:
        """Wait until the key's holder is done with it; then as `_acquire`."""
        plan = self._plan
        clock = asyncio.get_running_loop().time
        deadline = inf if plan.timeout is None else clock() + plan.timeout
        silence = None if plan.stale_after is None else Silence(plan.stale_after)
        pauses = self._calls.backoff.pauses(silence.longest_pause if silence else None)

        while True:
            self._check(holder)

            if silence is None or not await self._taken_over(holder, silence):
                left = deadline - clock()

                if left <= 0:
                    assert plan.timeout is not None
                    raise EffectTimeout(
                        plan.effect.key,
                        plan.effect.tool,
                        plan.timeout,
                        f"the result of attempt {holder.attempt}, still issued",
                        holder,
                    )

                await asyncio.sleep(min(next(pauses), left))

            record = await self._claim()

            if record is None or record.status == "completed":
                return record

            holder = record

    async def _taken_over(self, holder: CallRecord, silence: Silence) -> bool:
        """Settle the attempt of a holder that fell silent; tell whether it is settled.

        Its attempt is released only after ``verify`` said that it did not land: from
        then on the key is free, and the next claim of anybody runs the effect.
        """
        if not await silence.lasts(lambda: last_beat(self._calls.cp, holder)):
            return False

        await self._approve()

        if self._plan.verify is None:
            verdict: Verdict = NotLanded()
        else:
            verdict = await ask_verify(self._plan.verify, holder)

        if verdict is None:
            self._trail.warn("silent holder in doubt", attempt=holder.attempt)
            silence.forgive()
            return False

        landed = isinstance(verdict, Landed)
        result = (
            envelope.value(verdict.result)
            if isinstance(verdict, Landed)
            else envelope.released("taken over: its holder fell silent")
        )
        await self._calls.resolve(
            holder.thread_id, holder.call.call_id, result, success=landed
        )
        found = "not asked" if self._plan.verify is None else repr(landed)
        self._trail.warn("taken over", attempt=holder.attempt, landed=found.lower())
        return True

    # Running and recording

    async def _perform(
        self, handler: Handler, outcome: Outcome | None, wants_attempt: bool
    ) -> Settled | Outcome | None:
        """Run the handler unless there is an outcome, and record what came of it.

        Returns how it ended. Where the attempt was superseded: the outcome in hand, or
        ``None`` where the handler was not called.
        """
        plan = self._plan
        effect = replace(plan.effect, call_id=self._call.call_id)
        heart = Heartbeat(
            self._calls.cp, effect.key, self._call.call_id, plan.heartbeat
        )

        if outcome is None:
            if wants_attempt:
                mine = await self._calls.on_record(self._thread_id, self._call)

                if mine is None or mine.status != "issued":
                    return None

                self._check(mine)
                effect = replace(effect, attempt=mine.attempt)

            self._trail.note("claimed", attempt=effect.attempt)

            async with heart:
                outcome = await self._handled(handler, effect)

        settled = await self._record(effect, outcome)
        await heart.clear()
        return settled

    async def _handled(self, handler: Handler, effect: Effect) -> Outcome:
        """Call the handler; a cancelled one leaves its call issued."""
        try:
            return Outcome(envelope.value(await called(handler, effect)))
        except NoEffect as exc:
            return Outcome(envelope.released(str(exc)), success=False, raised=exc)
        except Exception as exc:
            # SerializationError too: the effect happened, and its result is no JSON.
            if self._plan.release_failures and not isinstance(exc, SerializationError):
                return Outcome(envelope.released(str(exc)), success=False, raised=exc)

            return Outcome(envelope.error(exc), raised=exc)

    async def _record(self, effect: Effect, outcome: Outcome) -> Settled | Outcome:
        """Record the outcome; return it, unsettled, where the attempt was superseded.

        Whoever recorded first decides; everybody acts on the record.
        """
        try:
            record = await self._resolve(outcome)
        except PayloadTooLarge as exc:
            outcome = Outcome(envelope.error(exc), raised=exc)
            record = await self._resolve(outcome)
        except UnknownCall:
            self._trail.warn("forgotten while it ran")
            return Settled(None, False, outcome.raised, outcome)

        if record.erased:
            self._trail.warn("erased while it ran")
            return Settled(record, False, outcome.raised, outcome)

        if _is(record, outcome):
            self._trail.note("recorded", attempt=record.attempt, status=record.status)
            return Settled(record, False, outcome.raised)

        await reported(self._on_superseded, effect, record, self._trail)

        if not outcome.success:
            # It had no effect, so it has nothing to add to what others recorded.
            return Settled(record, False, outcome.raised)

        return self._replay(record) if record.status == "completed" else outcome

    async def _resolve(self, outcome: Outcome) -> CallRecord:
        return await self._calls.resolve(
            self._thread_id,
            self._call.call_id,
            outcome.result,
            success=outcome.success,
            insist=True,
        )

    # Reading the records of others

    def _replay(self, record: CallRecord) -> Settled:
        self._check(record)
        self._trail.set("cpkit.effect.replayed", True)
        self._trail.note("replayed", attempt=record.attempt)
        return Settled(record, True)

    def _check(self, record: CallRecord) -> None:
        """Raise where the record's content is gone, or is that of another call."""
        effect = self._plan.effect

        if record.erased:
            raise EffectErased(effect.key, effect.tool, record.status)

        if self._plan.kind == "given":
            held = record.call.args.get("args")

            if canonical_json(held) != canonical_json(effect.args):
                raise KeyReused(effect.key, effect.tool)


async def ask_verify(verify: Verify, holder: CallRecord) -> Verdict:
    """Ask whether an attempt's effect landed; ``None`` for what is no clear answer."""
    effect = envelope.effect_of(holder)

    if effect is None:
        return None

    try:
        verdict: Any = await called(verify, effect)

        if isinstance(verdict, Landed):
            envelope.value(verdict.result)  # raises where it could not be recorded
    except Exception:
        log.warning("verify of %s failed", effect.tool, exc_info=True)
        return None

    return verdict if isinstance(verdict, (Landed, NotLanded)) else None


async def reported(
    hook: SupersededHook | None, effect: Effect, record: CallRecord, trail: Trail
) -> None:
    """Tell that an attempt was settled by another before its own outcome came."""
    trail.warn("superseded", attempt=record.attempt, status=record.status)

    if hook is None:
        return

    try:
        await called(hook, effect, record)
    except Exception:
        log.exception("on_superseded failed for %s", effect.tool)


def _is(record: CallRecord, outcome: Outcome) -> bool:
    status = "completed" if outcome.success else "failed"
    return record.status == status and record.result == outcome.result
