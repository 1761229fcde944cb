"""What an effect is: how a caller asks for it, and what names it in the store.

A key is the SHA-256 of a canonical JSON array. The array has no separator that a value
could contain, so two effects share a key only if thread, tool, kind and chosen values
are all equal. Keys are a stored format: a later version must find what this one wrote.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from typing import Any, Literal, TypedDict

from cpkit.canonical import canonical_json
from cpkit.driver.ids import check_id
from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.errors import InvalidId
from cpkit.records import JsonValue
from cpkit.runs.waiting import check_interval, check_limit

__all__ = [
    "Approval",
    "Decision",
    "Effect",
    "EffectOptions",
    "EffectPlan",
    "Handler",
    "KeyKind",
    "Landed",
    "NoEffect",
    "NotLanded",
    "Options",
    "Policy",
    "Verdict",
    "Verify",
    "call_callback",
    "check_callback",
    "copy_json",
    "effect_key",
    "handling",
    "plan_effect",
    "reopen_key",
    "reopened_key",
    "request_key",
]

Verdict = Literal["approved", "denied", "expired", "withdrawn", "erased"]
KeyKind = Literal["arguments", "fields", "call", "given"]

handling: ContextVar[tuple[str, ...]] = ContextVar("cpkit effects", default=())
"""The keys of the effects whose handlers the current task runs in, outermost first."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How a request ended: the verdict, and by whom, when, why and from where.

    A request ``expired`` if it was not decided in time, and was ``withdrawn`` if it was
    ended without a decision. If it was ``erased``, nothing says how it was decided.
    ``at`` is by the store's clock. ``origin`` is the program that decided, for instance
    ``"cpkit approve, host:4711"``. ``value`` is what the person gave with an approval.
    """

    verdict: Verdict
    by: str | None = None
    at: datetime | None = None
    reason: str | None = None
    origin: str | None = None
    value: Any = None

    def __str__(self) -> str:
        by = "" if self.by is None else f" by {self.by}"
        reason = "" if self.reason is None else f": {self.reason}"
        return f"{self.verdict}{by}{reason}"


@dataclass(frozen=True, slots=True)
class Effect:
    """One side effect: what a handler, policy or ``verify`` is called with.

    ``key`` names the effect in the whole store; pass it downstream as the idempotency
    key. ``attempt`` counts 1, 2, … and is a fencing token: a later claim of the key has
    a higher one. A policy is called before the claim: ``call_id`` is empty then, and
    ``attempt`` is 0. ``tool_call_id`` is the model's id of its request. ``decision`` is
    the approval under which the effect runs; ``None`` if it needs none.
    """

    key: str
    thread_id: str
    tool: str
    args: Mapping[str, Any]
    call_id: str = ""
    attempt: int = 0
    tool_call_id: str | None = None
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Approval:
    """A policy's answer that a person must approve, and may change some arguments.

    The effect keeps the key of the arguments that were asked for.
    """

    editable: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Landed:
    """The answer of ``verify``: the effect happened, and this is its result."""

    result: JsonValue = None


@dataclass(frozen=True, slots=True)
class NotLanded:
    """The answer of ``verify``: the effect did not happen, and will not any more."""


class NoEffect(Exception):
    """Raised by a handler: nothing happened, and the effect may be tried again."""


Handler = Callable[[Effect], Awaitable[Any] | Any]
Policy = Callable[[Effect], Awaitable[bool | Approval] | bool | Approval]
Verify = Callable[
    [Effect], Awaitable[Landed | NotLanded | None] | Landed | NotLanded | None
]


async def call_callback(callback: Callable[..., Any], *args: object) -> Any:
    """Call a sync or async callback; it gets a copy of an `Effect`, to change."""
    own = (
        replace(one, args=copy_json(dict(one.args), "args"))
        if isinstance(one, Effect)
        else one
        for one in args
    )
    answer = callback(*own)
    return await answer if inspect.isawaitable(answer) else answer


def check_callback(name: str, callback: object, *parameters: str) -> None:
    """Raise ``TypeError`` unless the callback can be called with these arguments."""
    if not callable(callback):
        raise TypeError(f"{name} must be a function, not {callback!r:.80}")

    check_no_generator(name, callback)

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


def check_no_generator(name: str, function: object) -> None:
    """Raise ``TypeError`` for a generator function: calling it runs nothing."""
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(
            f"{name} must return its result, and {function!r:.80} is a generator: its "
            "body would not run; return a list instead of yielding"
        )


class EffectOptions(TypedDict, total=False):
    """The keywords of `EffectLedger.run`; those that are left out are the ledger's."""

    key: Literal["arguments", "call"]
    key_fields: Sequence[str] | None
    idempotency_key: str | None
    tool_call_id: str | None
    run_thread: str | None
    verify: Verify | None
    timeout: float | None
    approval_timeout: float | Literal["auto"] | None
    expires_after: float | None
    stale_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All that can be said about an effect. Times are in seconds, ``None``: no limit.

    The thread, the tool and all arguments name the effect; with ``key_fields`` those
    arguments; with ``key="call"`` also the model's ``tool_call_id``; or the given
    ``idempotency_key``. A worker runs ``run_thread`` after a decision: by default the
    thread of the outermost lease of the task, else the effect's own.

    ``timeout`` bounds the wait for another attempt's result, ``approval_timeout`` that
    for a decision; ``"auto"`` is 0 under a worker, outside of handlers, and no limit
    elsewhere. A request expires after ``expires_after``, by the store's clock. A holder
    without a heartbeat for ``stale_after`` is taken over: ``verify`` says whether its
    effect landed; without ``verify`` the handler runs again.
    """

    key: Literal["arguments", "call"] = "arguments"
    key_fields: Sequence[str] | None = None
    idempotency_key: str | None = None
    tool_call_id: str | None = None
    run_thread: str | None = None
    verify: Verify | None = None
    timeout: float | None = 30.0
    approval_timeout: float | Literal["auto"] | None = "auto"
    expires_after: float | None = 7 * 86_400.0
    stale_after: float | None = None

    def __post_init__(self) -> None:
        if self.key not in ("arguments", "call"):
            raise ValueError(f"key must be 'arguments' or 'call', not {self.key!r}")

        fields = self.key_fields
        given = (fields, self.idempotency_key, self.key == "call" or None)

        if sum(value is not None for value in given) > 1:
            raise ValueError(
                "give at most one of key_fields, idempotency_key, key='call'"
            )

        if isinstance(fields, str):
            raise TypeError(f"key_fields is a list of argument names, not {fields!r}")

        if fields is not None and not fields:
            raise ValueError("key_fields is empty; name at least one argument")

        if self.run_thread is not None:
            check_id("run_thread", self.run_thread)

        if self.verify is not None:
            check_callback("verify", self.verify, "effect")

        check_limit("timeout", self.timeout)

        if self.approval_timeout != "auto":
            check_limit("approval_timeout", self.approval_timeout)

        if self.stale_after is not None:
            check_interval("stale_after", self.stale_after)

        seconds = self.expires_after

        # With many more years, it would expire after the last date of Python.
        if seconds is not None and not 0 < seconds <= 36_500 * 86_400:
            raise ValueError(
                "expires_after must be positive and at most 100 years, or None for "
                f"never, not {seconds!r:.80}"
            )

    def merged(self, given: EffectOptions) -> Options:
        """Return these options with the given ones in place of theirs."""
        return replace(self, **given) if given else self


@dataclass(frozen=True, slots=True)
class EffectPlan:
    """A checked request for an effect; leases know it by ``key``, reopened or not."""

    key: str
    effect: Effect
    kind: KeyKind
    options: Options
    is_recovered: bool = False


def plan_effect(
    thread_id: str, tool: str, args: Mapping[str, JsonValue], options: Options
) -> EffectPlan:
    """Check a request for an effect, and name the effect."""
    check_id("thread_id", thread_id)
    check_id("tool_name", tool)

    if tool.startswith("cpkit:"):
        raise InvalidId("tool_name", "must not start with 'cpkit:', which is reserved")

    copied = copy_json(dict(args), "args")
    kind: KeyKind = "arguments"
    values: JsonValue = copied

    if options.idempotency_key is not None:
        kind, values = "given", options.idempotency_key
    elif options.key == "call":
        if not options.tool_call_id:
            raise ValueError(
                f"{tool!r} is named by the model's call (key='call'): pass tool_call_id"
            )

        kind, values = "call", {"call": options.tool_call_id, "args": copied}
    elif options.key_fields is not None:
        if missing := [name for name in options.key_fields if name not in copied]:
            names = ", ".join(map(repr, missing))
            raise ValueError(
                f"key_fields names {names}, which the arguments of {tool!r} do not have"
            )

        kind, values = "fields", {name: copied[name] for name in options.key_fields}

    key = effect_key(thread_id, tool, kind, values)
    effect = Effect(key, thread_id, tool, copied, tool_call_id=options.tool_call_id)
    return EffectPlan(key, effect, kind, options)


def effect_key(thread_id: str, tool: str, kind: KeyKind, values: JsonValue) -> str:
    """Return the idempotency key of an effect."""
    return _digest([["thread", thread_id], tool, kind, values])


def request_key(key: str, number: int) -> str:
    """Return the key of an effect's approval request with this number."""
    return _digest(["approval", key, number])


def reopen_key(key: str) -> str:
    """Return the key of the record that an effect's final failure was reopened."""
    return _digest(["reopen", key])


def reopened_key(key: str) -> str:
    """Return the key under which an effect runs after it was reopened."""
    return _digest(["reopened", key])


def _digest(parts: list[JsonValue]) -> str:
    return sha256(canonical_json(parts).encode(errors="surrogatepass")).hexdigest()


def copy_json(value: JsonValue, name: str) -> Any:
    """Return a JSON copy of a value; raise ``SerializationError`` if JSON has none."""
    return parse_json(encode_json(value, (name,)))
