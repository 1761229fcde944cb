"""How a caller asks for an effect, and what a run makes of it.

A caller's keywords become an `EffectSpec`. `plan_effect` checks it, names the effect,
and fills in the ledger's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cpkit.driver.ids import check_id
from cpkit.effects.effect import Effect, Verify
from cpkit.effects.records import (
    GLOBAL_THREAD,
    KeyKind,
    Scope,
    copy_args,
    copy_json,
    effect_key,
)
from cpkit.errors import InvalidId
from cpkit.records import JsonValue

__all__ = [
    "LEDGER_DEFAULT",
    "EffectPlan",
    "EffectSpec",
    "LedgerDefault",
    "LedgerSettings",
    "plan_effect",
]


class LedgerDefault(Enum):
    """Stands for the ledger's own setting, where ``None`` has a meaning already."""

    LEDGER_DEFAULT = "the ledger's setting"

    def __repr__(self) -> str:
        return self.name


LEDGER_DEFAULT: Final = LedgerDefault.LEDGER_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectSpec:
    """An effect as a caller asks for it: the keywords of `EffectLedger.run`.

    The first eight fields say which effect it is. The others say how to run it; times
    are in seconds, and ``None`` means without limit.
    """

    thread_id: str
    tool: str
    args: Mapping[str, JsonValue]
    scope: Scope = "thread"
    key_fields: Sequence[str] | None = None
    resource: JsonValue = None
    idempotency_key: str | None = None
    tool_call_id: str | None = None

    verify: Verify | None = None
    timeout: float | None | LedgerDefault = LEDGER_DEFAULT
    approval_timeout: float | None | LedgerDefault = LEDGER_DEFAULT
    stale_after: float | None | LedgerDefault = LEDGER_DEFAULT
    release_failures: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """What a ledger uses for all its effects: the options of `EffectLedger`."""

    timeout: float | None
    approval_timeout: float | None
    stale_after: float | None
    heartbeat: float | None
    release_failures: bool
    max_payload: int

    def __post_init__(self) -> None:
        self.heartbeat_interval(self.stale_after)

    def heartbeat_interval(self, stale_after: float | None) -> float:
        """Return the seconds between heartbeats; two fit in ``stale_after``."""
        heartbeat = self.heartbeat

        if stale_after is not None and stale_after <= 0:
            raise ValueError(
                f"stale_after must be positive, or None for never, not {stale_after!r}"
            )

        if heartbeat is None:
            return 10.0 if stale_after is None else stale_after / 3

        if heartbeat <= 0 or (stale_after is not None and heartbeat > stale_after / 2):
            raise ValueError(
                "heartbeat must be positive and at most half of stale_after, not "
                f"{heartbeat!r} with stale_after={stale_after!r}"
            )

        return heartbeat


@dataclass(frozen=True, slots=True)
class EffectPlan:
    """A checked spec, with its key and with the ledger's settings filled in.

    ``thread_id`` is the agent's thread, for tracing; ``effect.thread_id`` is the thread
    that has the record. ``stale_after`` ``None`` means that no holder is taken over.
    """

    thread_id: str
    effect: Effect
    key_kind: KeyKind
    verify: Verify | None
    timeout: float | None
    approval_timeout: float | None
    stale_after: float | None
    heartbeat: float
    release_failures: bool


def plan_effect(spec: EffectSpec, settings: LedgerSettings) -> EffectPlan:
    """Check a spec, name its effect, and fill in the ledger's settings."""
    thread_id = check_id("thread_id", spec.thread_id)
    tool = check_id("tool_name", spec.tool)

    if tool.startswith("cpkit:"):
        raise InvalidId("tool_name", "must not start with 'cpkit:', which is reserved")

    if spec.scope not in ("thread", "global"):
        raise ValueError(f"scope must be 'thread' or 'global', not {spec.scope!r}")

    args = copy_args(spec.args, settings.max_payload)
    kind, values = _key_values(spec, args)
    stale_after = _given(spec.stale_after, settings.stale_after)
    released = spec.release_failures
    return EffectPlan(
        thread_id=thread_id,
        effect=Effect(
            effect_key(spec.scope, thread_id, tool, kind, values),
            GLOBAL_THREAD if spec.scope == "global" else thread_id,
            tool,
            args,
            tool_call_id=spec.tool_call_id,
        ),
        key_kind=kind,
        verify=spec.verify,
        timeout=_given(spec.timeout, settings.timeout),
        approval_timeout=_given(spec.approval_timeout, settings.approval_timeout),
        stale_after=stale_after,
        heartbeat=settings.heartbeat_interval(stale_after),
        release_failures=settings.release_failures if released is None else released,
    )


def _key_values(
    spec: EffectSpec, args: dict[str, JsonValue]
) -> tuple[KeyKind, JsonValue]:
    """Return the values that name the effect: all ``args``, unless the spec says so."""
    given = (spec.key_fields, spec.resource, spec.idempotency_key)

    if sum(value is not None for value in given) > 1:
        raise ValueError("give at most one of key_fields, resource, idempotency_key")

    if spec.idempotency_key is not None:
        return "given", spec.idempotency_key

    if spec.resource is not None:
        return "resource", copy_json(spec.resource, "resource")

    if spec.key_fields is None:
        return "arguments", args

    if isinstance(spec.key_fields, str):
        raise TypeError(
            f"key_fields is a list of argument names, not the str {spec.key_fields!r}"
        )

    if not spec.key_fields:
        raise ValueError("key_fields is empty; name at least one argument")

    missing = [name for name in spec.key_fields if name not in args]

    if missing:
        raise ValueError(
            f"key_fields names {', '.join(map(repr, missing))}, which the arguments of "
            f"{spec.tool!r} do not have"
        )

    return "fields", {name: args[name] for name in spec.key_fields}


def _given(value: float | None | LedgerDefault, default: float | None) -> float | None:
    return default if isinstance(value, LedgerDefault) else value
