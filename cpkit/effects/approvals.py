"""Approvals: requested and decided in the store, so that they survive every process.

A request is a call record in the thread of the effect. Its idempotency key binds the
effect's key and the exact arguments. Its outcome is write-once, so it is decided once.

Its call id follows from the effect's key alone, so a process that knows the key can
decide the request. With ``key_fields`` or ``resource``, one key may be requested with
several sets of arguments. The call ids of the later requests contain the request's own
key too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from cpkit.effects.attempts import Attempts
from cpkit.effects.effect import Effect, Notifier, Policy, call_callback
from cpkit.effects.errors import EffectDenied, EffectErased, EffectTimeout, KeyReused
from cpkit.effects.records import APPROVAL, request_key
from cpkit.effects.spec import EffectPlan
from cpkit.effects.tracing import Trail, log
from cpkit.errors import CallMismatch, UnknownCall
from cpkit.records import CallRecord, JsonValue, ToolCall

__all__ = ["ApprovalRequest", "Approvals"]


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """An effect that waits for a decision.

    ``approve(thread_id, key)`` or ``deny(thread_id, key)`` decides it. If the same key
    was requested with several sets of arguments, pass ``args`` too.
    """

    key: str
    thread_id: str
    tool: str
    args: Mapping[str, JsonValue]
    requested_at: datetime
    record: CallRecord


class Approvals:
    """Requests approvals for a ledger, and records decisions."""

    def __init__(
        self, attempts: Attempts, policy: Policy | None, notify: Notifier | None
    ) -> None:
        self._attempts = attempts
        self._policy = policy
        self._notify = notify
        self._notified: set[str] = set()

    async def wait_until_approved(self, plan: EffectPlan, trail: Trail) -> None:
        """Return when the effect needs no approval, or has one.

        Raises ``EffectDenied``, ``EffectErased``, or ``EffectTimeout`` if no decision
        came within the plan's ``approval_timeout``. A timeout of 0 looks once.
        """
        effect, timeout = plan.effect, plan.approval_timeout

        if self._policy is None or not await call_callback(self._policy, effect):
            return

        loop = asyncio.get_running_loop()
        started = notify_at = loop.time()

        for pause in self._attempts.backoff.pauses():
            record = await self._request(plan)

            if record is not None and record.status != "issued":
                self._notified.discard(record.call.idempotency_key)
                _raise_unless_approved(effect, record)
                trail.note("approved")
                return

            if record is not None and record.erased:
                raise EffectErased(effect.key, effect.tool, "issued", "approval")

            if loop.time() >= notify_at:
                notify_at = loop.time() + self._attempts.retry_timeout
                await self._notify_once(effect, trail)

            left = None if timeout is None else started + timeout - loop.time()

            if timeout is not None and left is not None and left <= 0:
                raise EffectTimeout(effect.key, effect.tool, timeout, "an approval")

            await asyncio.sleep(pause if left is None else min(pause, left))

    async def pending(self, thread_id: str) -> list[ApprovalRequest]:
        """Return the thread's undecided requests, oldest first."""
        data = await self._attempts.cp.load(thread_id)

        if data is None:
            return []

        requests = [_request_of(record) for record in data.pending]
        return [request for request in requests if request is not None]

    async def decide(
        self,
        thread_id: str,
        key: str,
        decision: dict[str, JsonValue],
        args: Mapping[str, JsonValue] | None,
    ) -> bool:
        """Record a decision; return whether the recorded decision is the same."""
        pending = [r for r in await self.pending(thread_id) if r.key == key]
        call_id = _call_id(key)

        if args is None:
            # This is an error even if one later request alone is undecided: the caller
            # may mean the first request, and another process just decided that one.
            if any(request.record.call.call_id != call_id for request in pending):
                raise ValueError(
                    f"{key!r} was requested with several sets of arguments; say with "
                    "args= which request to decide"
                )
        else:
            own_key = request_key(key, args)
            calls = [request.record.call for request in pending]
            matching = [c.call_id for c in calls if c.idempotency_key == own_key]

            if not matching:
                found = await self._attempts.cp.find_completed(own_key)
                return found is not None and _decision(found) is decision["approved"]

            call_id = matching[0]

        try:
            record = await self._attempts.resolve(
                thread_id, call_id, decision, success=True
            )
        except UnknownCall:
            return False

        return _decision(record) is decision["approved"]

    async def _request(self, plan: EffectPlan) -> CallRecord | None:
        """Record the request; return its record if it was recorded before."""
        effect = plan.effect
        own_key = request_key(effect.key, effect.args)
        call = ToolCall(
            _call_id(effect.key),
            APPROVAL,
            {"key": effect.key, "tool": effect.tool, "args": dict(effect.args)},
            own_key,
        )

        try:
            return await self._attempts.issue(effect.thread_id, call)
        except CallMismatch:
            if plan.key_kind == "given":
                raise KeyReused(effect.key, effect.tool) from None

        later = ToolCall(
            f"{call.call_id}:{own_key}", call.tool_name, call.args, own_key
        )
        return await self._attempts.issue(effect.thread_id, later)

    async def _notify_once(self, effect: Effect, trail: Trail) -> None:
        """Call the notifier, once for this request in this process."""
        own_key = request_key(effect.key, effect.args)

        if own_key in self._notified:
            return

        self._notified.add(own_key)
        trail.note("approval requested")

        if self._notify is None:
            return

        try:
            await call_callback(self._notify, effect)
        except BaseException as exc:
            # The notification was not delivered, so it is tried again: by this run
            # after a while, or by the next run.
            self._notified.discard(own_key)

            if not isinstance(exc, Exception):
                raise

            log.exception("on_approval_required failed for %s", effect.tool)


def _call_id(key: str) -> str:
    return f"approval:{key}"


def _decision(record: CallRecord) -> bool | None:
    """Return the recorded decision; ``None`` if it is missing or was erased."""
    if record.status != "completed" or record.erased:
        return None

    return isinstance(record.result, dict) and record.result.get("approved") is True


def _raise_unless_approved(effect: Effect, record: CallRecord) -> None:
    """Raise unless the record approves the effect."""
    if record.erased:
        raise EffectErased(effect.key, effect.tool, record.status, "approval")

    if _decision(record):
        return

    found = record.result if isinstance(record.result, dict) else {}
    reason, by = found.get("reason"), found.get("by")

    if record.status == "failed":
        reason = "the request was withdrawn without a decision"

    raise EffectDenied(
        effect.key,
        effect.tool,
        reason if isinstance(reason, str) else None,
        by if isinstance(by, str) else None,
    )


def _request_of(record: CallRecord) -> ApprovalRequest | None:
    """Return the approval request of a record, or ``None`` for another call."""
    if record.call.tool_name != APPROVAL:
        return None

    match record.call.args:
        case {"key": str(key), "tool": str(tool), "args": dict(args)}:
            return ApprovalRequest(
                key, record.thread_id, tool, args, record.issued_at, record
            )

    return None
