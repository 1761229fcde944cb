"""One run of one effect.

1. Look the effect up: a completed effect is replayed, at the price of one read.
2. Get the approval, if the policy asks for one.
3. Claim the key under a fresh call id. If another attempt holds the key, wait for its
   result, and take over if the holder is silent and that is permitted.
4. Run the handler.
5. Record the outcome, and act on the record that comes back. Heartbeats are written
   from the claim until then.

A run holds a key if the key's issued record has the call id that this run made. At most
one attempt holds a key at any time, in the whole store.

A crash before step 3 leaves nothing, except perhaps an approval request. A crash after
it leaves an issued call, and the store cannot show whether the effect happened. Such an
effect runs again only if ``verify`` says so, if a person decides so, or after
``stale_after`` with a handler that passes the key downstream.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from cpkit.canonical import canonical_json
from cpkit.driver.backoff import backoff_pauses
from cpkit.effects.approvals import Approvals
from cpkit.effects.attempts import (
    Attempts,
    Heartbeat,
)
from cpkit.effects.effect import (
    Effect,
    EffectPlan,
    Handler,
    NoEffect,
    call_callback,
    handling,
)
from cpkit.effects.errors import (
    ApprovalExpired,
    EffectErased,
    EffectTimeout,
    KeyReused,
)
from cpkit.effects.records import (
    Outcome,
    asked_args,
    call_args,
    error_envelope,
    error_type_of,
    exception_message,
    exception_type,
    fresh_call_id,
    outcome_of,
    released_envelope,
    result_of,
)
from cpkit.effects.requests import ApprovalRequest
from cpkit.effects.tracing import Trail
from cpkit.errors import (
    BackendUnavailable,
    CheckpointerError,
    SerializationError,
    UnknownCall,
)
from cpkit.lease import held_leases
from cpkit.records import CallRecord, JsonValue, ToolCall
from cpkit.waiting import StaleDetector, run_shielded

__all__ = ["EffectRun", "RunResult", "current_key"]

_NOT_STARTED = Outcome(released_envelope("given up before it began"), success=False)

_NEVER = datetime.fromtimestamp(0, UTC)

_OTHERS_END_WITHIN = 60.0


def current_key() -> str:
    """Return the key of the effect whose handler runs, to pass it downstream.

    Raises ``RuntimeError`` outside a handler.
    """
    if keys := handling.get():
        return keys[-1]

    raise RuntimeError("current_key() is called outside the handler of an effect")


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: the key's record, and the outcome of this caller's handler.

    Without an ``outcome`` this run called no handler, or another attempt's record
    counts. Without a record, or an erased one, the outcome is known here alone.
    """

    record: CallRecord | None
    outcome: Outcome | None = None

    @property
    def raised(self) -> Exception | None:
        """What the caller's handler raised, or why its result cannot be stored."""
        return None if self.outcome is None else self.outcome.raised

    def value(self) -> JsonValue:
        """Return the effect's result, or raise its failure."""
        if self.raised is not None:
            raise self.raised

        if self.outcome is not None:
            return self.outcome.result["value"]

        assert self.record is not None
        return result_of(self.record)

    def error_type(self) -> str | None:
        """Return the type of the effect's error; ``None`` if it did not fail."""
        if self.raised is not None:
            return exception_type(self.raised)

        return None if self.record is None else error_type_of(self.record)


class EffectRun:
    """One run of one effect.

    Once the handler has ended, its outcome exists only in this process. It is recorded
    whatever happens to the attempt and the approval meanwhile.
    """

    def __init__(
        self, attempts: Attempts, approvals: Approvals, plan: EffectPlan, trail: Trail
    ) -> None:
        self._attempts = attempts
        self._approvals = approvals
        self._plan = plan
        self._trail = trail
        self._effect = plan.effect
        self._heartbeat: Heartbeat | None = None
        self._request: ApprovalRequest | None = None
        self._took_over = False
        self._waits_until: float | None = None

    async def run(self, handler: Handler, *, wants_attempt: bool = True) -> RunResult:
        """Run the effect, wait for the process that runs it, or replay its record.

        Without ``wants_attempt`` the attempt number is not read, which saves a read,
        and the handler gets 0.
        """
        record = await self._look_up()

        try:
            while True:
                if record is None:
                    record, is_own = await self._claim(wants_attempt)

                    if is_own:
                        return await self._settled(await self._perform(handler, record))

                if record.status == "completed":
                    return await self._settled(self._replay(record))

                record = await self._wait_for(record)
        finally:
            await self._stop_heartbeat()

    async def begin(self) -> tuple[CallRecord, Heartbeat | None]:
        """Claim the effect for a caller that runs it; do not wait for another holder.

        Returns the key's record, and the heartbeat of this claim if the caller runs it.
        """
        record = await self._look_up()

        if record is None:
            record, is_own = await self._claim(wants_record=True)

            if is_own:
                return record, self._heartbeat

        self._check(record)
        return record, None

    async def _look_up(self) -> CallRecord | None:
        """Return the key's record; the key is the next one if a person reopened it."""
        key, record = await self._attempts.newest(self._effect.key)

        if key != self._effect.key:
            self._effect = replace(self._effect, key=key)
            self._plan = replace(self._plan, effect=self._effect)

        if key in handling.get():
            raise RuntimeError(
                f"effect {self._effect.tool!r} runs inside its own handler, where it "
                "would wait for itself; give the inner one other arguments or another "
                "key"
            )

        return record

    async def _settled(self, result: RunResult) -> RunResult:
        """Take the request off the list of runs, unless the next run may use it."""
        is_released = result.record is not None and result.record.status == "failed"

        if self._request is not None and not is_released:
            await self._approvals.settle(self._plan, self._request)

        return result

    # Claim

    async def _claim(self, wants_record: bool) -> tuple[CallRecord, bool]:
        """Claim the key; return the key's record, and whether this run holds it.

        Without ``wants_record`` it may be a record of the claim alone, with attempt 0.
        """
        clock = asyncio.get_running_loop().time

        while True:
            try:
                await self._get_approval()
            except ApprovalExpired:
                # An attempt that began before the expiry may have had its effect.
                found = await self._attempts.find(self._effect.key)

                if found is None:
                    raise

                return found, False

            call = await self._new_call()
            claimed_at = clock()

            try:
                holder = await self._attempts.claim(self._effect.thread_id, call)
                own = None if holder else await self._start(call, wants_record)
            except BaseException:
                # The claim may have been applied, and no handler will be called.
                await self._give_up(call, _NOT_STARTED)
                raise

            if own is not None:
                if clock() - claimed_at <= self._plan.options.stale_seconds / 2:
                    return own, True

                # The store answered late, or this process was paused: soon another run
                # may take over. The handler has not begun, so give the claim back.
                self._trail.note("answered late")
                await self._give_up(call, _NOT_STARTED)

            # A failed record is this run's own attempt: another process took it over
            # before this run learned that its claim was applied.
            if holder is not None and holder.status != "failed":
                return holder, False

    async def _get_approval(self) -> None:
        try:
            request = await self._approvals.wait_until_approved(self._plan, self._trail)
        except EffectTimeout:
            if not handling.get():
                await self._let_others_end()

            raise

        planned, changes = self._plan.effect, {}
        made = None if request is None else request.decision

        if request is not None and made is not None and isinstance(made.value, dict):
            changes = {n: v for n, v in made.value.items() if n in request.editable}

        args = {**planned.args, **changes}
        self._request = request
        self._effect = replace(planned, args=args, decision=made)

    async def _let_others_end(self) -> None:
        """Wait for the other effects of a worker's run, if only for a minute.

        In a group of tasks the timeout of this one cancels them. Then a payment is in
        doubt, or one that was approved waits for the decision of this one.
        """
        leases = [one for one in held_leases(self._attempts.cp) if one.unattended]
        clock = asyncio.get_running_loop().time
        deadline = clock() + _OTHERS_END_WITHIN

        for pause in backoff_pauses(longest=0.2) if leases else ():
            await asyncio.sleep(pause)  # first: other tasks may be about to begin

            if clock() >= deadline or not any(one.is_unfinished for one in leases):
                break

    async def _new_call(self) -> ToolCall:
        await self._stop_heartbeat()
        effect, seconds = self._effect, self._plan.options.stale_seconds
        leases = held_leases(self._attempts.cp)
        lease = (leases[-1].term_id, leases[-1].thread_id) if leases else None
        args = call_args(effect, self._plan.effect.args, lease, seconds)
        call = ToolCall(fresh_call_id(), effect.tool, args, effect.key)
        # Three heartbeats fit in ``stale_after``.
        self._heartbeat = Heartbeat(
            self._attempts.cp, effect.key, call.call_id, seconds / 3
        )
        return call

    async def _start(self, call: ToolCall, wants_record: bool) -> CallRecord | None:
        """Return the claimed record, just before the handler starts.

        ``None`` if the claim was lost.
        """
        request = self._request
        assert self._heartbeat is not None
        self._heartbeat.start()

        if not wants_record and (request is None or request.expires_after is None):
            return _unread(self._effect.thread_id, call)

        record = await self._attempts.find_claimed(call)

        if record is None:
            return None

        self._check(record)

        if (
            request is not None
            and request.is_late(record.issued_at)
            and not self._took_over
        ):
            await self._approvals.settle(self._plan, request)
            raise ApprovalExpired(call.idempotency_key, call.tool_name)

        return record

    def _check(self, record: CallRecord) -> None:
        """Raise if the record was erased, or is of a call with other arguments."""
        effect = self._plan.effect

        if record.erased:
            raise EffectErased(effect.key, effect.tool, record.status)

        if self._plan.kind == "given" and (
            canonical_json(asked_args(record)) != canonical_json(dict(effect.args))
        ):
            raise KeyReused(effect.key, effect.tool)

    # Run

    async def _perform(self, handler: Handler, own: CallRecord) -> RunResult:
        """Call the handler, and record its outcome."""
        effect = replace(self._effect, call_id=own.call.call_id, attempt=own.attempt)
        self._trail.note("claimed", attempt=effect.attempt)
        outcome = await self._call_handler(handler, effect)

        # The heart beats until the outcome is recorded: a store may take long, and a
        # run that took over meanwhile would repeat the effect.
        try:
            result = await self._record(own, outcome)
        except asyncio.CancelledError:
            # Recording it twice is safe.
            await self._give_up(own.call, outcome)
            raise

        assert self._heartbeat is not None
        await self._heartbeat.end()
        return result

    async def _call_handler(self, handler: Handler, effect: Effect) -> Outcome:
        """Call the handler. If it is cancelled, its call stays issued."""
        token = handling.set((*handling.get(), effect.key))

        try:
            result = await call_callback(handler, effect)
        except NoEffect as exc:
            return _released(exc)
        except Exception as exc:
            # After a SerializationError the effect has happened: never release it.
            released = self._plan.options.release_failures

            if released and not isinstance(exc, SerializationError):
                return _released(exc)

            return Outcome(error_envelope(exc), raised=exc)
        finally:
            handling.reset(token)

        return outcome_of(result)

    async def _record(self, own: CallRecord, outcome: Outcome) -> RunResult:
        """Record the outcome, and return what the stored record says.

        The first recorded outcome decides. If the attempt was taken over, and the new
        holder ends without an effect, this outcome is the next one.
        """
        while True:
            try:
                record, outcome = await self._attempts.record(own, outcome)
            except BackendUnavailable:
                self._trail.warn("outcome not recorded")
                raise
            except UnknownCall:
                self._trail.warn("forgotten while it ran")
                return RunResult(None, outcome)

            if record.status != "issued" or record.erased:
                break

            await self._wait_for(record, needs_approval=False)

        is_recorded = outcome.is_recorded_in(record)
        facts = {"attempt": record.attempt, "status": record.status}

        if record.erased:
            self._trail.warn("erased while it ran")
        elif not is_recorded or record.call.call_id != own.call.call_id:
            self._trail.warn("superseded", **facts)

        if is_recorded:
            self._trail.note("recorded", **facts)

        # After a release this caller reports its own error, whatever the other attempt
        # recorded. An error that was recorded as the result has success=True.
        if is_recorded or record.erased or not outcome.success:
            return RunResult(record, outcome)

        return self._replay(record)

    def _replay(self, record: CallRecord) -> RunResult:
        self._check(record)
        self._trail.set("cpkit.effect.replayed", True)
        self._trail.note("replayed", attempt=record.attempt)
        return RunResult(record)

    async def _give_up(self, call: ToolCall, outcome: Outcome) -> None:
        """Record the outcome of a run that ends here; a cancellation does not stop it.

        If the handler ran and another process released its attempt, the outcome is
        recorded for a new attempt, unless another one holds the key.
        """

        async def record() -> None:
            attempt = _unread(self._effect.thread_id, call)

            try:
                await self._attempts.record(attempt, outcome, retry=False)
            except UnknownCall:
                return  # the claim was not applied
            except CheckpointerError as exc:
                self._trail.note("outcome not recorded", because=type(exc).__name__)
                return

            assert self._heartbeat is not None
            await self._heartbeat.end()

        await run_shielded(record)

    async def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            await self._heartbeat.stop()

    # Wait for another holder

    async def _wait_for(
        self, holder: CallRecord, *, needs_approval: bool = True
    ) -> CallRecord | None:
        """Wait while another attempt holds the key, or take over from it.

        Returns the key's completed or issued record, or ``None`` if it may be free.
        """
        self._check(holder)
        self._trail.note("waiting", attempt=holder.attempt)
        effect, options = self._plan.effect, self._plan.options
        clock = asyncio.get_running_loop().time

        if self._waits_until is None and options.timeout is not None:
            self._waits_until = clock() + options.timeout

        until = self._waits_until

        async with self._attempts.wait_for(holder, options.stale_after) as reader:
            while True:
                try:
                    left = None if until is None else max(0.0, until - clock())
                    found = await reader.wait(left)
                except TimeoutError:
                    assert options.timeout is not None
                    raise EffectTimeout(
                        effect.key,
                        effect.tool,
                        options.timeout,
                        f"the result of attempt {holder.attempt}, still issued",
                        holder,
                    ) from None

                if not isinstance(found, StaleDetector):
                    is_free = found is None or found.status == "failed"
                    return None if is_free else found

                if await self._take_over(holder, found, needs_approval):
                    return None

    async def _take_over(
        self, holder: CallRecord, stale: StaleDetector, needs_approval: bool
    ) -> bool:
        """Close the attempt of a silent holder; return whether it is closed.

        Without ``verify``, ``stale_after`` alone permits a second run. A released key
        is free: the next claim, by any process, runs the effect.
        """
        verify = self._plan.options.verify

        # If the approval has expired, ``verify`` may still find that the effect landed.
        if needs_approval:
            try:
                await self._get_approval()
            except ApprovalExpired:
                if verify is None:
                    raise

        found = await self._attempts.close_silent(
            holder, verify, stale, "taken over: its holder fell silent"
        )
        how = found.action

        if how == "surfaced":
            self._trail.warn(
                f"not taken over: {found.reason:.200}", attempt=holder.attempt
            )
        elif how in ("landed", "released"):
            asked = "not asked" if verify is None else str(how == "landed").lower()
            self._trail.warn("taken over", attempt=holder.attempt, landed=asked)

        is_closed = how not in ("surfaced", "alive")
        self._took_over = self._took_over or is_closed
        return is_closed


def _released(exc: Exception) -> Outcome:
    return Outcome(released_envelope(exception_message(exc)), success=False, raised=exc)


def _unread(thread_id: str, call: ToolCall) -> CallRecord:
    """Return the record of a claim that was not read, so that its number is unknown."""
    return CallRecord(thread_id, call, "issued", 0, _NEVER, None, None)
