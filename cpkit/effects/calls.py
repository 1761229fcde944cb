"""The call methods as the layer uses them: asked again where an answer was lost."""

from __future__ import annotations

from typing import Any

from cpkit.driver.backoff import Backoff
from cpkit.protocol import Checkpointer, KeepsReceipts
from cpkit.records import CallRecord, JsonValue, ToolCall
from cpkit.waiting import retry_unclear

__all__ = ["Calls"]


class Calls:
    """A store's calls, behind answers that are lost now and then.

    ``patience`` is for how many seconds to go on asking.
    """

    def __init__(
        self, cp: Checkpointer[Any], backoff: Backoff, patience: float
    ) -> None:
        self.cp = cp
        self.backoff = backoff
        self.patience = patience
        self._receipts = cp if isinstance(cp, KeepsReceipts) else None

    async def claim(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        """Claim the call's key; ``None`` says that the call holds it.

        The call's id must have been made by the caller for this attempt alone: only
        then does its own issued record say that an earlier answer was lost.
        """
        record = await self.ask(thread_id, call)

        if record is None or record.erased or not _same(record, call):
            return record

        return None if record.status == "issued" else record

    async def ask(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        """Ask for the call to be issued, as ``record_issued``."""
        return await retry_unclear(
            lambda: self.cp.record_issued(thread_id, call), self.backoff, self.patience
        )

    async def on_record(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        """Return the record of a call that was claimed, while it holds its key."""
        receipts = self._receipts

        if receipts is not None:
            found = await retry_unclear(
                lambda: receipts.find_call(call.idempotency_key),
                self.backoff,
                self.patience,
                retry_rejected=True,  # the key is claimed: an error would leave it held
            )
        else:
            # Asking for what is on record writes nothing and returns it. Twice, where
            # the first had to write it anew because the thread was just forgotten.
            found = await self.ask(thread_id, call) or await self.ask(thread_id, call)

        if found is None or not _same(found, call) or found.status == "failed":
            return None

        return found

    async def holder(self, key: str) -> CallRecord | None:
        """Return the completed record of a key, or any holder that the store shows."""
        if self._receipts is not None:
            return await self._receipts.find_call(key)

        return await self.cp.find_completed(key)

    async def resolve(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool,
        insist: bool = False,
    ) -> CallRecord:
        """Record an outcome, and return the record as it stands.

        With ``insist`` also a store that is certainly not reached is asked again:
        there is an outcome in hand that is worth the wait.
        """
        return await retry_unclear(
            lambda: self.cp.record_result(thread_id, call_id, result, success=success),
            self.backoff,
            self.patience,
            retry_rejected=insist,
        )


def _same(record: CallRecord, call: ToolCall) -> bool:
    return record.call.call_id == call.call_id
