"""Asking the other side whether an attempt's effect landed."""

from __future__ import annotations

from typing import Any

from cpkit.effects import envelope
from cpkit.effects.effect import Landed, NotLanded, Verdict, Verify, called
from cpkit.effects.tracing import log
from cpkit.records import CallRecord

__all__ = ["ask_verify"]


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
