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
from math import inf

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
    called,
)
from cpkit.effects.errors import EffectErased, EffectTimeout, KeyReused
from cpkit.effects.heartbeat import Heartbeat, last_beat
from cpkit.effects.keys import fresh_call_id
from cpkit.effects.outcome import Outcome, Plan, Settled
from cpkit.effects.settling import ask_verify, settle
from cpkit.effects.tracing import Trail, log
from cpkit.errors import (
    BackendUnavailable,
    CheckpointerError,
    PayloadTooLarge,
    SerializationError,
    UnknownCall,
)
from cpkit.records import CallRecord, ToolCall
from cpkit.waiting import StaleDetector

__all__ = ["EffectRun", "SupersededHook"]

SupersededHook = Callable[[Effect, CallRecord], Awaitable[object] | object]


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
        self._mine = ""
        """The id of the call, which a resume beside this run leaves alone."""
        self._outcome: Outcome | None = None
        """What the handler came to, from when it ended."""

    async def settle(self, handler: Handler, *, wants_attempt: bool = True) -> Settled:
        """Run the effect, or wait for whoever does, or replay what is on record.

        The handler's ``attempt`` is 0 unless ``wants_attempt``: it costs a read.
        """
        key = self._plan.effect.key
        record = await self._calls.cp.find_completed(key)

        if record is not None:
            return self._replay(record)

        try:
            while True:
                ours, record = await self._hold(self._acquire, wants_attempt)

                if not ours:
                    assert record is not None
                    return self._replay(record)

                attempt = 0 if record is None else record.attempt
                settled = await self._perform(handler, self._attempted(attempt))

                if settled is not None:
                    return settled
        finally:
            self._running.discard(self._mine)

    async def begin(self) -> tuple[CallRecord, bool]:
        """Claim the effect; return the key's record and whether it is ours to run."""
        ours = False

        try:
            record = await self._calls.cp.find_completed(self._plan.effect.key)

            if record is None:
                ours, record = await self._hold(self._claim, True)
        finally:
            if not ours:
                self._running.discard(self._mine)

        assert record is not None
        self._check(record)
        return record, ours

    @property
    def _thread_id(self) -> str:
        return self._plan.effect.thread_id

    def _attempted(self, attempt: int) -> Effect:
        """Return the effect as its handler sees it."""
        planned = self._plan.effect
        return Effect(
            planned.key,
            planned.thread_id,
            planned.tool,
            planned.args,
            self._call.call_id,
            attempt,
            planned.tool_call_id,
        )

    def _renew_call(self) -> None:
        effect = self._plan.effect
        self._running.discard(self._mine)
        self._mine = fresh_call_id()
        self._running.add(self._mine)
        self._call = ToolCall(
            self._mine,
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

    async def _hold(
        self,
        acquire: Callable[[], Awaitable[CallRecord | None]],
        wants_record: bool,
    ) -> tuple[bool, CallRecord | None]:
        """Come to hold the key, or not; return that, and the record.

        Where it is ours the record is ``None`` unless wanted.
        """
        try:
            while True:
                self._renew_call()
                record = await acquire()

                if record is not None:
                    return False, record

                if not wants_record or self._outcome is not None:
                    return True, None

                record = await self._calls.on_record(self._thread_id, self._call)

                # None where it was superseded already: then it must not run.
                if record is not None and record.status == "issued":
                    self._check(record)
                    return True, record
        except (asyncio.CancelledError, BackendUnavailable):
            # The claim may have arrived, and its handler will not be called.
            if self._outcome is None:
                await self._leave(_NOT_BEGUN)

            raise

    async def _leave(self, outcome: Outcome) -> None:
        """Record, in one try, what is known of a call that its run gives up."""
        try:
            await self._calls.cp.record_result(
                self._thread_id,
                self._call.call_id,
                outcome.result,
                success=outcome.success,
            )
        except CheckpointerError as exc:
            self._trail.note("left as it is", because=type(exc).__name__)

    async def _claim(self) -> CallRecord | None:
        """Claim the key; ``None`` where the run holds it, else the record that does."""
        while True:
            if self._outcome is None:
                await self._approve()

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
        silence = None if plan.stale_after is None else StaleDetector(plan.stale_after)
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

    async def _taken_over(self, holder: CallRecord, silence: StaleDetector) -> bool:
        """Settle the attempt of a holder that fell silent; tell whether it is settled.

        Its attempt is released only after ``verify`` said that it did not land: from
        then on the key is free, and the next claim of anybody runs the effect.
        """
        cp = self._calls.cp

        if not await silence.is_stale(lambda: last_beat(cp, holder)):
            return False

        await self._approve()

        if self._plan.verify is None:
            verdict: Verdict = NotLanded()
        else:
            verdict = await ask_verify(self._plan.verify, holder)

        if verdict is None:
            self._trail.warn("silent holder in doubt", attempt=holder.attempt)
            silence.restart()
            return False

        # Asking took its time. A holder that was only slow may be back at work.
        if not await silence.is_stale(lambda: last_beat(cp, holder)):
            return False

        landed = isinstance(verdict, Landed)
        result = (
            envelope.value(verdict.result)
            if isinstance(verdict, Landed)
            else envelope.released("taken over: its holder fell silent")
        )

        try:
            _, ours = await settle(self._calls, holder, result, success=landed)
        except (PayloadTooLarge, SerializationError) as exc:
            # What the store cannot hold is no answer, as for one that is no JSON.
            self._trail.warn("silent holder in doubt", because=type(exc).__name__)
            silence.restart()
            return False

        if ours:
            found = "not asked" if self._plan.verify is None else repr(landed).lower()
            self._trail.warn("taken over", attempt=holder.attempt, landed=found)

        return True

    # Running and recording

    async def _perform(self, handler: Handler, effect: Effect) -> Settled | None:
        """Run the handler, unless it ran, and record what came of it.

        ``None`` where the attempt was superseded and its key not settled yet.
        """
        heart = Heartbeat(
            self._calls.cp, effect.key, effect.call_id, self._plan.heartbeat
        )

        try:
            if self._outcome is None:
                self._trail.note("claimed", attempt=effect.attempt)

                async with heart:
                    self._outcome = await self._handled(handler, effect)

            settled = await self._record(effect, self._outcome)
        except asyncio.CancelledError:
            # A handler that had ended is no mystery. Recording twice is recording once.
            if self._outcome is not None:
                await self._leave(self._outcome)
                await heart.clear()

            raise

        await heart.clear()
        return settled

    async def _handled(self, handler: Handler, effect: Effect) -> Outcome:
        """Call the handler; a cancelled one leaves its call issued."""
        try:
            return Outcome(envelope.value(await called(handler, effect)))
        except NoEffect as exc:
            return _released(exc)
        except Exception as exc:
            # SerializationError too: the effect happened, and its result is no JSON.
            if self._plan.release_failures and not isinstance(exc, SerializationError):
                return _released(exc)

            return Outcome(envelope.error(exc), raised=exc)

    async def _record(self, effect: Effect, outcome: Outcome) -> Settled | None:
        """Record the outcome; ``None`` where the attempt was superseded unsettled.

        Whoever recorded first decides; everybody acts on the record.
        """
        try:
            try:
                record = await self._resolve(outcome)
            except (PayloadTooLarge, SerializationError) as exc:
                # The effect happened, and the store cannot hold what came of it.
                outcome = self._outcome = Outcome(envelope.error(exc), raised=exc)
                record = await self._resolve(outcome)
        except BackendUnavailable:
            self._trail.warn("outcome not recorded")
            raise
        except UnknownCall:
            self._trail.warn("forgotten while it ran")
            return Settled(None, False, outcome.raised, outcome)

        if record.erased:
            self._trail.warn("erased while it ran")
            return Settled(record, False, outcome.raised, outcome)

        if _is(record, outcome):
            self._trail.note("recorded", attempt=record.attempt, status=record.status)
            return Settled(record, False, outcome.raised)

        await self._report(effect, record)

        if not outcome.success:
            # It had no effect, so it has nothing to add to what others recorded.
            return Settled(record, False, outcome.raised)

        return self._replay(record) if record.status == "completed" else None

    async def _report(self, effect: Effect, record: CallRecord) -> None:
        """Tell that the attempt was settled by another before its outcome came."""
        self._trail.warn("superseded", attempt=record.attempt, status=record.status)

        if self._on_superseded is None:
            return

        try:
            await called(self._on_superseded, effect, record)
        except Exception:
            log.exception("on_superseded failed for %s", effect.tool)

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


_NOT_BEGUN = Outcome(envelope.released("given up before it began"), success=False)


def _released(exc: Exception) -> Outcome:
    return Outcome(envelope.released(envelope.told(exc)), success=False, raised=exc)


def _is(record: CallRecord, outcome: Outcome) -> bool:
    status = "completed" if outcome.success else "failed"
    return record.status == status and record.result == outcome.result
