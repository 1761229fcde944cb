"""Dumps: a whole thread that moves from one store to another."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args

from cpkit.driver.codec import Codec, check_sequence, from_micros, to_micros
from cpkit.driver.ids import check_id
from cpkit.driver.writes import (
    Restore,
    StoredCall,
    StoredDump,
    issued_call,
    key_is_held,
)
from cpkit.records import CallRecord, CallStatus, ThreadDump

__all__ = ["decode_dump", "encode_dump"]

# What every store can count, with room for later messages, attempts and times. Lua
# counts in floats, which keep 53 bits of microseconds, up to June 2255.
_MAX_COUNT = 1_000_000_000
_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2255, 1, 1, tzinfo=UTC)

_PLAIN_JSON: Codec[Any] = Codec(Any)


def decode_dump(codec: Codec[Any], thread_id: str, stored: StoredDump) -> ThreadDump:
    """Return a stored thread; messages are the JSON that is stored."""
    created_at, updated_at = stored.created_at, stored.updated_at
    return ThreadDump(
        thread_id,
        _PLAIN_JSON.messages(stored.bodies, thread_id, stored.first),
        codec.extra(stored.items, thread_id),
        codec.records(stored.calls),
        None if created_at is None else from_micros(created_at),
        None if updated_at is None else from_micros(updated_at),
        stored.first,
    )


def encode_dump(codec: Codec[Any], dump: ThreadDump) -> Restore:
    """Check and encode the argument of ``restore_thread``.

    Raises ``ValueError`` or ``TypeError`` for a dump that no store could have made.
    """
    if not isinstance(dump, ThreadDump):
        raise TypeError(f"dump must be a ThreadDump, not {type(dump).__name__}")

    thread_id, first = check_id("thread_id", dump.thread_id), dump.first

    if type(first) is not int or not 0 <= first <= _MAX_COUNT:
        raise ValueError(f"first is an int from 0 to {_MAX_COUNT}, not {first!r}")

    check_sequence("messages", dump.messages)
    check_sequence("calls", dump.calls)
    bodies = [codec.encode(one, (i,)) for i, one in enumerate(dump.messages)]
    calls = [_encode_call(codec, thread_id, record) for record in dump.calls]
    items, size = codec.items(dump.extra)
    size += sum(map(len, bodies))
    size += sum(len(call.args) + len(call.result or b"") for call in calls)
    _check_keys(calls)
    created_at = None if dump.created_at is None else _micros(dump.created_at)
    updated_at = None if dump.updated_at is None else _micros(dump.updated_at)
    has_content = bodies or first or items or not all(one.erased for one in calls)

    if created_at is None or updated_at is None:
        if created_at is not updated_at or has_content or not calls:
            raise ValueError("a dump without times has erased calls and nothing else")
    elif not (has_content or calls):
        raise ValueError("a dump with times has messages, extra or a call")
    elif created_at > updated_at:
        raise ValueError(
            f"created_at {dump.created_at} is after updated_at {dump.updated_at}"
        )

    times = created_at, updated_at
    return Restore(thread_id, bodies, items, calls, *times, size, first)


def _micros(time: datetime) -> int:
    micros = to_micros(time)

    if not _FIRST < time < _LAST:
        raise ValueError(f"a time is after 1970-01-01 and before 2255, not {time}")

    return micros


def _encode_call(codec: Codec[Any], thread_id: str, record: CallRecord) -> StoredCall:
    if not isinstance(record, CallRecord):
        raise TypeError(f"a call must be a CallRecord, not {type(record).__name__}")

    claim = codec.claim(thread_id, record.call)
    status, attempt, resolved_at = record.status, record.attempt, record.resolved_at
    is_issued = status == "issued"
    keeps_result = not is_issued and not record.erased
    checks = {
        f"is of thread {record.thread_id!r}": record.thread_id == thread_id,
        f"has status {status!r} and resolved_at {resolved_at}": (
            status in get_args(CallStatus) and (resolved_at is None) == is_issued
        ),
        f"has attempt {attempt!r}, not an int from 1 to {_MAX_COUNT}": (
            type(attempt) is int and 1 <= attempt <= _MAX_COUNT
        ),
        "is issued or erased, but has a result": keeps_result or record.result is None,
        "is erased, but has args": not (record.erased and record.call.args),
    }

    for fault, is_fine in checks.items():
        if not is_fine:
            raise ValueError(f"call {claim.call_id!r} {fault}")

    return issued_call(claim, None, _micros(record.issued_at))._replace(
        status=status,
        attempt=attempt,
        result=codec.encode(record.result, ("result",)) if keeps_result else None,
        resolved_at=None if resolved_at is None else _micros(resolved_at),
        erased=bool(record.erased),
    )


def _check_keys(calls: list[StoredCall]) -> None:
    """Raise ``ValueError`` for calls that no store could have on record together."""
    if len({call.call_id for call in calls}) < len(calls):
        raise ValueError("a call id stands twice in the dump")

    newest: dict[str, StoredCall] = {}

    for call in sorted(calls, key=lambda one: one.attempt):
        older = newest.get(key := call.idempotency_key)

        if older is not None and key_is_held(call, [older]):
            raise ValueError(
                f"key {key!r} has attempt {call.attempt} twice, "
                "or another attempt than the newest one that has not failed"
            )

        newest[key] = call
