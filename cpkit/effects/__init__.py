"""A side effect happens once, across crashes, retries and takeovers.

::

    ledger = EffectLedger(cp)
    result = await ledger.run("thread-1", "charge", {"amount": 10}, charge)

It stands on the six methods alone, so it works on every certified backend.
"""

from cpkit.driver.backoff import Backoff
from cpkit.effects.approvals import ApprovalRequest
from cpkit.effects.effect import Effect, Landed, NoEffect, NotLanded
from cpkit.effects.envelope import effect_of
from cpkit.effects.errors import (
    EffectDenied,
    EffectErased,
    EffectFailed,
    EffectTimeout,
    KeyReused,
    Superseded,
)
from cpkit.effects.ledger import Begun, EffectLedger
from cpkit.effects.resume import Resumed, ResumeReport
from cpkit.effects.tools import Tool, ToolOutcome, ToolRegistry, tool

__all__ = [
    "ApprovalRequest",
    "Backoff",
    "Begun",
    "Effect",
    "EffectDenied",
    "EffectErased",
    "EffectFailed",
    "EffectLedger",
    "EffectTimeout",
    "KeyReused",
    "Landed",
    "NoEffect",
    "NotLanded",
    "ResumeReport",
    "Resumed",
    "Superseded",
    "Tool",
    "ToolOutcome",
    "ToolRegistry",
    "effect_of",
    "tool",
]
