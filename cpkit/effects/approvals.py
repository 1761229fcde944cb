"""Approvals: asked for and decided in the store, so that they survive everybody.

A request is a call record of its own, in the thread of the effect. Its idempotency key
binds the effect's key and the exact arguments, and its outcome is write-once, so it is
decided once. Its call id follows from the effect's key alone, so whoever knows the key
can decide it; only where one key is asked for with several arguments (``key_fields``,
``resource``) do the later ones carry their own key in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from cpkit.effects.calls import Calls
from cpkit.effects.effect import Effect, Notifier, Policy, called
from cpkit.effects.errors import EffectDenied, EffectErased, EffectTimeout, KeyReused
from cpkit.effects.keys import APPROVAL, KeyKind, request_key
from cpkit.effects.tracing import Trail, log
from cpkit.errors import CallMismatch, UnknownCall
from cpkit.records import CallRecord, JsonValue, ToolCall

__all__ = ["ApprovalRequest", "Approvals"]


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """An effect that waits for a decision.

    ``approve(thread_id, key)`` or ``deny(thread_id, key)`` decides it; with ``args``
    too where the same key was asked for with several arguments.
    """

    key: str
    thread_id: str
    tool: str
    args: Mapping[str, JsonValue]
    requested_at: datetime
    record: CallRecord


class Approvals:
    """The approval side of a ledger."""

    def __init__(
        self, calls: Calls, policy: Policy | None, notify: Notifier | None
    ) -> None:
        self._calls = calls
        self._policy = policy
        self._notify = notify
        self._told: set[str] = set()

    async def granted(
        self, effect: Effect, kind: KeyKind, timeout: float | None, trail: Trail
    ) -> None:
        """Return when the effect may run: it needs no approval, or it has one.

        Raises ``EffectDenied``, ``EffectErased``, or ``EffectTimeout`` where nobody
        decided in time; 0 looks once.
        """
        if self._policy is None or not await called(self._policy, effect):
            return

        loop = asyncio.get_running_loop()
        began = tell_at = loop.time()

        for pause in self._calls.backoff.pauses():
            record = await self._request(effect, kind)

            if record is not None and record.status != "issued":
                self._told.discard(record.call.idempotency_key)
                _raise_unless_approved(effect, record)
                trail.note("approved")
                return

            if record is not None and record.erased:
                raise EffectErased(effect.key, effect.tool, "issued", "approval")

            if loop.time() >= tell_at:
                tell_at = loop.time() + self._calls.patience
                await self._tell(effect, trail)

            left = None if timeout is None else began + timeout - loop.time()

            if timeout is not None and left is not None and left <= 0:
                raise EffectTimeout(effect.key, effect.tool, timeout, "an approval")

            await asyncio.sleep(pause if left is None else min(pause, left))

    async def pending(self, thread_id: str) -> list[ApprovalRequest]:
        """Return the thread's undecided requests, oldest first."""
        data = await self._calls.cp.load(thread_id)

        if data is None:
            return []

        found = [_read(record) for record in data.pending]
        return [request for request in found if request is not None]

    async def decide(
        self,
        thread_id: str,
        key: str,
        decision: dict[str, JsonValue],
        args: Mapping[str, JsonValue] | None,
    ) -> bool:
        """Record a decision; return whether the one on record says the same."""
        asked = [r for r in await self.pending(thread_id) if r.key == key]
        call_id = _call_id(key)

        if args is None:
            # Nor where only a later request is left: whoever says "this key" may have
            # seen the one that was decided in the meantime.
            if any(request.record.call.call_id != call_id for request in asked):
                raise ValueError(
                    f"{key!r} was asked for with several sets of arguments; say with "
                    "args= which of them is decided"
                )
        else:
            own_key = request_key(key, args)
            records = [request.record.call for request in asked]
            meant = [c.call_id for c in records if c.idempotency_key == own_key]

            if not meant:
                found = await self._calls.cp.find_completed(own_key)
                return found is not None and _says(found) is decision["approved"]

            call_id = meant[0]

        try:
            record = await self._calls.resolve(
                thread_id, call_id, decision, success=True
            )
        except UnknownCall:
            return False

        return _says(record) is decision["approved"]

    async def _request(self, effect: Effect, kind: KeyKind) -> CallRecord | None:
        """Have the request on record, and return it if it was there before."""
        own_key = request_key(effect.key, effect.args)
        call = ToolCall(
            _call_id(effect.key),
            APPROVAL,
            {"key": effect.key, "tool": effect.tool, "args": dict(effect.args)},
            own_key,
        )

        try:
            return await self._calls.ask(effect.thread_id, call)
        except CallMismatch:
            if kind == "given":
                raise KeyReused(effect.key, effect.tool) from None

        another = ToolCall(
            f"{call.call_id}:{own_key}", call.tool_name, call.args, own_key
        )
        return await self._calls.ask(effect.thread_id, another)

    async def _tell(self, effect: Effect, trail: Trail) -> None:
        """Tell the notifier, once for this request in this process."""
        own_key = request_key(effect.key, effect.args)

        if own_key in self._told:
            return

        self._told.add(own_key)
        trail.note("approval requested")

        if self._notify is None:
            return

        try:
            await called(self._notify, effect)
        except BaseException as exc:
            # Nobody knows of it yet, so it is told again: by this run after a while, or
            # by the next one.
            self._told.discard(own_key)

            if not isinstance(exc, Exception):
                raise

            log.exception("on_approval_required failed for %s", effect.tool)


def _call_id(key: str) -> str:
    return f"approval:{key}"


def _says(record: CallRecord) -> bool | None:
    """Return the decision on record; ``None`` where there is none, or none any more."""
    if record.status != "completed" or record.erased:
        return None

    return isinstance(record.result, dict) and record.result.get("approved") is True


def _raise_unless_approved(effect: Effect, record: CallRecord) -> None:
    """Raise for every record that is no approval of the effect."""
    if record.erased:
        raise EffectErased(effect.key, effect.tool, record.status, "approval")

    if _says(record):
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


def _read(record: CallRecord) -> ApprovalRequest | None:
    if record.call.tool_name != APPROVAL:
        return None

    match record.call.args:
        case {"key": str(key), "tool": str(tool), "args": dict(args)}:
            return ApprovalRequest(
                key, record.thread_id, tool, args, record.issued_at, record
            )

    return None
