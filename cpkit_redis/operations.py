"""Writes as operations of ``operations.lua``, and what its answers mean.

A restored thread is first copied to the server in parts, under keys of its own. One
operation then renames these keys to those of the thread. An unfinished copy expires.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any, TypeAlias

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
)
from cpkit.errors import CorruptThread
from cpkit_redis.errors import failure, refusal
from cpkit_redis.schema import decode_call

SCRIPT = files("cpkit_redis").joinpath("operations.lua").read_bytes()
SHA = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest()

Content: TypeAlias = list[bytes] | dict[bytes, bytes]

# Bytes and arguments of one command. Redis before 7 takes a million arguments, and the
# server does nothing else while it runs a command.
_PART, _ARGUMENTS = 1024 * 1024, 10_000


def words(name: bytes, *arguments: Any) -> list[Any]:
    """Return an operation as the script takes it."""
    return [name, b"%d" % len(arguments), *arguments]


def operation(write: Write) -> list[Any]:
    """Return a write as an operation of the script."""
    thread = write.thread_id.encode()

    match write:
        case Append():
            expected = write.expected_version
            fence = b"" if expected is None else b"%d" % expected
            messages = b"\n".join(write.bodies)
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
            raise AssertionError("see copy_thread")


def checked(answer: Any, shard: bytes, thread_id: str = "?") -> list[Any]:
    """Return the answer to an operation; if it is a failure, raise that."""
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
            case b"gone":  # the copy of a restore, or its mark
                return StoreFailure("not sent", "another writer began the thread")
    except (CorruptThread, StoreFailure) as refused:
        return refused

    return None  # done, freed, unknown


def _lines(items: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"\n".join(text for item in items for text in item)


async def copy_thread(
    ask: Callable[..., Awaitable[list[Any]]],
    write: Restore,
    copy: bytes,
    lifetime: int,
    token: bytes,
) -> bytes:
    """Write the thread under keys that start with ``copy``.

    Returns how many entries each key has, as the operation ``restore`` takes it, for
    instance ``m12x3t3p0c5``. The keys live ``lifetime`` seconds. Each call has the
    ``token``.
    """
    found = _contents(write, token)

    for kind, content in found.items():
        for command in _fill_commands(copy + kind, content):
            # One part at a time: each has the time limit of a read.
            for answer in await ask(copy, command, ("EXPIRE", copy + kind, lifetime)):
                if isinstance(answer, Exception):
                    raise failure(answer) from answer

    return b"".join(b"%b%d" % (kind, len(one)) for kind, one in found.items())


def _contents(write: Restore, token: bytes) -> dict[bytes, Content]:
    """Return the content of each key of a restored thread, by the key's letter.

    The letters are those of `cpkit_redis.schema`.
    """
    names, times = (b"created", b"updated"), (write.created_at, write.updated_at)
    pending: dict[bytes, bytes] = {}
    others: dict[bytes, bytes] = {}

    if write.created_at is None:  # it has nothing but erased calls
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
            token,
            call.status,
            call.resolved_at or "",
            b"" if call.erased else call.args,
            call.result or b"",
        )
        is_pending = call.status == "issued" and not call.erased
        calls = pending if is_pending else others
        calls[call.call_id.encode()] = b"\0".join(map(_bytes, fields))

    return {
        b"m": write.bodies,
        b"x": dict(write.items),
        b"t": {
            **dict(zip(names, map(_bytes, times), strict=True)),
            b"restored": secrets.token_hex(8).encode(),
        },
        b"p": pending,
        b"c": others,
    }


def _fill_commands(key: bytes, content: Content) -> Iterator[list[bytes]]:
    """Yield the commands that write a list or a hash, in parts of a limited size."""
    is_hash = isinstance(content, dict)
    head = [b"HSET" if is_hash else b"RPUSH", key]
    command, size = [*head], 0

    for entry in content.items() if isinstance(content, dict) else zip(content):
        command += entry
        size += sum(map(len, entry))

        if size > _PART or len(command) > _ARGUMENTS:
            yield command
            command, size = [*head], 0

    if len(command) > 2:
        yield command


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
