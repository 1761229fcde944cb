"""Known bugs, planted to prove that the simulation finds them."""

from __future__ import annotations

import asyncio
from typing import Any

from cpkit import CallRecord, JsonValue, ToolCall
from cpkit.effects import EffectLedger
from cpkit.effects.effect import Handler
from cpkit.effects.run import EffectRun, RunResult
from tests.broken.reference import Reference

__all__ = [
    "ApprovesAfterClaim",
    "ChecksThenInserts",
    "FreesErasedKeys",
    "OverwritesResults",
]


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


class FreesErasedKeys(Reference):
    """A store in which a call whose content is erased does not hold its key."""

    async def erase_calls(self, thread_id: str, before: Any, **options: Any) -> int:
        erased = await super().erase_calls(thread_id, before, **options)

        for call in self._store.of_thread(thread_id):
            if call.erased:
                self._store.attempts.pop(call.idempotency_key, None)

        return erased


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

    async def _get_approval(self) -> None:
        """Stand for the approval before the claim and the takeover."""

    async def _perform(self, handler: Handler, own: CallRecord) -> RunResult:
        if own.attempt == 1:
            await EffectRun._get_approval(self)

        return await super()._perform(handler, own)


class ApprovesAfterClaim(EffectLedger):
    """A ledger that a crash between claim and request lets run an effect unapproved."""

    make_run = _LateApproval
