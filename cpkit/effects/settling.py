"""Settling the attempt of somebody who is gone: asking what landed, recording it."""

from __future__ import annotations

from typing import Any

from cpkit.effects import envelope
from cpkit.effects.calls import Calls
from cpkit.effects.effect import Landed, NotLanded, Verdict, Verify, called
from cpkit.effects.heartbeat import forget_beats
from cpkit.effects.tracing import log
from cpkit.errors import UnknownCall
from cpkit.records import CallRecord, JsonValue

__all__ = ["ask_verify", "settle"]


async def ask_verify(verify: Verify, holder: CallRecord) -> Verdict:
    """Ask whether an attempt's effect landed; ``None`` for what is no clear answer."""
    effect = envelope.effect_of(holder)

    if effect is None:
        return None

    try:
        verdict: Any = await called(verify, effect)

        if isinstance(verdict, Landed):
            envelope.value(verdict.result)  # raises where it could not be recorded
    except Exception:
        log.warning("verify of %s failed", effect.tool, exc_info=True)
        return None

    return verdict if isinstance(verdict, (Landed, NotLanded)) else None


async def settle(
    calls: Calls, holder: CallRecord, result: dict[str, JsonValue], *, success: bool
) -> tuple[CallRecord, bool]:
    """Settle an attempt; return its record as it stands, and whether it is as asked.

    A record that was forgotten with its thread is returned as it was.
    """
    call = holder.call

    try:
        stands = await calls.resolve(
            holder.thread_id, call.call_id, result, success=success
        )
    except UnknownCall:
        return holder, False

    await forget_beats(calls.cp, call.idempotency_key)
    return stands, stands.result == result
