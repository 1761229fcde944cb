"""Writes as operations of ``operations.lua``, and what its answers mean."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from cpkit.driver import (
    Append,
    Claim,
    Conflict,
    Erase,
    EraseCalls,
    KeyHeld,
    Merge,
    Outcome,
    Resolve,
    Restore,
    Trim,
    Write,
)
from cpkit_redis.schema import decode_call, encode_call

SCRIPT = files("cpkit_redis").joinpath("operations.lua").read_bytes()
SHA = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest().encode()


def operation(write: Write) -> list[bytes]:
    """Return a write as the script takes it: its name and its arguments."""
    thread = write.thread_id.encode()

    match write:
        case Append(_, bodies, expected, items):
            text = _lines(items) if items else b""
            return [b"append", thread, _text(expected), b"\n".join(bodies), text]
        case Merge(_, items):
            return [b"merge", thread, _lines(items)]
        case Claim(_, call_id, tool, args, key):
            ids = (thread, call_id.encode(), tool.encode())
            return [b"claim", *ids, args, key.encode()]
        case Resolve(_, call_id, status, result):
            return [b"resolve", thread, call_id.encode(), status.encode(), result]
        case Erase(_, forget, expected):
            return [b"erase", thread, b"%d" % forget, _text(expected)]
        case Trim(_, before, expected):
            return [b"trim", thread, b"%d" % before, _text(expected)]
        case EraseCalls(_, before, expected):
            return [b"erase_calls", thread, b"%d" % before, _text(expected)]
        case Restore(_, bodies, items, calls, created, updated, _, first):
            texts = b"".join(
                b"%b\0%b\0" % (call.call_id.encode(), encode_call(call, sequence))
                for sequence, call in enumerate(calls, 1)
            )
            content = (b"\n".join(bodies), _lines(items), texts)
            times = _text(created), _text(updated)
            return [b"restore", thread, *times, *content, _text(first)]


def outcome(answer: Any) -> Outcome:
    """Return what the script's answer to a write means."""
    if answer is None or type(answer) is int:
        return answer

    word, *found = answer

    match word:
        case b"conflict":
            return Conflict(found[0])
        case b"held":
            return KeyHeld(*(one.decode() for one in found))
        case _:
            return decode_call(*found)[1]


def _text(number: int | None) -> bytes:
    return b"" if number is None else b"%d" % number


def _lines(items: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"\n".join([text for item in items for text in item])
