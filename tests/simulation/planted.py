"""Bugs that were found in the wild, planted to prove that the simulation finds them."""

from __future__ import annotations

import asyncio

from cpkit import CallRecord, JsonValue, ToolCall
from cpkit.effects import EffectLedger
from cpkit.effects.effect import Effect, Handler
from cpkit.effects.outcome import Plan, Settled
from cpkit.effects.run import EffectRun
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

        # The row goes in beside the one that came first.
        place = (last.thread_id, last.call_id)
        self._store.calls[place] = last._replace(status="failed")

        try:
            return await super().record_issued(thread_id, call)
        finally:
            self._store.calls[place] = last


class OverwritesResults(Reference):
    """A store in which the last result wins, so that a late finisher changes it."""

    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, *, success: bool = True
    ) -> CallRecord:
        stored = self._store.calls.get((thread_id, call_id))

        if stored is not None:
            self._store.calls[thread_id, call_id] = stored._replace(status="issued")

        return await super().record_result(thread_id, call_id, result, success=success)


class _LateApproval(EffectRun):
    """Asks between claim and effect; who takes over believes that it was asked."""

    async def _approve(self) -> None:
        """Ask for nothing before the claim and the takeover."""

    async def _perform(self, handler: Handler, effect: Effect) -> Settled | None:
        if effect.attempt == 1:
            await super()._approve()

        return await super()._perform(handler, effect)


class ApprovesAfterClaim(EffectLedger):
    """A ledger whose crash between claim and request lets a takeover run."""

    def _run(self, plan: Plan, trail: Trail) -> EffectRun:
        return _LateApproval(
            self._calls,
            self._approvals,
            plan,
            trail,
            self._running,
            self._on_superseded,
        )
