"""What the ledger stores: names of internal threads, arguments and results.

All of this is a stored format. A later version must find what this one wrote.

An attempt is a call with a fresh id ``effect:…``. Its args are ``{"args": {…},
"stale_after": seconds}``, and where they exist ``tool_call_id`` of the model, ``lease``
(the term under which it runs, and the lease's thread), ``decision`` (the approval), and
``asked`` (the arguments before a person changed them). A completed result is
``{"value": …}`` or ``{"error": {"type": …, "message": …}}``. An attempt is *released*
if its record's status is ``failed``: it had no effect, and its result is ``{"released":
reason}``. If a person said how an attempt ended, ``said`` has the name, the reason and
the program. The extra of ``cpkit:beats:`` and an attempt's id has a count under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from hashlib import sha256
from os import urandom
from traceback import format_exception_only
from typing import Any, Self, cast

from cpkit.effects.effect import Decision, Effect, Verdict, copy_json
from cpkit.effects.errors import EffectFailed
from cpkit.lease import Lease
from cpkit.records import CallRecord, JsonValue

__all__ = [
    "APPROVAL",
    "REOPEN",
    "Outcome",
    "asked_args",
    "call_args",
    "effect_of",
    "exception_message",
    "exception_type",
    "failure_of",
    "fresh_call_id",
    "heartbeat_thread",
    "is_released",
    "next_call_id",
    "result_of",
    "signed",
    "state_of",
]

APPROVAL = "cpkit:approval"
"""The tool name of approval requests; names that start with ``cpkit:`` are reserved."""

REOPEN = "cpkit:reopen"
"""The tool name of the record that a final failure was reopened."""


def heartbeat_thread(call_id: str) -> str:
    """Return the thread in whose extra an attempt writes heartbeats."""
    return f"cpkit:beats:{call_id}"


def fresh_call_id(kind: str = "effect") -> str:
    """Return the id of a new attempt, never used before."""
    return f"{kind}:{urandom(16).hex()}"


def next_call_id(call_id: str) -> str:
    """Return the id of the attempt that records the outcome of a released one."""
    return f"effect:{sha256(call_id.encode()).hexdigest()[:32]}"


def call_args(
    effect: Effect,
    asked: Mapping[str, JsonValue],
    leases: Sequence[Lease],
    stale_after: float,
) -> dict[str, JsonValue]:
    """Return the args of the call record; ``asked`` are those that were asked for."""
    made: Any = effect.decision and asdict(effect.decision)

    if made and made["at"]:
        made["at"] = made["at"].isoformat()

    optional: dict[str, JsonValue] = {
        "asked": None if asked == effect.args else dict(asked),
        "tool_call_id": effect.tool_call_id,
        "lease": [leases[-1].term_id, leases[-1].thread_id] if leases else None,
        "decision": made,
    }
    return {
        "args": dict(effect.args),
        "stale_after": stale_after,
        **{name: value for name, value in optional.items() if value is not None},
    }


def asked_args(record: CallRecord) -> Any:
    """Return the arguments that were asked for, before a person changed them."""
    return record.call.args.get("asked", record.call.args.get("args"))


def effect_of(record: CallRecord) -> Effect | None:
    """Return the effect of a record, or ``None`` if a ledger did not write it."""
    call, stored = record.call, cast("dict[str, Any]", record.call.args)
    args = {} if record.erased else stored.get("args")

    if not call.call_id.startswith("effect:") or not isinstance(args, dict):
        return None

    made = stored.get("decision")
    at = made and made["at"] and datetime.fromisoformat(made["at"])
    decision = made and signed("approved", made, at)
    place = call.idempotency_key, record.thread_id, call.tool_name
    attempt = call.call_id, record.attempt, stored.get("tool_call_id")
    return Effect(*place, args, *attempt, decision)


def signed(
    verdict: Verdict, stored: Mapping[str, Any], at: datetime | None
) -> Decision:
    """Return a decision with what is stored of it: by whom, why, from where."""
    by, reason, origin = map(stored.get, ("by", "reason", "origin"))
    return Decision(verdict, by, at, reason, origin, stored.get("value"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: with a result, with a failure, or released.

    ``raised`` is the exception of the handler, or why its result cannot be stored. What
    a handler did is known ``only_here``: it is recorded as soon as the store is back.
    """

    stored: dict[str, JsonValue]
    released: bool = False
    raised: Exception | None = None
    only_here: bool = False

    @classmethod
    def result(cls, value: JsonValue) -> Self:
        """Return a result; raise ``SerializationError`` if JSON cannot hold it."""
        return cls({"value": copy_json(value, "result")})

    @classmethod
    def failure(cls, exc: Exception) -> Self:
        """Return the final failure of an effect, for any exception."""
        kind, message = exception_type(exc), exception_message(exc)
        return cls({"error": {"type": kind, "message": message}}, False, exc, True)

    @classmethod
    def returned(cls, value: JsonValue) -> Self:
        """Return what a handler returned: a failure if JSON cannot hold the value."""
        try:
            return replace(cls.result(value), only_here=True)
        except Exception as exc:
            return cls.failure(exc)

    @classmethod
    def release(cls, reason: str, raised: Exception | None = None) -> Self:
        """Return the outcome of an attempt that had no effect, or is taken for dead."""
        return cls({"released": reason}, True, raised, raised is not None)

    def is_recorded_in(self, record: CallRecord) -> bool:
        """Return whether the record has this outcome, and not another."""
        status = "failed" if self.released else "completed"
        return record.status == status and record.result == self.stored


def is_released(record: CallRecord) -> bool:
    """Return whether an attempt was released: it had no effect, and its key is free."""
    return record.status == "failed"


def state_of(record: CallRecord) -> str:
    """Return the state of a call for people: of an effect also failure or released."""
    if not record.call.call_id.startswith("effect:"):
        return record.status

    if failure_of(record) is not None:
        return "failure"

    return "released" if is_released(record) else record.status


def failure_of(record: CallRecord) -> EffectFailed | None:
    """Return the final failure that is recorded of an effect, if it has one."""
    match record.result:
        case {"error": {"type": str(kind), "message": str(message)}}:
            call = record.call
            return EffectFailed(call.idempotency_key, call.tool_name, kind, message)

    return None


def result_of(record: CallRecord) -> Any:
    """Return the result of a completed record; one recorded by hand as it is."""
    match record.result:
        case {"value": result, **rest} if rest.keys() <= {"said"}:
            return result

    return record.result


def exception_message(exc: Exception) -> str:
    """Return an exception's message, cut and escaped so that any store can hold it."""
    # Not str(exc): a __str__ that raises must not hide the failure.
    _, _, message = "".join(format_exception_only(exc)).strip().partition(": ")
    return message[:10_000].encode(errors="backslashreplace").decode()


def exception_type(exc: Exception) -> str:
    """Return the recorded name of an exception's type: with module, unless built in."""
    kind = type(exc)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
