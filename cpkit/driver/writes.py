"""The writes, checked and encoded, and a call as it lies in a store.

`Codec` makes the writes; a driver puts their bytes into its store without looking into
them, and gives the codec back what it fetched.
"""

from __future__ import annotations

from typing import NamedTuple

from cpkit.records import CallStatus, ToolCall

__all__ = ["Append", "Claim", "Erase", "Merge", "Resolve", "StoredCall", "Write"]


class Append(NamedTuple):
    """Messages for the end of a thread; ``bodies`` are JSON texts in UTF-8."""

    thread_id: str
    bodies: list[bytes]
    expected_version: int | None


class Merge(NamedTuple):
    """Keys for a thread's extra; keys and values are JSON texts in UTF-8."""

    thread_id: str
    items: list[tuple[bytes, bytes]]


class Claim(NamedTuple):
    """A call to be issued; ``args`` is JSON text in UTF-8, ``call`` what was asked."""

    thread_id: str
    call: ToolCall
    args: bytes


class Resolve(NamedTuple):
    """A call's outcome; ``result`` is JSON text in UTF-8."""

    thread_id: str
    call_id: str
    status: CallStatus
    result: bytes


class Erase(NamedTuple):
    """A thread to be deleted."""

    thread_id: str
    forget_keys: bool


class StoredCall(NamedTuple):
    """A call's columns as a driver fetched them; times in microseconds since 1970."""

    thread_id: str
    call_id: str
    tool_name: str
    args: bytes | str
    idempotency_key: str
    status: CallStatus
    attempt: int
    issued_at: int
    result: bytes | str | None
    resolved_at: int | None
    erased: bool


Write = Append | Merge | Claim | Resolve | Erase
"""What changes a thread."""
