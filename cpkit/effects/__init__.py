"""Runs each side effect once, across crashes, retries and takeovers.

::

    ledger = EffectLedger(cp)
    result = await ledger.run("thread-1", "charge", {"amount": 10}, charge)

The package calls only the six methods of `Checkpointer`, so it works on every certified
backend.

Modules, each importing only those above it: ``errors``, ``effect``, ``records``,
``tracing``, ``attempts``, ``requests``, ``waiting_tools``, ``approvals``, ``claim``,
``run``, ``tools``, ``recovery``, ``ledger``.
"""

from cpkit.driver.backoff import Backoff
from cpkit.effects.approvals import Notifier
from cpkit.effects.effect import (
    ClaimOptions,
    Effect,
    EffectName,
    EffectOptions,
    Landed,
    NoEffect,
    NotLanded,
)
from cpkit.effects.errors import (
    ApprovalExpired,
    EffectDenied,
    EffectErased,
    EffectFailed,
    EffectTimeout,
    KeyReused,
    Superseded,
)
from cpkit.effects.ledger import Begun, EffectLedger
from cpkit.effects.records import effect_of
from cpkit.effects.recovery import RecoverReport, Resumed, ResumeReport
from cpkit.effects.requests import ApprovalRequest, Decision, DecisionOptions
from cpkit.effects.tools import Tool, ToolOutcome, ToolRegistry, tool

__all__ = [
    "ApprovalExpired",
    "ApprovalRequest",
    "Backoff",
    "Begun",
    "ClaimOptions",
    "Decision",
    "DecisionOptions",
    "Effect",
    "EffectDenied",
    "EffectErased",
    "EffectFailed",
    "EffectLedger",
    "EffectName",
    "EffectOptions",
    "EffectTimeout",
    "KeyReused",
    "Landed",
    "NoEffect",
    "NotLanded",
    "Notifier",
    "RecoverReport",
    "ResumeReport",
    "Resumed",
    "Superseded",
    "Tool",
    "ToolOutcome",
    "ToolRegistry",
    "effect_of",
    "tool",
]
