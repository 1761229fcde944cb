"""The lines of a log, written and taken apart without a look into a message.

A line is one operation, so it is there wholly or, without its newline, not at all::

    {"thread":"user-42","log":"9f86d081884c7d65","at":null}
    {"created":"2026-11-21T03:34:05.123456Z","at":null}
    {"add":{"role":"user"},"at":[1,"2026-11-21T03:34:05.123456Z"]}
    {"add":[{"n":1},{"n":2}],"lengths":[7,7],"at":[3,"2026-11-21T03:34:06.000001Z"]}
    {"extra":{"plan":null},"lengths":[6,4],"at":[3,"2026-11-21T03:34:07.000001Z"]}
    {"call":{"call_id":"c1",…,"status":"issued"},"args":{},"at":[3,"…"]}
    {"call":{"call_id":"c1","status":"completed",…},"result":{"ok":true},"at":[3,"…"]}

The kind comes first and ``at``, the thread's version and time of change after the line,
comes last, so that both are found without what lies between. ``at`` is ``null`` as long
as the log holds no thread: in its head, and after ``delete_thread``, which leaves a
``call`` line with ``"erased":true`` for each call. Where a line holds several JSON
texts, ``lengths`` has their sizes in bytes. JSON texts contain no raw newline.

The framing of one message is 46 to 51 bytes, within 5 % of the message's own kilobyte.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.driver.writes import Append, Merge, StoredCall

__all__ = [
    "ADD",
    "BRACKET",
    "CALL",
    "EXTRA",
    "KINDS",
    "REST_OF_END",
    "TAIL_BYTES",
    "At",
    "CallLine",
    "added",
    "at_end_of",
    "born",
    "call_line",
    "created_in",
    "end_of_add",
    "erased",
    "header",
    "issued",
    "merged",
    "messages",
    "pairs",
    "resolved",
    "thread_of",
]

ADD = b'{"add":'
CALL = b'{"call"'
EXTRA = b'{"extra'
KINDS = frozenset({ADD, CALL, EXTRA, b'{"threa', b'{"creat'})
"""What a line starts with, in its first seven bytes."""

BRACKET = ord("]")
REST_OF_END = len('2026-11-21T03:34:05.123456Z"]}')
"""Bytes between what `end_of_add` returns and the newline."""

TAIL_BYTES = 96
"""More than the ``at`` of any line takes."""

_AT = re.compile(rb',"at":(?:null|\[([0-9]{1,19}),"([0-9T:.-]{26}Z)"\])\}\Z')
_LENGTHS = b',"lengths":['
_CREATED = re.compile(rb'\n\{"created":"([0-9T:.-]{26}Z)"')
# The first match is never inside a string: in JSON a quote there has a backslash
# before it, and the quote that closes a string is not followed by a letter.
_AFTER_META = re.compile(rb'\},"(args|result|at)":')

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class At(NamedTuple):
    """Where the thread stands: its version and the time of its last change."""

    version: int
    updated_at: int


class CallLine(NamedTuple):
    """What a call line says, and where in the line its args or result stand."""

    facts: dict[str, Any]
    start: int
    stop: int


# Writing


def header(thread_id: str, log: str) -> bytes:
    """Return the first line; ``log`` tells this file from others of the same name."""
    return _line({"thread": thread_id, "log": log})


def born(now: int) -> bytes:
    """Return the line that a thread's first operation brings with it."""
    return _line({"created": _iso(now)})


def added(write: Append, at: At) -> bytes:
    bodies = write.bodies

    if len(bodies) == 1:
        return b'{"add":%b%b' % (bodies[0], _end(at))

    return b'{"add":[%b]%b' % (b",".join(bodies), _end(at, bodies))


def merged(write: Merge, at: At) -> bytes:
    items = b",".join([b"%b:%b" % item for item in write.items])
    parts = [part for item in write.items for part in item]
    return b'{"extra":{%b}%b' % (items, _end(at, parts))


def issued(call: StoredCall, args: bytes, at: At) -> bytes:
    return b'{"call":%b,"args":%b%b' % (_facts(call), args, _end(at))


def resolved(call: StoredCall, result: bytes | None, at: At | None) -> bytes:
    """Return the line of an outcome; an erased call's has no content."""
    assert call.resolved_at is not None
    facts = {
        "call_id": call.call_id,
        "status": call.status,
        "resolved_at": _iso(call.resolved_at),
    }

    if result is None:
        return b'{"call":%b%b' % (encode_json(facts, ()), _end(at))

    return b'{"call":%b,"result":%b%b' % (encode_json(facts, ()), result, _end(at))


def erased(call: StoredCall) -> bytes:
    return b'{"call":%b%b' % (_facts(call._replace(erased=True)), _end(None))


def _facts(call: StoredCall) -> bytes:
    facts: dict[str, object] = {
        "call_id": call.call_id,
        "tool_name": call.tool_name,
        "idempotency_key": call.idempotency_key,
        "attempt": call.attempt,
        "status": call.status,
        "issued_at": _iso(call.issued_at),
    }

    if call.resolved_at is not None:
        facts["resolved_at"] = _iso(call.resolved_at)

    if call.erased:
        facts["erased"] = True

    return encode_json(facts, ())


def _line(facts: dict[str, str]) -> bytes:
    return encode_json(facts, ())[:-1] + _end(None)


def _end(at: At | None, parts: list[bytes] | None = None) -> bytes:
    lengths = b""

    if parts is not None:
        lengths = b"%b%b]" % (_LENGTHS, b",".join([b"%d" % len(p) for p in parts]))

    if at is None:
        return lengths + b',"at":null}\n'

    return b'%b,"at":[%d,"%b"]}\n' % (lengths, at.version, _iso(at.updated_at).encode())


def _iso(micros: int) -> str:
    return f"{_second(micros // 1_000_000)}.{micros % 1_000_000:06}Z"


@lru_cache(16)  # nearly always the one of the line before
def _second(seconds: int) -> str:
    return (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")


# Reading: each raises ``ValueError`` for what no line of ours looks like. Lines come
# without their newline.


def at_end_of(line: bytes) -> At | None:
    """Return the ``at`` of a line, of which the last `TAIL_BYTES` are enough."""
    found = _AT.search(line, max(0, len(line) - TAIL_BYTES))

    if found is None:
        raise ValueError("the line does not end as one of ours")

    if found[1] is None:
        return None

    return At(int(found[1]), _micros(found[2].decode()))


def thread_of(line: bytes) -> str:
    """Return the thread id in a log's first line."""
    first = parse_json(line)

    if not isinstance(first, dict) or not isinstance(first.get("thread"), str):
        raise ValueError("the first line names no thread")

    found: str = first["thread"]
    return found


def created_in(head: bytes) -> int | None:
    """Return the time in the first ``created`` line, if there is one."""
    found = _CREATED.search(head)
    return None if found is None else _micros(found[1].decode())


def messages(line: bytes) -> tuple[list[bytes], int]:
    """Return the messages of an ``add`` line and the version after them."""
    stop = line.rindex(b',"at":[')
    version = int(line[stop + 7 : line.index(b",", stop + 7)])

    if not line.endswith(b'Z"]}'):
        raise ValueError("the line does not end as one of ours")

    # A line with ``lengths`` has its bracket here; a message that is an array may too.
    if line[stop - 1] == BRACKET:
        return _texts(line, len(ADD), stop), version

    return [line[len(ADD) : stop]], version


def end_of_add(version: int) -> bytes:
    """Return what follows the message in the line that makes a version."""
    return b',"at":[%d,"' % version


def pairs(line: bytes) -> list[tuple[bytes, bytes]]:
    """Return the keys and values of an ``extra`` line."""
    texts = _texts(line, line.index(b":") + 1, line.rindex(b',"at":['))

    if len(texts) % 2:
        raise ValueError("an extra line has a key without a value")

    return list(zip(texts[::2], texts[1::2], strict=True))


def call_line(line: bytes) -> CallLine:
    """Take a ``call`` line apart."""
    found = _AFTER_META.search(line)
    stop = line.rindex(b',"at":')

    if found is None:
        raise ValueError("a call line says nothing about its call")

    facts = parse_json(line[len(CALL) + 1 : found.start() + 1])

    for name in ("issued_at", "resolved_at"):
        if name in facts:
            facts[name] = _micros(facts[name])

    return CallLine(facts, min(found.end(), stop), stop)


def _texts(line: bytes, start: int, stop: int) -> list[bytes]:
    """Divide what stands between the kind and ``at`` by its ``lengths``."""
    cut = line.rfind(_LENGTHS, start, stop)
    digits = line[cut + len(_LENGTHS) : stop - 1]

    if cut < 0 or not digits.replace(b",", b"").isdigit():
        return [line[start:stop]]

    texts = []
    position = start + 1

    for digit in digits.split(b","):
        texts.append(line[position : position + int(digit)])
        position += int(digit) + 1

    if position != cut:
        raise ValueError("the lengths are not those of the line")

    return texts


def _micros(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)
