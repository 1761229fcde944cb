"""What a handle asks a store to write, and what a store answers.

The handle checks and encodes every value. A store puts the bytes away and never looks
into them. ``items`` and ``bodies`` are JSON texts in UTF-8; times are microseconds
since 1970, UTC. ``size`` is how many bytes of JSON a write stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from cpkit.records import CallStatus

__all__ = [
    "Append",
    "Claim",
    "Conflict",
    "Erase",
    "EraseCalls",
    "Fate",
    "KeyHeld",
    "Merge",
    "Outcome",
    "Resolve",
    "Restore",
    "Snapshot",
    "StoreFailure",
    "StoredCall",
    "StoredDump",
    "Trim",
    "Write",
    "erased_call",
    "is_erased_by",
    "issued_call",
    "key_is_held",
    "may_have_changed",
    "resolved_call",
]


Fate: TypeAlias = Literal["not sent", "rejected", "unknown"]
"""What is proven about an operation that failed; see `StoreFailure`."""


class StoredCall(NamedTuple):
    """A call's columns as a store fetched them."""

    thread_id: str
    call_id: str
    tool_name: str
    args: bytes | str
    idempotency_key: str
    status: CallStatus
    attempt: int
    issued_at: int
    result: bytes | str | None = None
    resolved_at: int | None = None
    erased: bool = False


class Append(NamedTuple):
    """Add ``bodies`` at the end of a thread and merge ``items`` into its extra.

    Both happen in one atomic step, and only where the thread is at
    ``expected_version`` (``None``: at any version). Outcome: the new version as an
    ``int``, or `Conflict`. With neither bodies nor items nothing changes, and the
    outcome is the current version, 0 for a missing thread.
    """

    thread_id: str
    bodies: list[bytes]
    expected_version: int | None
    items: Sequence[tuple[bytes, bytes]] = ()
    size: int = 0


class Merge(NamedTuple):
    """Set keys of a thread's extra. Outcome: ``None``."""

    thread_id: str
    items: Sequence[tuple[bytes, bytes]]
    size: int = 0


class Claim(NamedTuple):
    """Put a call on record as issued; its attempt is one after its key's newest.

    Outcome: ``None`` where the call is on record now. Otherwise nothing is written,
    and the outcome is the `StoredCall` that stands in the way: the call with this
    thread and call id, whatever its status, or else the newest call of the key, if it
    is issued or completed.
    """

    thread_id: str
    call_id: str
    tool_name: str
    args: bytes
    idempotency_key: str
    size: int = 0


class Resolve(NamedTuple):
    """Record a call's outcome, if the call is still issued.

    Of an erased call only the status and the time are recorded, and the thread does
    not change. Outcome: the `StoredCall` as it stands now; ``None`` where no such call
    is on record.
    """

    thread_id: str
    call_id: str
    status: CallStatus
    result: bytes
    size: int = 0


class Erase(NamedTuple):
    """Delete a thread: messages, extra, and the args and results of its calls.

    Each call stays on record, ``erased``, with args ``{}`` and without a result. With
    ``forget_keys`` the calls are deleted too. Nothing is deleted, and the outcome is
    `Conflict`, unless the thread is at ``expected_version`` (``None``: at any version;
    a missing thread is at 0). Otherwise the outcome is ``None``, for a missing thread
    as well.
    """

    thread_id: str
    forget_keys: bool
    expected_version: int | None = None
    size: int = 0


class Trim(NamedTuple):
    """Remove the messages below the position ``before``; all, if it is too high.

    Positions, version, extra, calls and times stay, also when nothing is left. Outcome:
    how many were removed, 0 for a missing thread, or `Conflict` as of an `Erase`.
    """

    thread_id: str
    before: int
    expected_version: int | None = None
    size: int = 0


class EraseCalls(NamedTuple):
    """Erase the args and results of calls with an outcome from before a time.

    The same stays as after an `Erase`, and also the version and the thread's times.
    Issued calls keep everything. Outcome: how many were erased now, 0 for a missing
    thread, or `Conflict` as of an `Erase`.
    """

    thread_id: str
    before: int
    expected_version: int | None = None
    size: int = 0


class Restore(NamedTuple):
    """Create a thread exactly as it was dumped; ``calls`` are in the order of claims.

    The first of the ``bodies`` has the position ``first``. ``created_at`` and
    ``updated_at`` are ``None`` where there is nothing but erased calls. Outcome:
    ``None``; `Conflict` where the thread or any call of its id is on record; `KeyHeld`
    where a call of another thread stands in the way. Of each key all attempt numbers
    must differ, and only the newest may be issued or completed.
    """

    thread_id: str
    bodies: list[bytes]
    items: list[tuple[bytes, bytes]]
    calls: list[StoredCall]
    created_at: int | None
    updated_at: int | None
    size: int = 0
    first: int = 0


Write: TypeAlias = (
    Append | Merge | Claim | Resolve | Erase | Trim | EraseCalls | Restore
)


class Conflict(NamedTuple):
    """The thread is at this version, so nothing was written."""

    version: int


class KeyHeld(NamedTuple):
    """A call of another thread has this idempotency key, so nothing was written."""

    idempotency_key: str
    thread_id: str


class StoreFailure(Exception):
    """A store's operation failed; raised in place of the client library's error.

    ``fate`` says what is proven about the operation:

    ``"not sent"``
        It did not run, and may succeed when it is tried again: no connection, a
        deadlock, a server that is still starting.
    ``"rejected"``
        It did not run, and would be rejected again: a missing permission, a full disk.
    ``"unknown"``
        It was sent and the answer was lost: it may have run.

    ``reason`` is for people and must not hold a password.
    """

    def __init__(self, fate: Fate, reason: str) -> None:
        super().__init__(fate, reason)
        self.fate: Fate = fate
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} ({self.fate})"


Outcome: TypeAlias = int | None | StoredCall | Conflict | KeyHeld
"""What a store answers to one write."""


class Snapshot(NamedTuple):
    """A thread, or a range of its messages, at one moment.

    ``messages`` are decoded; the first one stands at position ``first``: that of the
    range, or of the oldest message left (see `span`). ``pending`` has the calls that
    are issued and not erased, in the order of claims.
    """

    messages: list[Any]
    items: Sequence[tuple[bytes | str, bytes | str]]
    pending: Sequence[StoredCall]
    version: int
    first: int = 0


class StoredDump(NamedTuple):
    """A whole thread at one moment, with what a `Restore` takes."""

    bodies: Sequence[bytes | str]
    items: Sequence[tuple[bytes | str, bytes | str]]
    calls: Sequence[StoredCall]
    created_at: int | None
    updated_at: int | None
    first: int = 0


def issued_call(write: Claim, newest: StoredCall | None, now: int) -> StoredCall:
    """Return the call to put on record for a claim; ``newest`` is of the same key."""
    thread_id, call_id, tool_name, args, key, _ = write
    attempt = 1 if newest is None else newest.attempt + 1
    return StoredCall(thread_id, call_id, tool_name, args, key, "issued", attempt, now)


def resolved_call(call: StoredCall, write: Resolve, now: int) -> StoredCall:
    """Return an issued call with its outcome; an erased call keeps no result."""
    result = None if call.erased else write.result
    return call._replace(status=write.status, result=result, resolved_at=now)


def erased_call(call: StoredCall) -> StoredCall:
    """Return what stays on record of a call when its thread is deleted."""
    return call._replace(args=b"{}", result=None, erased=True)


def is_erased_by(call: StoredCall, write: EraseCalls) -> bool:
    """Return whether an `EraseCalls` erases a call."""
    ended_at = call.resolved_at
    return not call.erased and ended_at is not None and ended_at < write.before


def key_is_held(call: StoredCall, others: Sequence[StoredCall]) -> bool:
    """Tell whether calls of other threads stand in the way of a restored call.

    ``others`` are the attempts of its key, or at least the newest of them and the one
    with the same attempt number. All numbers must differ, and only the newest attempt
    may be issued or completed.
    """
    return any(
        other.attempt == call.attempt
        or (other if other.attempt < call.attempt else call).status != "failed"
        for other in others
    )


def may_have_changed(write: Write, outcome: object) -> bool:
    """Tell whether a write with this outcome may have changed its thread."""
    if type(write) is Append and type(outcome) is int:
        return bool(write.bodies or write.items)

    if type(write) is Resolve and outcome is not None:
        return True

    # A hint too many does no harm: a failed write may have been applied.
    return outcome is None or isinstance(outcome, Exception)
