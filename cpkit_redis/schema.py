"""What is stored, under which keys.

::

    <prefix>:schema          string: the version of this layout, 1
    <prefix>:threads         sorted set, all scores 0: the ids of the threads
    <prefix>:erased          the same: ids that have nothing but erased calls
    <prefix>:{<thread>}:m    list: the messages
                       x     hash: extra's keys and values
                       t     hash: created, updated; of an id that has nothing but
                             erased calls first, last; late: the time of the last
                             result of an erased call, for watchers
                       p     hash: call id -> record; of the calls that are pending
                       c     hash: call id -> record; of the other calls
    <prefix>:{<key>}:k       sorted set: thread, call id; the score is the attempt

A record is: sequence, attempt, time of the claim, idempotency key, tool, status, time
of the result, args, result. The args of an erased call are empty, and so is what an
issued call does not have yet. NUL separates fields: no id and no JSON text has one.
Messages, extra, args and results are JSON texts; ids are UTF-8; times are microseconds
since 1970 by the server's clock.

``%``, ``{`` and ``}`` in ids are percent-encoded between the braces, so that the braces
hold the whole id: all keys of a thread are in one slot of a cluster, and no two ids
share a key.
"""

from __future__ import annotations

from collections.abc import Mapping

from cpkit.driver import StoredCall, from_micros
from cpkit.errors import CorruptThread
from cpkit.records import ThreadInfo

__all__ = [
    "KINDS",
    "SCHEMA_VERSION",
    "decode_call",
    "decode_calls",
    "decode_thread",
    "slot_of",
]

SCHEMA_VERSION = 1

KINDS = (b"m", b"x", b"t", b"p", b"c")
"""How the keys of a thread end."""


def slot_of(prefix: str, one_id: str) -> bytes:
    """Return what all keys of a thread or an idempotency key start with.

    One letter follows. operations.lua has the same rule.
    """
    escaped = one_id.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return f"{prefix}:{{{escaped}}}:".encode()


def decode_call(thread_id: bytes, call_id: bytes, record: bytes) -> StoredCall:
    """Return a stored call; raise ``CorruptThread`` for a damaged record."""
    thread, call = thread_id.decode(), call_id.decode()
    fields = record.split(b"\0")

    try:
        # In a cluster a token follows.
        numbers, (key, tool, status, resolved, args, result) = fields[:3], fields[3:9]
        _, attempt, issued = map(int, numbers)
        is_issued = status == b"issued"

        if len(fields) > 10:
            raise ValueError("it has too many fields")

        if status not in (b"issued", b"completed", b"failed"):
            raise ValueError(f"{status!r} is not a status")

        if is_issued == bool(resolved) or (is_issued or not args) == bool(result):
            raise ValueError("it has a result too many or too few")

        return StoredCall(
            thread,
            call,
            tool.decode(),
            args or b"{}",
            key.decode(),
            status.decode(),  # type: ignore[arg-type]  # one of the three
            attempt,
            issued,
            result or None,
            int(resolved) if resolved else None,
            not args,
        )
    except ValueError as exc:
        raise CorruptThread(thread, f"call {call!r}", str(exc)) from exc


def decode_calls(thread_id: str, *hashes: Mapping[bytes, bytes]) -> list[StoredCall]:
    """Return the calls of a thread's hashes p and c, in the order of claims."""
    thread = thread_id.encode()
    records = [pair for found in hashes for pair in found.items()]
    calls = [(decode_call(thread, *pair), pair[1]) for pair in records]
    calls.sort(key=lambda pair: int(pair[1].partition(b"\0")[0]))
    return [call for call, _ in calls]


def decode_thread(name: bytes, version: int, *times: bytes | None) -> ThreadInfo:
    """Return one thread of a list."""
    try:
        created, updated = (from_micros(int(time or b"missing")) for time in times)
    except (ValueError, OverflowError) as exc:
        raise CorruptThread(name.decode(), "its times", str(exc)) from exc

    return ThreadInfo(name.decode(), version, created, updated)
