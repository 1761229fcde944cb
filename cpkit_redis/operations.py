"""The driver's operations: the arguments of scripts, and what their answers mean.

What needs no script (reading a thread, or its calls) is read by plain commands; what
they bring is decoded here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from cpkit.driver.codec import from_micros
from cpkit.driver.ids import prefix_end
from cpkit.driver.writes import Append, Claim, Erase, Merge, Resolve, StoredCall, Write
from cpkit.errors import CorruptThread, UnknownCall, VersionConflict
from cpkit.records import CallStatus, ThreadInfo
from cpkit_redis.layout import register_of, slot_of
from cpkit_redis.scripting import Script

__all__ = [
    "FIND",
    "LIST",
    "READ",
    "REHEARSE",
    "arguments",
    "bounds",
    "call_of",
    "calls_of",
    "grouped",
    "listing",
    "outcome_of",
    "pairs",
    "pending_of",
    "size_of",
    "thread_info",
]

_WRITES: dict[type[Write], Script] = {
    Append: Script("times", "append"),
    Merge: Script("times", "merge"),
    Claim: Script("times", "slots", "calls", "claim"),
    Resolve: Script("times", "slots", "calls", "resolve"),
    Erase: Script("slots", "erase"),
}

FIND = Script("slots", "calls", "find")
LIST = Script("slots", "list")
READ = Script("read")
REHEARSE = Script("rehearse")


# Arguments


def grouped(writes: list[Write]) -> dict[Script, list[list[int]]]:
    """Return the places of a group's writes by script, and together if made as one.

    Made as one are appends to one thread, unless they expect a version. All of the
    group came at the same time, so it may be made in any order.
    """
    groups: dict[Script, dict[object, list[int]]] = {}

    for place, write in enumerate(writes):
        alone = not isinstance(write, Append) or write.expected_version is not None
        made = groups.setdefault(_WRITES[type(write)], {})
        made.setdefault(place if alone else write.thread_id, []).append(place)

    return {script: list(made.values()) for script, made in groups.items()}


def arguments(writes: list[Write], prefix: str) -> list[bytes]:
    """Return the script's arguments for writes that are made as one."""
    write = writes[0]
    place = (write.thread_id.encode(), slot_of(prefix, write.thread_id))

    if isinstance(write, Append):
        expected = write.expected_version
        fence = b"" if expected is None else b"%d" % expected
        return [*place, fence, *write.bodies, *_bodies(writes[1:])]

    if isinstance(write, Merge):
        return [*place, *(text for item in write.items for text in item)]

    if isinstance(write, Claim):
        call = write.call
        return [
            *place,
            call.call_id.encode(),
            call.idempotency_key.encode(),
            register_of(prefix, call.idempotency_key),
            call.tool_name.encode(),
            write.args,
        ]

    if isinstance(write, Resolve):
        return [*place, write.call_id.encode(), write.status.encode(), write.result]

    assert isinstance(write, Erase)
    return [*place, b"1" if write.forget_keys else b"0"]


def _bodies(writes: list[Write]) -> list[bytes]:
    appends = (write for write in writes if isinstance(write, Append))
    return [body for append in appends for body in append.bodies]


def listing(prefix: str, after: str | None, limit: int) -> list[bytes]:
    """Return the arguments of `LIST` for one page.

    It is ordered by bytes of UTF-8, which is the order of code points.
    """
    low = b"[" + prefix.encode() if prefix else b"-"

    if after is not None and after >= prefix:
        low = b"(" + after.encode()

    end = prefix_end(prefix)
    high = b"+" if end is None else b"(" + end.encode()
    return [low, high, b"%d" % limit]


def bounds(start: int, stop: int | None) -> tuple[bytes, bytes]:
    """Return the arguments of LRANGE for a slice.

    It counts as Python does, negative positions too, but includes the end.
    """
    if stop == 0:
        return b"1", b"0"

    last = -1 if stop is None else stop - 1
    return b"%d" % _near(start), b"%d" % _near(last)


def _near(position: int) -> int:
    """Return the position, or one beyond any list that Redis takes for a number."""
    return max(-(2**53), min(position, 2**53))


def size_of(write: Write) -> int:
    """Return how many bytes the write adds to its group, roughly."""
    if isinstance(write, Append):
        return sum(map(len, write.bodies))

    if isinstance(write, Merge):
        return sum(len(value) for _, value in write.items)

    if isinstance(write, Claim):
        return len(write.args)

    if isinstance(write, Resolve):
        return len(write.result)

    return 0


# Outcomes


def outcome_of(write: Write, answer: Any) -> object:
    """Return what the caller of the write gets, or the refusal that it is to raise."""
    if isinstance(answer, int):
        return answer if isinstance(write, Append) else None

    word, *found = answer

    if word == b"call":
        try:
            return call_of(*found)
        except CorruptThread as refusal:
            return refusal

    if isinstance(write, Append):
        assert write.expected_version is not None
        return VersionConflict(write.thread_id, write.expected_version, found[0])

    assert isinstance(write, Resolve)
    return UnknownCall(write.thread_id, write.call_id)


def call_of(
    thread_id: bytes,
    call_id: bytes,
    issued: bytes,
    resolved: bytes | None,
    args: bytes | None,
    result: bytes | None,
) -> StoredCall:
    """Return a call from its parts; one without args is erased."""
    thread, call = thread_id.decode(), call_id.decode()

    try:
        _, attempt, issued_at, key, tool = issued.split(b"\0")
        status, resolved_at = _resolution(resolved)
        stored = StoredCall(
            thread,
            call,
            tool.decode(),
            b"{}" if args is None else args,
            key.decode(),
            status,
            int(attempt),
            int(issued_at),
            result,
            resolved_at,
            args is None,
        )
    except ValueError as exc:
        raise CorruptThread(thread, f"call {call!r}", str(exc)) from exc

    if (result is None) != (stored.erased or resolved is None):
        raise CorruptThread(thread, f"call {call!r}", "its result is missing or stray")

    return stored


def calls_of(thread_id: str, *hashes: Any) -> list[StoredCall]:
    """Return a thread's calls in the order of claims, from its hashes i, r, a and v."""
    issued, resolved, args, results = (dict(pairs(found)) for found in hashes)
    thread = thread_id.encode()
    calls = [
        (
            _sequence(thread_id, call_id, text),
            call_of(
                thread,
                call_id,
                text,
                resolved.get(call_id),
                args.get(call_id),
                results.get(call_id),
            ),
        )
        for call_id, text in issued.items()
    ]
    return [call for _, call in sorted(calls, key=itemgetter(0))]


def pending_of(thread_id: str, found: Any) -> list[StoredCall]:
    """Return a thread's pending calls in the order of claims, from its hash p."""
    issued = {}
    args = {}

    for call_id, text in pairs(found):
        *fields, args[call_id] = text.split(b"\0", 5)
        issued[call_id] = b"\0".join(fields)

    return calls_of(thread_id, issued, {}, args, {})


def thread_info(
    thread_id: bytes, version: int, created: bytes | None, updated: bytes | None
) -> ThreadInfo:
    """Return a row of `LIST`."""
    name = thread_id.decode()

    try:
        times = [from_micros(int(time or b"missing")) for time in (created, updated)]
    except (ValueError, OverflowError) as exc:
        raise CorruptThread(name, "its times", str(exc)) from exc

    return ThreadInfo(name, version, *times)


def pairs(found: Any) -> Iterable[tuple[bytes, bytes]]:
    """Return the fields of a hash: RESP3 has a map for them, RESP2 a list."""
    if isinstance(found, dict):
        return found.items()

    fields: Iterator[bytes] = iter(found)
    return zip(fields, fields, strict=True)


def _resolution(resolved: bytes | None) -> tuple[CallStatus, int | None]:
    if resolved is None:
        return "issued", None

    status, resolved_at = resolved.split(b"\0")

    if status == b"completed":
        return "completed", int(resolved_at)

    if status == b"failed":
        return "failed", int(resolved_at)

    raise ValueError(f"{status!r} is no status")


def _sequence(thread_id: str, call_id: bytes, issued: bytes) -> int:
    try:
        return int(issued.partition(b"\0")[0])
    except ValueError as exc:
        raise CorruptThread(thread_id, f"call {call_id!r}", str(exc)) from exc
