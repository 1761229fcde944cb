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

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from cpkit.driver import Restore, StoredCall, from_micros
from cpkit.errors import CorruptThread
from cpkit.records import ThreadInfo

__all__ = [
    "SCHEMA_VERSION",
    "contents",
    "decode_call",
    "decode_calls",
    "decode_thread",
    "fill_commands",
    "slot_of",
]

SCHEMA_VERSION = 1

Content: TypeAlias = list[bytes] | dict[bytes, bytes]

# Bytes, and entries of a list or hash, in one command: Redis before 7 takes a million
# arguments.
_PART, _ENTRIES = 1024 * 1024, 10_000


def slot_of(prefix: str, one_id: str) -> bytes:
    """Return what all keys of a thread or an idempotency key start with.

    One letter follows. operations.lua has the same rule.
    """
    escaped = one_id.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return f"{prefix}:{{{escaped}}}:".encode()


def contents(write: Restore) -> dict[bytes, Content]:
    """Return what stands under each key of a restored thread, by the key's letter."""
    names, times = (b"created", b"updated"), (write.created_at, write.updated_at)
    calls: dict[bool, dict[bytes, bytes]] = {True: {}, False: {}}

    if write.created_at is None:
        changes = [call.issued_at for call in write.calls]
        latest = max(changes + [call.resolved_at or 0 for call in write.calls])
        names, times = (b"first", b"last"), (min(changes), latest)

    for sequence, call in enumerate(write.calls, 1):
        fields = (
            sequence,
            call.attempt,
            call.issued_at,
            call.idempotency_key,
            call.tool_name,
            call.status,
            call.resolved_at or "",
            b"" if call.erased else call.args,
            call.result or b"",
        )
        is_pending = call.status == "issued" and not call.erased
        calls[is_pending][call.call_id.encode()] = b"\0".join(map(_bytes, fields))

    return {
        b"m": write.bodies,
        b"x": dict(write.items),
        b"t": dict(zip(names, map(_bytes, times), strict=True)),
        b"p": calls[True],
        b"c": calls[False],
    }


def fill_commands(key: bytes, content: Content) -> Iterator[list[bytes]]:
    """Yield the commands that write a list or a hash, in parts of a limited size."""
    is_hash = isinstance(content, dict)
    head = [b"HSET" if is_hash else b"RPUSH", key]
    command, size = [*head], 0

    for entry in content.items() if isinstance(content, dict) else zip(content):
        command += entry
        size += sum(map(len, entry))

        if size > _PART or len(command) > _ENTRIES:
            yield command
            command, size = [*head], 0

    if len(command) > 2:
        yield command


def decode_call(thread_id: bytes, call_id: bytes, record: bytes) -> StoredCall:
    """Return a stored call; raise ``CorruptThread`` for a damaged record."""
    thread, call = thread_id.decode(), call_id.decode()
    fields = record.split(b"\0")

    try:
        numbers, (key, tool, status, resolved, args, result) = fields[:3], fields[3:]
        _, attempt, issued = map(int, numbers)
        is_issued = status == b"issued"

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


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
