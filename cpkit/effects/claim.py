"""Claiming an effect's key: approval, claim, waiting, takeover.

A run holds a key if the key's issued record has the call id that this run made. At most
one attempt holds a key at any time, in the whole store.
"""

from __future__ import annotations

import asyncio

from cpkit.canonical import canonical_json
from cpkit.effects.approvals import Approvals
from cpkit.effects.attempts import (
    Attempts,
    Heartbeat,
    ask_verify,
    close_attempt,
    delete_heartbeats,
    read_heartbeat,
    run_shielded,
    store_doubt,
)
from cpkit.effects.effect import EffectPlan, Landed, NotLanded, Verdict
from cpkit.effects.errors import (
    ApprovalExpired,
    EffectErased,
    EffectTimeout,
    KeyReused,
)
from cpkit.effects.records import (
    Outcome,
    call_args,
    error_envelope,
    fresh_call_id,
    released_envelope,
    value_envelope,
)
from cpkit.effects.requests import ApprovalRequest
from cpkit.effects.tracing import Trail
from cpkit.errors import (
    BackendUnavailable,
    CheckpointerError,
    PayloadTooLarge,
    SerializationError,
)
from cpkit.records import CallRecord, ToolCall
from cpkit.waiting import StaleDetector
from cpkit.wakeups import Reader

__all__ = ["Claim"]

_NOT_STARTED = Outcome(released_envelope("given up before it began"), success=False)


class Claim:
    """One run's claim of one effect's key.

    ``call`` is the current attempt, and ``heartbeat`` writes its heartbeats. While its
    id is in ``running``, a resume by the same ledger leaves the call alone. `forget`
    removes the id.
    """

    call: ToolCall
    heartbeat: Heartbeat

    def __init__(
        self,
        attempts: Attempts,
        approvals: Approvals,
        plan: EffectPlan,
        trail: Trail,
        running: set[str],
    ) -> None:
        self._attempts = attempts
        self._approvals = approvals
        self._plan = plan
        self._trail = trail
        self._running = running
        self._call_id = ""
        self._held = False
        self._asked_at = 0.0
        """When this run last sent a claim, or asked whether it holds the key."""
        self.request: ApprovalRequest | None = None
        """The approval request that allows this run, if it needs one."""
        self.handler_ran = False
        """Whether the handler ran. Then the approval does not matter any more, and only
        the outcome has to be recorded."""

    async def acquire(
        self, *, wait: bool, wants_record: bool, holder: CallRecord | None = None
    ) -> tuple[bool, CallRecord | None]:
        """Try to claim the key; return whether this run holds it, and a record.

        - ``(True, None)``: this run holds the key.
        - ``(True, record)``: the same, with this run's record. Only ``wants_record``
          gets it, because it costs a read.
        - ``(False, record)``: another attempt has the key. With ``wait`` its record is
          completed, because this method waits until it is, or the key is free.

        ``holder`` is the key's issued record, if it was read already.
        """
        try:
            while True:
                self._new_call()
                record = holder or await self._claim()
                holder = None

                if wait and record is not None:
                    record = await self._wait_for_others(record)

                if record is not None:
                    return False, record

                self._held = True

                if self.handler_ran:
                    return True, None

                # Only a run that waits writes heartbeats later on, and deletes them.
                held, record = await self._confirm(wants_record, has_heartbeat=wait)

                if held:
                    return True, record
        except (Exception, asyncio.CancelledError) as exc:
            unclear = isinstance(exc, asyncio.CancelledError | BackendUnavailable)

            # The claim was applied, or may have been, but no handler will be called.
            if (self._held or unclear) and not self.handler_ran:
                await self.abandon(_NOT_STARTED)

            raise

    async def abandon(self, outcome: Outcome) -> None:
        """Record the outcome of a run that ends here; a cancellation does not stop it.

        If the handler ran and another process released its attempt, the outcome is
        recorded for a new attempt, unless another one holds the key.
        """
        await run_shielded(lambda: self._abandon(outcome))

    async def _abandon(self, outcome: Outcome) -> None:
        try:
            await self._record_last(outcome)
        except (PayloadTooLarge, SerializationError) as exc:
            # The effect happened, and the store cannot hold its result.
            await self._abandon(Outcome(error_envelope(exc)))
        except CheckpointerError as exc:
            self._trail.note("outcome not recorded", because=type(exc).__name__)
        else:
            if self.handler_ran:
                key = self._plan.effect.key
                await delete_heartbeats(self._attempts.cp, key)
            else:
                await self.heartbeat.delete()

    async def _record_last(self, outcome: Outcome) -> None:
        # If the answer to the claim was lost, the claim may have been applied. Then
        # ``success=False`` frees the key.
        if self._held or not outcome.success:
            record = await self._record_once(outcome)

            if record.status != "failed" or record.erased or not outcome.success:
                return

            self._new_call()

        if await self._claim() is None:
            await self._record_once(outcome)

    async def _record_once(self, outcome: Outcome) -> CallRecord:
        return await self._attempts.cp.record_result(
            self._thread_id,
            self.call.call_id,
            outcome.result,
            success=outcome.success,
        )

    def forget(self) -> None:
        """Stop protecting the call from a resume in the same ledger."""
        self._running.discard(self._call_id)

    def check(self, record: CallRecord) -> None:
        """Raise if the record was erased, or is of a call with other arguments."""
        effect = self._plan.effect

        if record.erased:
            raise EffectErased(effect.key, effect.tool, record.status)

        if self._plan.key_kind == "given":
            recorded = record.call.args.get("args")

            if canonical_json(recorded) != canonical_json(effect.args):
                raise KeyReused(effect.key, effect.tool)

    async def acted_upon(self) -> None:
        """Take the approval request of this run off the list of open requests."""
        if self.request is not None:
            await self._approvals.acted_upon(self._plan, self.request.number)

    async def wait_until_approved(self) -> None:
        """Wait for the approval, if the policy asks for one."""
        self.request = await self._approvals.wait_until_approved(
            self._plan, self._trail
        )

    async def _confirm(
        self, wants_record: bool, has_heartbeat: bool
    ) -> tuple[bool, CallRecord | None]:
        """Return whether the handler may start now, and the record if it was read.

        If the store answered late, or this process was paused, another process may have
        closed the attempt. So if the last request to the store was sent more than half
        a heartbeat interval ago, this writes a heartbeat and reads the record again,
        until an answer comes in time. If the key or the approval is lost, the caller
        has to claim again.
        """
        record = None

        while True:
            if late := self._is_late():
                self._trail.note("answered late")

                if has_heartbeat:
                    await self.heartbeat.write()

            if late or (wants_record and record is None):
                self._asked_at = asyncio.get_running_loop().time()
                record = await self._attempts.find_claimed(self._thread_id, self.call)

                if record is None or record.status != "issued":
                    await self.heartbeat.delete()
                    return False, None

                self.check(record)

            if await self._approval_is_lost():
                # Do not hold the key while the next try waits for a new approval.
                await self.abandon(_NOT_STARTED)
                return False, None

            if not self._is_late():
                return True, record

    def _is_late(self) -> bool:
        now = asyncio.get_running_loop().time()
        return now - self._asked_at > self._plan.heartbeat / 2

    async def _approval_is_lost(self) -> bool:
        """Return whether the approval no longer counts.

        It may have expired, and a person may have denied the request that followed. By
        this process's clock it may not have expired yet, so the newest request is read.
        """
        if self.request is None or self.request.expires_at is None:
            return False

        newest = await self._approvals.newest(self._plan)
        return newest is None or not newest.is_approved

    @property
    def _thread_id(self) -> str:
        return self._plan.effect.thread_id

    def _new_call(self) -> None:
        effect = self._plan.effect
        self._running.discard(self._call_id)
        self._call_id = fresh_call_id()
        self._running.add(self._call_id)
        self._held = False
        self.call = ToolCall(self._call_id, effect.tool, call_args(effect), effect.key)
        self.heartbeat = Heartbeat(
            self._attempts.cp, effect.key, self._call_id, self._plan.heartbeat
        )

    async def _claim(self) -> CallRecord | None:
        """Claim the key; return the key's record, or ``None`` if this run holds it."""
        while True:
            if not self.handler_ran:
                try:
                    await self.wait_until_approved()
                except ApprovalExpired:
                    # An attempt that began before the expiry may have had its effect.
                    found = await self._attempts.find_holder(self.call.idempotency_key)

                    if found is None:
                        raise

                    return found

            self._asked_at = asyncio.get_running_loop().time()

            # If the handler ran, its outcome exists only in this process.
            record = await self._attempts.claim(
                self._thread_id, self.call, retry_rejected=self.handler_ran
            )

            if record is None or record.status != "failed":
                return record

            # The failed record is this run's own attempt: another process took it over
            # before this run learned that its claim was applied.
            self._new_call()

    async def _wait_for_others(self, record: CallRecord | None) -> CallRecord | None:
        """Return the key's record once it is completed, or ``None`` if this run has it.

        ``record`` is the key's record now.
        """
        assert record is not None

        if record.status == "completed":
            return record

        self._trail.note("waiting", attempt=record.attempt)
        limit = self._plan.timeout
        clock = asyncio.get_running_loop().time
        deadline = None if limit is None else clock() + limit

        while record is not None and record.status == "issued":
            self.check(record)
            holder = record

            waiting = self._attempts.wait_for(holder, self._plan.stale_after)

            async with waiting as reader:
                while record == holder and not reader.is_over:
                    found = await self._wait(reader, holder, deadline)
                    record = found or await self._claim()

        return record

    async def _wait(
        self, reader: Reader, holder: CallRecord, deadline: float | None
    ) -> CallRecord | None:
        """Wait while another attempt holds the key.

        Returns the key's completed or issued record, or ``None`` if it may be free.
        """
        effect, limit = self._plan.effect, self._plan.timeout
        clock = asyncio.get_running_loop().time

        while True:
            try:
                left = None if deadline is None else max(0.0, deadline - clock())
                found = await reader.wait(left)
            except TimeoutError:
                assert limit is not None
                waiting_for = f"the result of attempt {holder.attempt}, still issued"
                raise EffectTimeout(
                    effect.key, effect.tool, limit, waiting_for, holder
                ) from None

            if not isinstance(found, StaleDetector):
                return None if found is None or found.status == "failed" else found

            if await self._take_over(holder, found):
                return None

    async def _take_over(self, holder: CallRecord, stale: StaleDetector) -> bool:
        """Close the attempt of a stale holder; return whether it is closed.

        With ``verify``, the attempt is released only after ``verify`` said that its
        effect did not land. Without it, ``stale_after`` alone permits a second run. A
        released key is free: the next claim, by any process, runs the effect.
        """
        cp = self._attempts.cp

        # If the handler ran, its outcome is recorded whatever the approval says now. If
        # the approval has expired, ``verify`` may still find that the effect landed.
        if not self.handler_ran:
            try:
                await self.wait_until_approved()
            except ApprovalExpired:
                if self._plan.verify is None:
                    raise

        if self._plan.verify is None:
            verdict: Verdict = NotLanded()
        else:
            verdict = await ask_verify(cp, self._plan.verify, holder)

        if verdict is None:
            self._trail.warn("not taken over: in doubt", attempt=holder.attempt)
            return False

        # The callbacks took time, and a holder that was only slow may have written a
        # heartbeat since.
        if not await stale.is_stale(lambda: read_heartbeat(cp, holder)):
            return False

        if landed := isinstance(verdict, Landed):
            result = value_envelope(verdict.result)
        else:
            result = released_envelope("taken over: its holder fell silent")

        try:
            _, closed_here = await close_attempt(
                self._attempts, holder, result, success=landed
            )
        except (PayloadTooLarge, SerializationError) as exc:
            # The store cannot hold the answer of verify, so the answer is unusable.
            self._trail.warn("not taken over: in doubt", because=type(exc).__name__)
            await store_doubt(cp, holder, f"its answer cannot be stored: {exc}")
            return False

        if closed_here:
            said = "true" if landed else "false"
            answer = "not asked" if self._plan.verify is None else said
            self._trail.warn("taken over", attempt=holder.attempt, landed=answer)

        return True
