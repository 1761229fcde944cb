"""Threads as dumps that no store has made, with fresh ids and chosen times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from cpkit import CallRecord, JsonValue, ThreadDump, ToolCall
from cpkit.records import CallStatus

__all__ = ["made_call", "made_dump"]

CREATED = datetime(2001, 2, 3, 4, 5, 6, 999_999, tzinfo=UTC)
UPDATED = datetime(2019, 12, 31, 23, 59, 59, 1, tzinfo=UTC)


def made_call(
    thread: str,
    status: CallStatus = "issued",
    *,
    key: str | None = None,
    attempt: int = 1,
    minute: int = 0,
    args: dict[str, JsonValue] | None = None,
    result: JsonValue = None,
) -> CallRecord:
    """Return a record with a fresh call id; without a key, with a fresh key too."""
    token = uuid4().hex[:16]
    issued_at = CREATED + timedelta(minutes=minute)
    resolved = status != "issued"
    return CallRecord(
        thread,
        ToolCall(
            f"call-{token}",
            "pay",
            {"amount": 10} if args is None else args,
            key or f"key-{token}",
        ),
        status,
        attempt,
        issued_at,
        result if resolved else None,
        issued_at + timedelta(seconds=1) if resolved else None,
    )


def made_dump(thread: str, *calls: CallRecord, **changes: Any) -> ThreadDump:
    """Return a thread with two messages, extra and the calls; change its fields."""
    fields: dict[str, Any] = {
        "messages": [{"n": 1}, {"n": 2}],
        "extra": {"plan": "a"},
        "created_at": CREATED,
        "updated_at": UPDATED,
        **changes,
    }
    return ThreadDump(thread, calls=list(calls), **fields)
