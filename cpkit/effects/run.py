"""One run of one effect.

1. Look the effect up: a completed effect is replayed, at the price of one read.
2. Get the approval, if the policy asks for one.
3. Claim the key under a fresh call id. If another attempt holds the key, wait for its
   result, and take over if the holder is silent and that is permitted.
4. Run the handler. Heartbeats are written from the claim until step 5 ends.
5. Record the outcome, and act on the record that comes back.

At most one attempt holds a key at any time, in the whole store. A crash before step 3
leaves nothing, except perhaps an approval request; after it, an issued call.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from cpkit.canonical import canonical_json
from cpkit.driver.backoff import backoff_pauses
from cpkit.effects.approvals import Approvals
from cpkit.effects.attempts import Attempts, Heartbeat
from cpkit.effects.effect import EffectPlan, Handler, NoEffect, call_callback, handling
from cpkit.effects.errors import ApprovalExpired, EffectErased, EffectTimeout, KeyReused
from cpkit.effects.records import (
    Outcome,
    asked_args,
    call_args,
    exception_message,
    failure_of,
    fresh_call_id,
    is_released,
    result_of,
)
from cpkit.effects.requests import ApprovalRequest
from cpkit.effects.tracing import note, warn
from cpkit.errors import BackendUnavailable, CheckpointerError
from cpkit.lease import held_leases
from cpkit.records import CallRecord, JsonValue, ToolCall
from cpkit.runs.threads import TAKEN_OVER
from cpkit.runs.waiting import STALE_AFTER, StaleDetector, run_shielded

__all__ = ["EffectRun", "RunResult", "current_key"]

_NOT_BEGUN = Outcome.release("given up before it began")

_OTHERS_END_WITHIN = 60.0


def current_key() -> str:
    """Return the key of the effect whose handler runs; else raise ``RuntimeError``."""
    if keys := handling.get():
        return keys[-1]

    raise RuntimeError("current_key() is called outside the handler of an effect")


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended; ``replayed``: with the outcome of another run."""

    record: CallRecord
    value: JsonValue = None
    error: Exception | None = None
    replayed: bool = False


class EffectRun:
    """One run of one effect."""

    def __init__(
        self, attempts: Attempts, approvals: Approvals, plan: EffectPlan
    ) -> None:
        self._attempts = attempts
        self._approvals = approvals
        self._plan = plan
        self._effect = plan.effect
        """The planned effect, with the decision of a person and its changes."""
        self._request: ApprovalRequest | None = None
        self.heartbeat: Heartbeat | None = None
        """That of this run's newest claim."""
        self._took_over = False
        self._waits_until: float | None = None

    async def run(self, handler: Handler) -> RunResult:
        """Run the effect, wait for the process that runs it, or replay its record."""
        try:
            record = await self.begin()

            while record.status == "issued" and not self.holds(record):
                record = await self._obtain(await self._wait_for(record))

            if self.holds(record):
                result = await self._perform(handler, record)
            else:
                result = self._replay(record)
        finally:
            if self.heartbeat is not None:
                await self.heartbeat.stop()

        # The next run may use the approval of an attempt that was released.
        if self._request is not None and not is_released(result.record):
            await self._approvals.settle(self._plan, self._request)

        return result

    async def begin(self) -> CallRecord:
        """Return the key's record, which this run claims if the key is free."""
        key, record = await self._attempts.newest(self._effect.key)

        if key != self._effect.key:  # a person reopened it
            self._effect = replace(self._effect, key=key)
            self._plan = replace(self._plan, effect=self._effect)

        if key in handling.get():
            raise RuntimeError(
                f"effect {self._effect.tool!r} runs inside its own handler, where it "
                "would wait for itself; give the inner one another key"
            )

        return await self._obtain(record)

    def holds(self, record: CallRecord) -> bool:
        """Return whether a record is that of this run's own attempt."""
        own = None if self.heartbeat is None else self.heartbeat.call.call_id
        return record.call.call_id == own

    async def _obtain(self, record: CallRecord | None) -> CallRecord:
        """Return the key's record; claim the key while it is free."""
        while record is None:
            record = await self._claim()

        self._check(record)
        return record

    async def _claim(self) -> CallRecord | None:
        """Claim the key; return its record, ``None`` if the claim must be repeated."""
        await self._get_approval()
        seconds = self._plan.options.stale_after or STALE_AFTER
        leases = held_leases(self._attempts.cp)
        args = call_args(self._effect, self._plan.effect.args, leases, seconds)
        call = ToolCall(fresh_call_id(), self._effect.tool, args, self._effect.key)
        self.heartbeat = Heartbeat(self._attempts, call, seconds)

        try:
            record = await self._attempts.claim(self._effect.thread_id, call)

            if record is None or not self.holds(record):
                return record

            self._check(record)
            request = self._request

            # For a takeover it is enough that an earlier attempt used it in time.
            if request and not self._took_over and request.is_late(record.issued_at):
                await self._approvals.settle(self._plan, request)
                raise ApprovalExpired(self._effect.key, self._effect.tool)
        except BaseException:
            # The claim may have been applied, and no handler will be called.
            await self._give_up(call, _NOT_BEGUN)
            raise

        if self.heartbeat.start():
            return record

        # The store answered late, or this process was paused: soon another run may take
        # over. The handler has not begun, so give the claim back.
        note(self._effect, "answered late")
        await self._give_up(call, _NOT_BEGUN)
        return None

    async def _get_approval(self) -> None:
        try:
            request = await self._approvals.wait_until_approved(self._plan)
        except EffectTimeout:
            if not handling.get():
                await self._let_others_end()

            raise

        self._request = request
        made = None if request is None else request.decision
        args = dict(self._plan.effect.args)

        if request is not None and made is not None and isinstance(made.value, dict):
            args |= {n: v for n, v in made.value.items() if n in request.editable}

        self._effect = replace(self._plan.effect, args=args, decision=made)

    async def _let_others_end(self) -> None:
        # The timeout of this effect cancels the others of its group of tasks.
        leases = [one for one in held_leases(self._attempts.cp) if one.unattended]
        clock = asyncio.get_running_loop().time
        deadline = clock() + _OTHERS_END_WITHIN

        for pause in backoff_pauses(longest=0.2) if leases else ():
            await asyncio.sleep(pause)  # first: other tasks may be about to begin

            if clock() >= deadline or not any(one.is_unfinished for one in leases):
                break

    def _check(self, record: CallRecord) -> None:
        """Raise if the record was erased, or is of a call with other arguments."""
        effect = self._plan.effect

        if record.erased:
            raise EffectErased(effect.key, effect.tool, record.status)

        if self._plan.kind == "given" and (
            canonical_json(asked_args(record)) != canonical_json(dict(effect.args))
        ):
            raise KeyReused(effect.key, effect.tool)

    async def _perform(self, handler: Handler, own: CallRecord) -> RunResult:
        """Call the handler, and record its outcome; if cancelled, it stays issued."""
        assert self.heartbeat is not None
        note(self._effect, "claimed", attempt=own.attempt)
        effect = replace(self._effect, call_id=own.call.call_id, attempt=own.attempt)
        token = handling.set((*handling.get(), effect.key))

        try:
            outcome = Outcome.returned(await call_callback(handler, effect))
        except NoEffect as exc:
            outcome = Outcome.release(exception_message(exc), exc)
        except Exception as exc:
            outcome = Outcome.failure(exc)
        finally:
            handling.reset(token)

        # The heart beats until the outcome is recorded: a store may take long, and a
        # run that took over meanwhile would repeat the effect.
        try:
            result = await self._record(own.call, outcome)
        except asyncio.CancelledError:  # recording it twice is safe
            await self._give_up(own.call, outcome)
            raise

        await self.heartbeat.end()
        return result

    async def _record(self, call: ToolCall, outcome: Outcome) -> RunResult:
        """Record the outcome of the handler, and return what the stored record says.

        The first recorded outcome decides. If another attempt holds the key by now,
        this waits for its outcome; if that one is released, this outcome is the next.
        """
        while True:
            try:
                record, outcome = await self._attempts.close(
                    self._effect.thread_id, call, outcome
                )
            except BackendUnavailable:
                warn(self._effect, "outcome not recorded")
                raise

            if record.status != "issued" or record.erased:
                break

            await self._wait_for(record, may_run=False)

        is_recorded = outcome.is_recorded_in(record)
        facts: dict[str, Any] = {"attempt": record.attempt, "status": record.status}

        if is_recorded and record.call.call_id == call.call_id:
            note(self._effect, "recorded", **facts)
        else:
            step = "erased while it ran" if record.erased else "superseded"
            warn(self._effect, step, **facts)

        if is_recorded or record.erased or outcome.released:
            return RunResult(record, outcome.stored.get("value"), outcome.raised)

        return self._replay(record)

    def _replay(self, record: CallRecord) -> RunResult:
        self._check(record)
        note(self._effect, "replayed", attempt=record.attempt)
        return RunResult(record, result_of(record), failure_of(record), replayed=True)

    async def _give_up(self, call: ToolCall, outcome: Outcome) -> None:
        """Record the outcome of a run that ends here, also if it is cancelled again."""

        async def record() -> None:
            assert self.heartbeat is not None

            try:
                await self._attempts.close(self._effect.thread_id, call, outcome)
                await self.heartbeat.end()
            except CheckpointerError as exc:  # or the claim was not applied
                note(self._effect, "outcome not recorded", because=type(exc).__name__)

        await run_shielded(record)

    async def _wait_for(
        self, holder: CallRecord, *, may_run: bool = True
    ) -> CallRecord | None:
        """Wait while another attempt holds the key, or take over from it.

        Returns the key's completed or issued record, or ``None`` if it may be free.
        """
        facts, options = {"attempt": holder.attempt}, self._plan.options
        note(self._effect, "waiting", **facts)

        if self._waits_until is None and options.timeout is not None:
            now = asyncio.get_running_loop().time()
            self._waits_until = now + options.timeout

        while True:
            try:
                async with asyncio.timeout_at(self._waits_until):
                    found = await self._attempts.wait_for(holder, options.stale_after)
            except TimeoutError:
                place = self._effect.key, self._effect.tool, options.timeout or 0.0
                result = f"the result of attempt {holder.attempt}, still issued"
                raise EffectTimeout(*place, result, holder) from None

            if not isinstance(found, StaleDetector):
                return None if found is None or is_released(found) else found

            # Without ``verify``, ``stale_after`` alone permits a second run. Where
            # people do not, the call stays in doubt.
            if may_run and options.verify is None:
                await self._get_approval()

            ended = await self._attempts.close_silent(
                holder, options.verify, found, TAKEN_OVER
            )

            if ended.action == "surfaced":
                warn(self._effect, f"not taken over: {ended.reason:.200}", **facts)

                # verify may have taken longer than the attempt, and than this wait.
                found = await self._attempts.find(holder.call.idempotency_key)

                if found is None or found.status == "completed":
                    return found
            elif ended.action != "alive":
                warn(self._effect, "taken over", how=ended.action, **facts)
                self._took_over = True
                return None
