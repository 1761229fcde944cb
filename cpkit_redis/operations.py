"""Writes as operations of ``operations.lua``, and what its answers mean."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from itertools import accumulate
from typing import Any, cast

from cpkit.driver import (
    Append,
    Claim,
    Conflict,
    Erase,
    KeyHeld,
    Merge,
    Outcome,
    Resolve,
    Restore,
    StoreFailure,
    Write,
    stored_size,
)
from cpkit.errors import CorruptThread
from cpkit_redis.errors import refusal
from cpkit_redis.schema import decode_call

__all__ = [
    "SCRIPT",
    "SHA",
    "checked",
    "grouped",
    "operation",
    "outcome",
    "outcomes_of",
    "words",
]

SCRIPT = files("cpkit_redis").joinpath("operations.lua").read_bytes()
SHA = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest()


def grouped(writes: Sequence[Write], limit: int) -> list[list[Write]]:
    """Group writes by the operation that makes them.

    Appends side by side to one thread, of messages alone and at any version, are one
    operation of at most ``limit`` bytes: 64 tasks that write to one thread are a third
    faster.
    """
    groups: list[list[Write]] = []
    thread_id, room = None, 0  # of the last group

    for write in writes:
        is_plain = (
            isinstance(write, Append)
            and write.expected_version is None
            and write.bodies
            and not write.items
        )
        size = stored_size(write)

        if is_plain and write.thread_id == thread_id and size <= room:
            groups[-1].append(write)
            room -= size
        else:
            groups.append([write])
            thread_id = write.thread_id if is_plain else None
            room = limit - size

    return groups


def words(name: bytes, *arguments: Any) -> list[Any]:
    """Return an operation as the script takes it."""
    return [name, b"%d" % len(arguments), *arguments]


def operation(group: Sequence[Write]) -> list[Any]:
    """Return a group of writes as one operation of the script."""
    write = group[0]
    thread = write.thread_id.encode()

    match write:
        case Append():
            expected = write.expected_version
            fence = b"" if expected is None else b"%d" % expected
            appends = cast("Sequence[Append]", group)
            messages = b"\n".join([body for one in appends for body in one.bodies])
            return words(b"append", thread, fence, messages, _lines(write.items))
        case Merge():
            return words(b"merge", thread, _lines(write.items))
        case Claim(call=call):
            ids = (call.call_id, call.idempotency_key, call.tool_name)
            return words(b"claim", thread, *(one.encode() for one in ids), write.args)
        case Resolve():
            call_id, status = write.call_id.encode(), write.status.encode()
            return words(b"resolve", thread, call_id, status, write.result)
        case Erase():
            return words(b"erase", thread, b"1" if write.forget_keys else b"0")
        case Restore():
            raise AssertionError("it has an operation of its own")


def outcomes_of(group: Sequence[Write], answer: Outcome) -> list[Outcome]:
    """Return the outcome of each write of a group, of which ``answer`` is the last."""
    if not isinstance(answer, int):
        return [answer] * len(group)

    counts = [len(getattr(write, "bodies", ())) for write in group]
    return [answer - sum(counts) + count for count in accumulate(counts)]


def checked(answer: Any, shard: bytes, thread_id: str = "?") -> list[Any]:
    """Return the answer to an operation, or raise the failure that it is."""
    if isinstance(answer, StoreFailure):
        raise answer

    if answer[0] == b"failed":
        raise refusal(answer[1].decode(errors="replace"), thread_id, shard)

    return answer  # type: ignore[no-any-return]  # redis-py has no type for it


def outcome(answer: Any, shard: bytes, thread_id: str = "?") -> Outcome:
    """Return what the answer to a write means."""
    try:
        word, *found = checked(answer, shard, thread_id)

        match word:
            case b"version":
                return int(found[0])
            case b"conflict":
                return Conflict(found[0])
            case b"held":
                return KeyHeld(*(one.decode() for one in found))
            case b"call":
                return decode_call(*found)
            case b"gone":
                return StoreFailure("not sent", "another writer overtook it")
    except (CorruptThread, StoreFailure) as refused:
        return refused

    return None  # done, freed, unknown


def _lines(items: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"\n".join(text for item in items for text in item)
