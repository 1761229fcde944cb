"""What an effect is: how a caller asks for it, and what names it in the store.

A caller's keywords become an `EffectSpec`. `plan_effect` checks it, names the effect,
and fills in the ledger's settings.

A key is the SHA-256 of a canonical JSON array. The array has no separator that a value
could contain, so two effects share a key only if scope, tool, kind and chosen values
are all equal. Keys are a stored format: a later version must find what this one wrote.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import sha256
from json import JSONEncoder
from types import CodeType
from typing import Any, Final, Literal, TypedDict

from cpkit.canonical import canonical_json
from cpkit.driver.ids import check_id
from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.errors import InvalidId, PayloadTooLarge, SerializationError
from cpkit.records import CallRecord, JsonValue
from cpkit.waiting import check_interval, check_limit

__all__ = [
    "GLOBAL_THREAD",
    "LEDGER_DEFAULT",
    "ClaimOptions",
    "Effect",
    "EffectName",
    "EffectOptions",
    "EffectPlan",
    "EffectSpec",
    "Handler",
    "KeyKind",
    "Landed",
    "LedgerDefault",
    "LedgerSettings",
    "NoEffect",
    "NotLanded",
    "Policy",
    "Scope",
    "SupersededHook",
    "Verdict",
    "Verify",
    "call_callback",
    "check_callback",
    "copy_args",
    "copy_json",
    "effect_key",
    "entry_key",
    "is_awaitable",
    "plan_effect",
    "request_key",
]

GLOBAL_THREAD = "cpkit:global"
"""The thread of all effects and approval requests with scope ``"global"``."""

Scope = Literal["thread", "global"]

KeyKind = Literal["arguments", "fields", "resource", "given"]
"""What the chosen values of a key are."""

_LONGEST_EXPIRY = 100 * 365 * 86_400
"""Seconds: with many more, a request would expire after the last date of Python."""

_ENCODE = JSONEncoder(
    ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True
).encode

_MAYBE_FLOAT = re.compile(r"[0-9][.e]")


@dataclass(frozen=True, slots=True)
class Effect:
    """One side effect: what a handler, policy, notifier or ``verify`` is called with.

    ``key`` names the effect in the whole store. Pass it downstream as the idempotency
    key where the other side takes one. ``attempt`` counts 1, 2, … and is a fencing
    token: a later claim of the key always has a higher one. ``thread_id`` is the
    thread that has the record, which is ``cpkit:global`` for a global scope.

    A policy and a notifier are called before the claim: ``call_id`` is empty then, and
    ``attempt`` is 0. ``tool_call_id`` is the model's id of its request. It is kept for
    correlation only.
    """

    key: str
    thread_id: str
    tool: str
    args: Mapping[str, JsonValue]
    call_id: str = ""
    attempt: int = 0
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """The answer of ``verify``: the effect happened, and this is its result."""

    result: JsonValue = None


@dataclass(frozen=True, slots=True)
class NotLanded:
    """The answer of ``verify``: the effect did not happen, and will not any more."""


class NoEffect(Exception):
    """Raised by a handler: nothing happened, and the effect may be tried again."""


Verdict = Landed | NotLanded | None
"""What ``verify`` answers; ``None`` if it cannot know."""

Handler = Callable[[Effect], Awaitable[JsonValue] | JsonValue]
Policy = Callable[[Effect], Awaitable[bool] | bool]
Verify = Callable[[Effect], Awaitable[Verdict] | Verdict]
SupersededHook = Callable[[Effect, CallRecord], Awaitable[object] | object]


async def call_callback(callback: Callable[..., Any], *args: object) -> Any:
    """Call a callback that may be sync or async, and return its answer.

    A sync callback runs in the event loop's thread and must not block. It gets a copy
    of an `Effect`, so that changes to the arguments stay its own.
    """
    answer = callback(*map(_own, args))
    return await answer if is_awaitable(answer) else answer


def is_awaitable(answer: object) -> bool:
    """Return whether to await an answer; false if it does not show its class.

    An unbound proxy raises when its class is read, but the callback has returned.
    """
    try:
        return inspect.isawaitable(answer)
    except Exception:
        return False


def _own(value: object) -> object:
    if not isinstance(value, Effect):
        return value

    args: Any = copy_json(dict(value.args), "args")
    return replace(value, args=args)


def check_callback(name: str, callback: object, *parameters: str) -> None:
    """Raise ``TypeError`` unless the callback can be called with these arguments.

    A mistake in a callback is found when it is given, and not after a claim.
    """
    if not callable(callback):
        raise TypeError(f"{name} must be a function, not {callback!r:.80}")

    code = getattr(callback, "__code__", None)

    if isinstance(code, CodeType):
        # Most handlers are plain functions or methods, and reading a signature is slow.
        taken = code.co_argcount - hasattr(callback, "__self__")

        if taken == len(parameters) and not code.co_kwonlyargcount:
            return

    try:
        signature = inspect.signature(callback)
    except (TypeError, ValueError):  # a function in C that does not show its signature
        return

    try:
        signature.bind(*parameters)
    except TypeError as exc:
        found = f"{getattr(callback, '__qualname__', callback)!s:.80}{signature}"
        raise TypeError(
            f"{name} must take ({', '.join(parameters)}), and {found} does not: {exc}"
        ) from None


# How a caller asks for an effect


class LedgerDefault(Enum):
    """Stands for the ledger's own setting, where ``None`` has a meaning already."""

    LEDGER_DEFAULT = "the ledger's setting"

    def __repr__(self) -> str:
        return self.name


LEDGER_DEFAULT: Final = LedgerDefault.LEDGER_DEFAULT


class EffectName(TypedDict, total=False):
    """The keywords that name an effect; without them, all its arguments do.

    ``key_fields`` lists the arguments that name it. ``resource`` is a value, and
    ``idempotency_key`` a text, that names it in place of the arguments. With ``scope``
    ``"global"`` it is the same effect in every thread.
    """

    scope: Scope
    key_fields: Sequence[str] | None
    resource: JsonValue
    idempotency_key: str | None


class ClaimOptions(EffectName, total=False):
    """The keywords of `EffectLedger.begin`; see `EffectOptions`."""

    tool_call_id: str | None
    approval_timeout: float | None | LedgerDefault
    expires_after: float | None | LedgerDefault


class EffectOptions(ClaimOptions, total=False):
    """The keywords of `EffectLedger.run`.

    Times are in seconds, and ``None`` means without limit. ``tool_call_id`` is the
    model's id of its request, which is kept with the record. The others replace the
    ledger's options of the same name for this effect.
    """

    verify: Verify | None
    timeout: float | None | LedgerDefault
    stale_after: float | None | LedgerDefault
    release_failures: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectSpec:
    """An effect as a caller asks for it: the keywords of `EffectLedger.run`."""

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
    expires_after: float | None | LedgerDefault = LEDGER_DEFAULT
    stale_after: float | None | LedgerDefault = LEDGER_DEFAULT
    release_failures: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """What a ledger uses for all its effects: the options of `EffectLedger`."""

    timeout: float | None
    approval_timeout: float | None
    expires_after: float | None
    stale_after: float | None
    heartbeat: float | None
    release_failures: bool
    max_payload: int

    def __post_init__(self) -> None:
        check_limit("timeout", self.timeout)
        check_limit("approval_timeout", self.approval_timeout)
        _check_expiry(self.expires_after)
        self.heartbeat_interval(self.stale_after)

    def heartbeat_interval(self, stale_after: float | None) -> float:
        """Return the seconds between heartbeats; two fit in ``stale_after``."""
        heartbeat = self.heartbeat

        if stale_after is not None:
            check_interval("stale_after", stale_after)

        if heartbeat is None:
            return 10.0 if stale_after is None else stale_after / 3

        check_interval("heartbeat", heartbeat)

        if stale_after is not None and heartbeat > stale_after / 2:
            raise ValueError(
                f"heartbeat must be at most half of stale_after={stale_after!r}, not "
                f"{heartbeat!r}"
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
    expires_after: float | None
    stale_after: float | None
    heartbeat: float
    release_failures: bool
    is_recovered: bool = False


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
    expires_after = _given(spec.expires_after, settings.expires_after)
    _check_expiry(expires_after)
    timeout = _given(spec.timeout, settings.timeout)
    check_limit("timeout", timeout)
    approval_timeout = _given(spec.approval_timeout, settings.approval_timeout)
    check_limit("approval_timeout", approval_timeout)
    released = spec.release_failures

    if spec.verify is not None:
        check_callback("verify", spec.verify, "effect")

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
        timeout=timeout,
        approval_timeout=approval_timeout,
        expires_after=expires_after,
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


def _check_expiry(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds <= _LONGEST_EXPIRY:
        raise ValueError(
            "expires_after must be positive and at most 100 years, or None for never, "
            f"not {seconds!r:.80}"
        )


def _given(value: float | None | LedgerDefault, default: float | None) -> float | None:
    return default if isinstance(value, LedgerDefault) else value


# Keys


def effect_key(
    scope: Scope, thread_id: str, tool: str, kind: KeyKind, values: JsonValue
) -> str:
    """Return the idempotency key of an effect."""
    where: list[JsonValue] = ["global"] if scope == "global" else ["thread", thread_id]
    return _digest([where, tool, kind, values])


def request_key(key: str, number: int) -> str:
    """Return the key of an effect's approval request with this number."""
    return _digest(["approval", key, number])


def entry_key(key: str, number: int, thread_id: str, turn: int) -> str:
    """Return the key of an entry for a request in the list of open requests."""
    again: list[JsonValue] = [] if turn == 1 else [turn]
    return _digest(["approval entry", key, number, thread_id, *again])


def _digest(parts: list[JsonValue]) -> str:
    # The C encoder is six times as fast as `canonical_json`. The two write the same
    # text, except for floats and for names whose UTF-16 order is not that of code
    # points.
    text = _ENCODE(parts)
    # Python writes floats with a point, or with an exponent and its sign.
    floats = "." in text or "e+" in text or "e-" in text

    if not text.isascii() or (floats and _MAYBE_FLOAT.search(text)):
        text = canonical_json(parts)

    return sha256(text.encode()).hexdigest()


# Arguments


def copy_args(args: Mapping[str, JsonValue], limit: int) -> dict[str, JsonValue]:
    """Return a JSON copy of the arguments; ``limit`` is in bytes of JSON.

    Raises ``SerializationError`` or ``PayloadTooLarge``.
    """
    if not isinstance(args, Mapping):
        raise SerializationError(
            ("args",), f"args is a JSON object, not {type(args).__name__}"
        )

    body = encode_json(dict(args), ("args",))

    if len(body) > limit:
        raise PayloadTooLarge(("args",), len(body), limit)

    copied: dict[str, JsonValue] = parse_json(body)
    return copied


def copy_json(value: JsonValue, name: str) -> JsonValue:
    """Return a JSON copy of a value; raise ``SerializationError`` if JSON has none."""
    copied: JsonValue = parse_json(encode_json(value, (name,)))
    return copied
