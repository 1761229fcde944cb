"""Runs each side effect once, across crashes, retries and takeovers.

::

    ledger = EffectLedger(cp)
    result = await ledger.run("thread-1", "charge", {"amount": 10}, charge)

Modules, each importing only those above it: ``errors``, ``effect``, ``records``,
``tracing``, ``waits``, ``attempts``, ``requests``, ``approvals``, ``run``, ``people``,
``tools``, ``ledger``, ``once``.
"""

from cpkit.effects.approvals import Notifier
from cpkit.effects.attempts import Resumed
from cpkit.effects.effect import (
    Approval,
    Decision,
    Effect,
    EffectOptions,
    Landed,
    NoEffect,
    NotLanded,
    Options,
)
from cpkit.effects.errors import (
    ApprovalExpired,
    ApprovalWithdrawn,
    EffectDenied,
    EffectErased,
    EffectFailed,
    EffectTimeout,
    KeyReused,
    Superseded,
)
from cpkit.effects.ledger import Begun, EffectLedger, RecoverReport
from cpkit.effects.once import once
from cpkit.effects.people import DecisionOptions, Signature
from cpkit.effects.records import effect_of
from cpkit.effects.requests import ApprovalRequest
from cpkit.effects.run import current_key
from cpkit.effects.tools import Tool, ToolOutcome, ToolRegistry, tool

__all__ = [
    "Approval",
    "ApprovalExpired",
    "ApprovalRequest",
    "ApprovalWithdrawn",
    "Begun",
    "Decision",
    "DecisionOptions",
    "Effect",
    "EffectDenied",
    "EffectErased",
    "EffectFailed",
    "EffectLedger",
    "EffectOptions",
    "EffectTimeout",
    "KeyReused",
    "Landed",
    "NoEffect",
    "NotLanded",
    "Notifier",
    "Options",
    "RecoverReport",
    "Resumed",
    "Signature",
    "Superseded",
    "Tool",
    "ToolOutcome",
    "ToolRegistry",
    "current_key",
    "effect_of",
    "once",
    "tool",
]
