"""One run of one effect.

1. Look the effect up: a completed effect is replayed, at the price of one read.
2. Get the approval, if the policy asks for one.
3. Claim the key under a fresh call id. If another attempt holds the key, wait for its
   result, and take over if the holder is stale. If the store answered late, read the
   record again: another run may have taken over.
4. Run the handler.
5. Record the outcome, and act on the record that comes back. Heartbeats are written
   from step 4 until then.

A crash before step 3 leaves nothing, except perhaps an approval request. A crash after
it leaves an issued call, and the store cannot show whether the effect happened. Such an
effect runs again only if ``verify`` says so, if a person decides so, or after
``stale_after`` with a handler that passes the key downstream.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cpkit.effects.attempts import Attempts
from cpkit.effects.claim import Claim
from cpkit.effects.effect import (
    Effect,
    EffectPlan,
    Handler,
    NoEffect,
    SupersededHook,
    call_callback,
)
from cpkit.effects.records import (
    Outcome,
    error_envelope,
    error_type_of,
    exception_message,
    exception_type,
    released_envelope,
    result_of,
    value_envelope,
)
from cpkit.effects.tracing import Trail, log
from cpkit.errors import (
    BackendUnavailable,
    PayloadTooLarge,
    SerializationError,
    UnknownCall,
)
from cpkit.records import CallRecord, JsonValue

__all__ = ["EffectRun", "RunResult"]


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: the key's record, and what this caller alone knows.

    ``raised`` is the exception of this caller's handler, or the reason why its result
    could not be stored. ``unrecorded`` is the outcome of a handler whose record was
    erased or deleted while it ran.
    """

    record: CallRecord | None
    replayed: bool
    raised: Exception | None = None
    unrecorded: Outcome | None = None

    @property
    def is_released(self) -> bool:
        """Whether the attempt ended without an effect, so that its key is free."""
        return self.record is not None and self.record.status == "failed"

    def value(self) -> JsonValue:
        """Return the effect's result, or raise its failure."""
        if self.raised is not None:
            raise self.raised

        if self.unrecorded is not None:
            return self.unrecorded.result["value"]

        assert self.record is not None
        return result_of(self.record)

    def error_type(self) -> str | None:
        """Return the type of the effect's error; ``None`` if it did not fail."""
        if self.raised is not None:
            return exception_type(self.raised)

        return None if self.record is None else error_type_of(self.record)


class EffectRun:
    """One run of one effect."""

    def __init__(
        self,
        attempts: Attempts,
        claim: Claim,
        plan: EffectPlan,
        trail: Trail,
        on_superseded: SupersededHook | None,
    ) -> None:
        self._attempts = attempts
        self._claim = claim
        self._plan = plan
        self._trail = trail
        self._on_superseded = on_superseded
        self._outcome: Outcome | None = None
        """The outcome of the handler; ``None`` until the handler has ended."""

    async def run(self, handler: Handler, *, wants_attempt: bool = True) -> RunResult:
        """Run the effect, wait for the process that runs it, or replay its record.

        Without ``wants_attempt`` the attempt number is not read, which saves a read,
        and the handler gets 0.
        """
        record = await self._attempts.find_holder(self._plan.effect.key)

        if record is not None and record.status == "completed":
            return self._replay(record)

        try:
            result = await self._run(handler, record, wants_attempt)

            # A released attempt has not acted on the approval: the next run may.
            if not result.is_released:
                await self._claim.acted_upon()

            return result
        finally:
            self._claim.forget()

    async def _run(
        self, handler: Handler, holder: CallRecord | None, wants_attempt: bool
    ) -> RunResult:
        try:
            while True:
                held, record = await self._claim.acquire(
                    wait=True, wants_record=wants_attempt, holder=holder
                )
                holder = None

                if not held:
                    assert record is not None
                    return self._replay(record)

                attempt = 0 if record is None else record.attempt
                result = await self._perform(handler, self._effect(attempt))

                # None: taken over, and the key is free. Claim again and record the
                # same outcome; the handler is not called twice.
                if result is not None:
                    return result
        except asyncio.CancelledError:
            # If the handler has ended, its outcome is known. Recording it twice is
            # safe.
            if self._outcome is not None:
                await self._claim.abandon(self._outcome)

            raise

    async def begin(self) -> tuple[CallRecord, bool]:
        """Claim the effect; return the key's record, and whether the caller runs it."""
        held = False

        try:
            record = await self._attempts.find_holder(self._plan.effect.key)

            if record is None or record.status == "issued":
                held, record = await self._claim.acquire(
                    wait=False, wants_record=True, holder=record
                )
        finally:
            if not held:
                self._claim.forget()

        assert record is not None
        self._claim.check(record)
        return record, held

    def _effect(self, attempt: int) -> Effect:
        """Return the effect as its handler gets it."""
        planned = self._plan.effect
        return Effect(
            planned.key,
            planned.thread_id,
            planned.tool,
            planned.args,
            self._claim.call.call_id,
            attempt,
            planned.tool_call_id,
        )

    async def _perform(self, handler: Handler, effect: Effect) -> RunResult | None:
        """Call the handler, unless it ran already, and record its outcome.

        ``None`` means that the attempt was taken over and its key is free again.
        """
        heartbeat = self._claim.heartbeat

        # Also while the outcome is recorded: a store may take long, and a run that took
        # over meanwhile would repeat the effect.
        async with heartbeat:
            if self._outcome is None:
                self._trail.note("claimed", attempt=effect.attempt)
                self._outcome = await self._call_handler(handler, effect)
                self._claim.handler_ran = True

            result = await self._record(effect, self._outcome)

        await heartbeat.delete()
        return result

    async def _call_handler(self, handler: Handler, effect: Effect) -> Outcome:
        """Call the handler. If it is cancelled, its call stays issued."""
        try:
            result = await call_callback(handler, effect)
        except NoEffect as exc:
            return _released(exc)
        except Exception as exc:
            # After a SerializationError the effect has happened: never release it.
            if self._plan.release_failures and not isinstance(exc, SerializationError):
                return _released(exc)

            return Outcome(error_envelope(exc), raised=exc)

        try:
            return Outcome(value_envelope(result))
        except Exception as exc:
            # The effect happened, and JSON cannot hold its result: never release it.
            return Outcome(error_envelope(exc), raised=exc)

    async def _record(self, effect: Effect, outcome: Outcome) -> RunResult | None:
        """Record the outcome, and return what the stored record says.

        The first recorded outcome decides. ``None`` means that the attempt was taken
        over and its key is free again.
        """
        try:
            try:
                record = await self._resolve(outcome)
            except (PayloadTooLarge, SerializationError) as exc:
                # The effect happened, and the store cannot hold its result.
                outcome = self._outcome = Outcome(error_envelope(exc), raised=exc)
                record = await self._resolve(outcome)
        except BackendUnavailable:
            self._trail.warn("outcome not recorded")
            raise
        except UnknownCall:
            self._trail.warn("forgotten while it ran")
            return RunResult(None, False, outcome.raised, outcome)

        if record.erased:
            self._trail.warn("erased while it ran")
            return RunResult(record, False, outcome.raised, outcome)

        if outcome.is_recorded_in(record):
            self._trail.note("recorded", attempt=record.attempt, status=record.status)
            return RunResult(record, False, outcome.raised)

        await self._report_superseded(effect, record)

        # success=False means released: the attempt had no effect. An error that was
        # recorded as the result has success=True.
        if not outcome.success:
            # So this caller reports its own error, whatever the other attempt recorded.
            return RunResult(record, False, outcome.raised)

        return self._replay(record) if record.status == "completed" else None

    async def _report_superseded(self, effect: Effect, record: CallRecord) -> None:
        """Report that another process recorded an outcome for this attempt first."""
        self._trail.warn("superseded", attempt=record.attempt, status=record.status)

        if self._on_superseded is None:
            return

        try:
            await call_callback(self._on_superseded, effect, record)
        except Exception:
            log.exception("on_superseded failed for %s", effect.tool)

    async def _resolve(self, outcome: Outcome) -> CallRecord:
        return await self._attempts.resolve(
            self._plan.effect.thread_id,
            self._claim.call.call_id,
            outcome.result,
            success=outcome.success,
            retry_rejected=True,
        )

    def _replay(self, record: CallRecord) -> RunResult:
        self._claim.check(record)
        self._trail.set("cpkit.effect.replayed", True)
        self._trail.note("replayed", attempt=record.attempt)
        return RunResult(record, True)


def _released(exc: Exception) -> Outcome:
    return Outcome(released_envelope(exception_message(exc)), success=False, raised=exc)
