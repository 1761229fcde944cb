"""Known bugs, planted to prove that the simulation finds them."""

from __future__ import annotations

import asyncio

from cpkit import CallRecord, JsonValue, ToolCall
from cpkit.effects import EffectLedger
from cpkit.effects.attempts import Attempts
from cpkit.effects.claim import Claim
from cpkit.effects.effect import Effect, EffectPlan, Handler
from cpkit.effects.run import EffectRun, RunResult
from cpkit.effects.tracing import Trail
from tests.broken.reference import Reference

__all__ = ["ApprovesAfterClaim", "ChecksThenInserts", "OverwritesResults"]


class ChecksThenInserts(Reference):
    """A store that looks for a holder first, and inserts in a second step."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        holder = await self.find_call(call.idempotency_key)
        await asyncio.sleep(0)

        if holder is not None:
            return holder

        last = self._store.last_attempt(call.idempotency_key)

        if last is None or last.status == "failed":
            return await super().record_issued(thread_id, call)

        # Insert a second row beside the first.
        place = (last.thread_id, last.call_id)
        self._store.calls[place] = last._replace(status="failed")

        try:
            return await super().record_issued(thread_id, call)
        finally:
            self._store.calls[place] = last


class OverwritesResults(Reference):
    """A store in which the last result wins, so that a late outcome replaces it."""

    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, *, success: bool = True
    ) -> CallRecord:
        stored = self._store.calls.get((thread_id, call_id))

        if stored is not None:
            self._store.calls[thread_id, call_id] = stored._replace(status="issued")

        return await super().record_result(thread_id, call_id, result, success=success)


class _LateApproval(EffectRun):
    """Gets the approval after the claim; a takeover relies on the earlier attempt."""

    def __init__(
        self, attempts: Attempts, claim: Claim, plan: EffectPlan, trail: Trail
    ) -> None:
        super().__init__(attempts, claim, plan, trail, on_superseded=None)
        self._wait_until_approved = claim.wait_until_approved
        vars(claim)["wait_until_approved"] = self._approve_nothing

    async def _approve_nothing(self) -> None:
        """Stand for the approval before the claim and the takeover."""

    async def _perform(self, handler: Handler, effect: Effect) -> RunResult | None:
        if effect.attempt == 1:
            await self._wait_until_approved()

        return await super()._perform(handler, effect)


class ApprovesAfterClaim(EffectLedger):
    """A ledger that a crash between claim and request lets run an effect unapproved."""

    def _new_run(self, plan: EffectPlan, trail: Trail) -> EffectRun:
        claim = Claim(self._attempts, self._approvals, plan, trail, self._running)
        return _LateApproval(self._attempts, claim, plan, trail)
