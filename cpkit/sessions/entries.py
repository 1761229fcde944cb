"""The header and the entries of a session.

A session is a thread of JSON objects. The first is the *header*. Each later one is an
*entry* with ``type``, ``id``, ``parentId`` and ``timestamp``; its parent is the entry
that it follows. So the thread is a log by position and a tree by parents.

The format is version 3 of the coding-agent sessions of badlogic/pi-mono
(packages/coding-agent/docs/session.md). Unknown types and fields are kept.
"""

from __future__ import annotations

from collections.abc import Container
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

__all__ = [
    "LEAF",
    "STATE",
    "VERSION",
    "Entry",
    "Message",
    "draft",
    "flaw",
    "fresh_id",
    "milliseconds",
    "new_header",
    "now",
    "time_of",
]

Entry = dict[str, Any]
Message = dict[str, Any]

VERSION = 3

STATE = "cpkit.state"
"""Type of the custom entries whose ``data`` is merged into the state of a branch."""

LEAF = "cpkit.leaf"
"""Type of the custom entries that only move the leaf."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def new_header(session_id: str, cwd: str, parent_session: str | None = None) -> Entry:
    """Return the header of a new session."""
    return draft(
        "session",
        version=VERSION,
        id=session_id,
        timestamp=now(),
        cwd=cwd,
        parentSession=parent_session,
    )


def draft(kind: str, **fields: Any) -> Entry:
    """Return an entry's own fields, without those that are ``None``."""
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": kind, **given}


def fresh_id(taken: Container[str]) -> str:
    """Return eight hex digits that are not the id of an entry yet.

    Eight are enough: appends are fenced, so no other writer can take the id meanwhile.
    """
    while (entry_id := uuid4().hex[:8]) in taken:
        continue

    return entry_id


def flaw(entry: object) -> str | None:
    """Return why this is not an entry, or ``None``. The id is not checked."""
    if not isinstance(entry, dict):
        return "not a JSON object"

    if not isinstance(entry.get("type"), str):
        return "no type"

    if entry["type"] == "message" and not isinstance(entry.get("message"), dict):
        return "a message entry without a message"

    return None


def now() -> str:
    """Return the time as the format writes it: UTC to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_of(entry: Entry) -> datetime | None:
    """Return the entry's time, or ``None`` if it has none that can be parsed."""
    try:
        time = datetime.fromisoformat(entry["timestamp"])
    except (KeyError, TypeError, ValueError):
        return None

    return time.replace(tzinfo=time.tzinfo or UTC)


def milliseconds(entry: Entry) -> int | None:
    """Return the entry's time in milliseconds since 1970, as in messages."""
    time = time_of(entry)
    return None if time is None else (time - _EPOCH) // timedelta(milliseconds=1)
