"""Runs each side effect once, across crashes, retries and takeovers.

::

    ledger = EffectLedger(cp)
    result = await ledger.run("thread-1", "charge", {"amount": 10}, charge)

The package calls only the six methods of `Checkpointer`, so it works on every certified
backend.

Modules, each importing only those above it: ``errors``, ``effect``, ``records``,
``spec``, ``tracing``, ``attempts``, ``approvals``, ``claim``, ``run``, ``tools``,
``recovery``, ``ledger``, ``registry``.
"""

from cpkit.driver.backoff import Backoff
from cpkit.effects.approvals import ApprovalRequest
from cpkit.effects.effect import Effect, Landed, NoEffect, NotLanded
from cpkit.effects.errors import (
    EffectDenied,
    EffectErased,
    EffectFailed,
    EffectTimeout,
    KeyReused,
    Superseded,
)
from cpkit.effects.ledger import Begun, EffectLedger
from cpkit.effects.records import effect_of
from cpkit.effects.recovery import Resumed, ResumeReport
from cpkit.effects.registry import ToolOutcome, ToolRegistry
from cpkit.effects.tools import Tool, tool

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
