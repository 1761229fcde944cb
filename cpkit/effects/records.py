"""What the ledger stores: names of internal threads, arguments and results.

All of this is a stored format. A later version must find what this one wrote.

Call records
    An attempt is a call with a fresh id ``effect:…``. Its args are ``{"args": {…},
    "stale_after": seconds}``, and where they exist ``tool_call_id`` of the model,
    ``lease`` (the term under which it runs, and the lease's thread), ``decision`` (the
    approval), and ``asked`` (the arguments before a person changed them). A completed
    result is ``{"value": …}`` or ``{"error": {"type": …, "message": …}}``, so that no
    value can be mistaken for an error, and ``None`` is a result like any other. The
    result of a released attempt is ``{"released": reason}``. If a person said how an
    attempt ended, ``said`` has the name, the reason and the program.

Heartbeats
    The extra of the thread ``cpkit:beats:…`` has a count under an attempt's call id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from os import urandom
from traceback import format_exception_only
from typing import Any

from cpkit.effects.effect import Decision, Effect, Verdict, copy_json
from cpkit.effects.errors import EffectErased, EffectFailed
from cpkit.records import CallRecord, JsonValue

__all__ = [
    "APPROVAL",
    "REOPEN",
    "Outcome",
    "asked_args",
    "call_args",
    "effect_of",
    "error_envelope",
    "error_type_of",
    "exception_message",
    "exception_type",
    "fresh_call_id",
    "heartbeat_thread",
    "next_call_id",
    "outcome_of",
    "released_envelope",
    "result_of",
    "signed",
    "value_envelope",
]

APPROVAL = "cpkit:approval"
"""The tool name of approval requests; names that start with ``cpkit:`` are reserved."""

REOPEN = "cpkit:reopen"
"""The tool name of the record that a final failure was reopened."""

_LONGEST_MESSAGE = 10_000
"""Characters kept of an exception's message: enough to read, but not a dump."""


# Names


def heartbeat_thread(key: str) -> str:
    """Return the thread in whose extra the holders of a key write heartbeats."""
    return f"cpkit:beats:{key}"


def fresh_call_id(kind: str = "effect") -> str:
    """Return the id of a new attempt, never used before."""
    return f"{kind}:{urandom(16).hex()}"


def next_call_id(call_id: str) -> str:
    """Return the id of the attempt that records the outcome of a released one."""
    return f"effect:{sha256(call_id.encode()).hexdigest()[:32]}"


# Arguments


def call_args(
    effect: Effect,
    asked: Mapping[str, JsonValue],
    lease: tuple[str, str] | None,
    stale_after: float,
) -> dict[str, JsonValue]:
    """Return the args of the call record; ``asked`` are those that were asked for."""
    found: dict[str, JsonValue] = {
        "args": dict(effect.args),
        "stale_after": stale_after,
    }

    if asked != effect.args:
        found["asked"] = dict(asked)

    if effect.tool_call_id is not None:
        found["tool_call_id"] = effect.tool_call_id

    if lease is not None:
        found["lease"] = [*lease]

    if (made := effect.decision) is not None:
        found["decision"] = {
            "by": made.by,
            "at": None if made.at is None else made.at.isoformat(),
            "reason": made.reason,
            "origin": made.origin,
            "value": made.value,
        }

    return found


def asked_args(record: CallRecord) -> JsonValue:
    """Return the arguments that were asked for, before a person changed them."""
    return record.call.args.get("asked", record.call.args.get("args"))


def effect_of(record: CallRecord) -> Effect | None:
    """Return the effect of a record, or ``None`` if a ledger did not write it."""
    call = record.call
    args = call.args.get("args")

    if not call.call_id.startswith("effect:"):
        return None

    if record.erased:
        args = {}
    elif not isinstance(args, dict):
        return None

    tool_call_id = call.args.get("tool_call_id")
    decision = None

    if isinstance(made := call.args.get("decision"), dict):
        at = made.get("at")
        when = datetime.fromisoformat(at) if isinstance(at, str) else None
        decision = signed("approved", made, when)

    return Effect(
        call.idempotency_key,
        record.thread_id,
        call.tool_name,
        args,
        call.call_id,
        record.attempt,
        tool_call_id if isinstance(tool_call_id, str) else None,
        decision,
    )


def signed(
    verdict: Verdict, stored: Mapping[str, Any], at: datetime | None
) -> Decision:
    """Return a decision with what is stored of it: by whom, why, from where."""
    texts: dict[str, Any] = {
        name: value
        for name in ("by", "reason", "origin")
        if isinstance(value := stored.get(name), str)
    }
    return Decision(verdict, at=at, value=stored.get("value"), **texts)


# Results


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to record of an attempt, and the exception if its handler raised one."""

    result: dict[str, JsonValue]
    success: bool = True
    raised: Exception | None = None

    def is_recorded_in(self, record: CallRecord) -> bool:
        """Return whether the record has this outcome, and not another."""
        status = "completed" if self.success else "failed"
        return record.status == status and record.result == self.result


def value_envelope(result: JsonValue) -> dict[str, JsonValue]:
    """Return the envelope of a result; raise ``SerializationError`` if JSON has none.

    Every caller gets the copy in it, the first caller too.
    """
    return {"value": copy_json(result, "result")}


def outcome_of(result: JsonValue) -> Outcome:
    """Return the outcome of a handler that returned: an error if JSON has no result."""
    try:
        return Outcome(value_envelope(result))
    except Exception as exc:
        # The effect happened, so this is never released.
        return Outcome(error_envelope(exc), raised=exc)


def error_envelope(exc: Exception) -> dict[str, JsonValue]:
    """Return the envelope of a final failure, for any exception."""
    return {"error": {"type": exception_type(exc), "message": exception_message(exc)}}


def released_envelope(reason: str) -> dict[str, JsonValue]:
    """Return the receipt of an attempt that had no effect, or was taken over."""
    return {"released": reason}


def exception_message(exc: Exception) -> str:
    """Return an exception's message, cut and escaped so that any store can hold it."""
    # Not str(exc): a __str__ that raises must not hide the failure.
    _, _, message = "".join(format_exception_only(exc)).strip().partition(": ")
    return message[:_LONGEST_MESSAGE].encode(errors="backslashreplace").decode()


def exception_type(exc: Exception) -> str:
    """Return the recorded name of an exception's type: with module, unless built in."""
    kind = type(exc)

    if kind.__module__ == "builtins":
        return kind.__qualname__

    return f"{kind.__module__}.{kind.__qualname__}"


def error_type_of(record: CallRecord) -> str | None:
    """Return the type of the recorded error; ``None`` if the record has no error."""
    match record.result:
        case {"error": {"type": str(kind), "message": str()}}:
            return kind

    return None


def result_of(record: CallRecord) -> JsonValue:
    """Return the result of a completed record, or raise its error.

    A result without an envelope was recorded by hand, and is returned unchanged.
    """
    call = record.call

    if record.erased:
        raise EffectErased(call.idempotency_key, call.tool_name, record.status)

    match record.result:
        case {"value": result, **rest} if not rest or rest.keys() == {"said"}:
            return result
        case {"error": {"type": str(kind), "message": str(message)}}:
            raise EffectFailed(call.idempotency_key, call.tool_name, kind, message)

    return record.result
