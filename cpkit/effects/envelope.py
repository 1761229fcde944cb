"""How an effect lies in a call record, and how it is read back.

The args of a call are ``{"args": {…}}``, with ``"tool_call_id"`` beside them where the
model gave one: it is kept with the record and is no part of its identity. A completed
result is ``{"value": …}`` or ``{"error": {"type": …, "message": …}}``, so that no value
can be taken for an error, and ``None`` is a result like any other. A released
attempt's receipt is ``{"released": reason}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from traceback import format_exception_only

from cpkit.effects.effect import Effect
from cpkit.effects.errors import EffectErased, EffectFailed
from cpkit.effects.keys import plain
from cpkit.records import CallRecord, JsonValue

__all__ = [
    "effect_of",
    "error",
    "failure",
    "issued",
    "released",
    "replayed",
    "told",
    "type_name",
    "value",
]

_LONGEST_MESSAGE = 10_000
"""Characters kept of an exception's message: enough to read, never a dump."""


def issued(
    args: Mapping[str, JsonValue], tool_call_id: str | None
) -> dict[str, JsonValue]:
    """Return the args of the call record."""
    if tool_call_id is None:
        return {"args": dict(args)}

    return {"args": dict(args), "tool_call_id": tool_call_id}


def value(result: JsonValue) -> dict[str, JsonValue]:
    """Return the envelope of a result; raise ``SerializationError`` if it is no JSON.

    The copy is what every caller gets, the first one included.
    """
    return {"value": plain(result, "result")}


def error(exc: Exception) -> dict[str, JsonValue]:
    """Return the envelope of a final failure; any exception can be told."""
    return {"error": {"type": type_name(exc), "message": told(exc)}}


def told(exc: Exception) -> str:
    """Return an exception's message, cut and escaped so that any store can hold it."""
    # Not str(exc): an exception whose message cannot be made must not hide the failure.
    _, _, message = "".join(format_exception_only(exc)).strip().partition(": ")
    return message[:_LONGEST_MESSAGE].encode(errors="backslashreplace").decode()


def type_name(exc: Exception) -> str:
    """Return how an exception's type is recorded: with its module, unless built in."""
    kind = type(exc)

    if kind.__module__ == "builtins":
        return kind.__qualname__

    return f"{kind.__module__}.{kind.__qualname__}"


def failure(record: CallRecord) -> str | None:
    """Return the type of the error that is the record's outcome, if it is one."""
    match record.result:
        case {"error": {"type": str(kind), "message": str()}}:
            return kind

    return None


def released(reason: str) -> dict[str, JsonValue]:
    """Return the receipt of an attempt that had no effect, or was taken over."""
    return {"released": reason}


def effect_of(record: CallRecord) -> Effect | None:
    """Return the effect of a record, or ``None`` where a ledger did not make it."""
    call = record.call
    args = call.args.get("args")

    if not call.call_id.startswith("effect:"):
        return None

    if record.erased:
        args = {}
    elif not isinstance(args, dict):
        return None

    told = call.args.get("tool_call_id")
    return Effect(
        call.idempotency_key,
        record.thread_id,
        call.tool_name,
        args,
        call.call_id,
        record.attempt,
        told if isinstance(told, str) else None,
    )


def replayed(record: CallRecord) -> JsonValue:
    """Return what a completed record holds, or raise it.

    A result that is no envelope was recorded by hand, and is returned as it stands.
    """
    call = record.call

    if record.erased:
        raise EffectErased(call.idempotency_key, call.tool_name, record.status)

    match record.result:
        case {"value": result, **rest} if not rest:
            return result
        case {"error": {"type": str(kind), "message": str(message)}}:
            raise EffectFailed(call.idempotency_key, call.tool_name, kind, message)

    return record.result
