"""The lines of a log, written and taken apart without a look into a message.

A line is one operation, so it is there wholly or, without its newline, not at all::

    {"thread":"user-42","log":"9f86d081884c7d65","at":null}
    {"created":"2026-11-21T03:34:05.123456Z","at":null}
    {"add":{"role":"user"},"at":[1,"2026-11-21T03:34:05.123456Z"]}
    {"add":[{"n":1},{"n":2}],"lengths":[7,7],"at":[3,"2026-11-21T03:34:06.000001Z"]}
    {"extra":{"plan":null},"lengths":[6,4],"at":[3,"2026-11-21T03:34:07.000001Z"]}
    {"add":[{}],"extra":{"n":1},"lengths":[[2],[3,1]],"at":[4,"…"]}
    {"call":{"call_id":"c1",…,"status":"issued"},"args":{},"at":[4,"…"]}
    {"call":{"call_id":"c1","status":"completed",…},"result":{"ok":true},"at":[4,"…"]}

The kind comes first. ``at`` comes last: the thread's version after the line, and the
time of its last change. It is ``null`` while the log holds no thread: in its head, and
after ``delete_thread``, which leaves a ``call`` line with ``"erased":true`` for each
call. Where a line holds several JSON texts, ``lengths`` has their sizes in bytes. JSON
texts contain no raw newline.

The framing of one message is 46 to 52 bytes, within 5 % of a kilobyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from cpkit.driver import StoredCall
from cpkit.driver.jsontext import encode_json, parse_json

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
    "call_line",
    "created",
    "created_in",
    "end_of_add",
    "erased",
    "header",
    "issued",
    "messages",
    "pairs",
    "resolved",
    "thread_of",
]

Items = Sequence[tuple[bytes, bytes]]

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
_LENGTHS = re.compile(rb',"lengths":(\[[0-9,\[\]]*\])')
_CREATED = re.compile(rb'\n\{"created":"([0-9T:.-]{26}Z)"')
# The first match is never inside a string: in JSON a quote there has a backslash
# before it, and the quote that closes a string is not followed by a letter.
_AFTER_FACTS = re.compile(rb'\},"(args|result|at)":')

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class At(NamedTuple):
    """Where the thread stands: its version and the time of its last change."""

    version: int
    updated_at: int


class CallLine(NamedTuple):
    """What a call line says, and where in the line its args or result are."""

    facts: dict[str, Any]
    start: int
    stop: int


# Writing


def header(thread_id: str, log: str) -> bytes:
    """Return the first line; ``log`` tells this file from others of the same name."""
    return encode_json({"thread": thread_id, "log": log}, ())[:-1] + _end(None)


def created(at: At) -> bytes:
    """Return the line that comes before the first operation of a thread."""
    return b'{"created":"%b"%b' % (_iso(at.updated_at), _end(None))


def added(bodies: Sequence[bytes], items: Items, at: At) -> bytes:
    """Return the line that appends messages and merges extra, or does one of both."""
    if len(bodies) == 1 and not items:
        return b'{"add":%b%b' % (bodies[0], _end(at))

    add = b'{"add":[%b]' % b",".join(bodies)
    extra = b'"extra":{%b}' % b",".join([b"%b:%b" % item for item in items])
    add_lengths = _lengths(bodies)
    extra_lengths = _lengths([text for item in items for text in item])

    if not items:
        return b'%b,"lengths":%b%b' % (add, add_lengths, _end(at))

    if not bodies:
        return b'{%b,"lengths":%b%b' % (extra, extra_lengths, _end(at))

    lengths = b"[%b,%b]" % (add_lengths, extra_lengths)
    return b'%b,%b,"lengths":%b%b' % (add, extra, lengths, _end(at))


def issued(call: StoredCall, at: At | None) -> bytes:
    """Return the line of a claim."""
    facts = _facts(call._replace(status="issued", resolved_at=None))
    return b'{"call":%b,"args":%b%b' % (facts, _bytes(call.args), _end(at))


def resolved(call: StoredCall, at: At | None) -> bytes:
    """Return the line of an outcome; that of an erased call has no content."""
    assert call.resolved_at is not None
    facts = encode_json(
        {
            "call_id": call.call_id,
            "status": call.status,
            "resolved_at": _iso(call.resolved_at).decode(),
        },
        (),
    )

    if call.result is None:
        return b'{"call":%b%b' % (facts, _end(at))

    return b'{"call":%b,"result":%b%b' % (facts, _bytes(call.result), _end(at))


def erased(call: StoredCall, at: At | None) -> bytes:
    """Return the line of an erased call."""
    return b'{"call":%b%b' % (_facts(call), _end(at))


def _facts(call: StoredCall) -> bytes:
    facts: dict[str, object] = {
        "call_id": call.call_id,
        "tool_name": call.tool_name,
        "idempotency_key": call.idempotency_key,
        "attempt": call.attempt,
        "status": call.status,
        "issued_at": _iso(call.issued_at).decode(),
    }

    if call.resolved_at is not None:
        facts["resolved_at"] = _iso(call.resolved_at).decode()

    if call.erased:
        facts["erased"] = True

    return encode_json(facts, ())


def _end(at: At | None) -> bytes:
    if at is None:
        return b',"at":null}\n'

    return b',"at":[%d,"%b"]}\n' % (at.version, _iso(at.updated_at))


def _lengths(texts: Iterable[bytes]) -> bytes:
    return b"[%b]" % b",".join([b"%d" % len(text) for text in texts])


def _bytes(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def _iso(micros: int) -> bytes:
    return b"%b.%06dZ" % (_second(micros // 1_000_000), micros % 1_000_000)


@lru_cache(16)  # nearly always the one of the line before
def _second(seconds: int) -> bytes:
    time = _EPOCH + timedelta(seconds=seconds)
    return time.replace(tzinfo=None).isoformat().encode()  # strftime drops zeros


# Reading. Lines come without their newline; a line that cpkit would not have written
# raises ``ValueError``.


def at_end_of(line: bytes) -> At | None:
    """Return the ``at`` of a line, of which the last `TAIL_BYTES` are enough."""
    found = _AT.search(line, max(0, len(line) - TAIL_BYTES))

    if found is None:
        raise ValueError("the line has no version and time at the end")

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


def messages(line: bytes) -> tuple[list[bytes], list[tuple[bytes, bytes]], int]:
    """Return the messages and items of an ``add`` line, and the version after them."""
    stop = line.rindex(b',"at":[')
    version = int(line[stop + 7 : line.index(b",", stop + 7)])

    if not line.endswith(b'Z"]}'):
        raise ValueError("the line has no time at the end")

    # A line with ``lengths`` has its bracket here; a message that is an array may too.
    if line[stop - 1] != BRACKET:
        return [line[len(ADD) : stop]], [], version

    bodies, *extra = _texts(line, len(ADD), stop)
    return bodies, _paired(*extra) if extra else [], version


def end_of_add(version: int) -> bytes:
    """Return what follows the message in the line that makes a version."""
    return b',"at":[%d,"' % version


def pairs(line: bytes) -> list[tuple[bytes, bytes]]:
    """Return the keys and values of an ``extra`` line."""
    return _paired(_texts(line, line.index(b":") + 1, line.rindex(b',"at":['))[0])


def call_line(line: bytes) -> CallLine:
    """Take a ``call`` line apart."""
    found = _AFTER_FACTS.search(line)
    stop = line.rindex(b',"at":')

    if found is None:
        raise ValueError("a call line says nothing about its call")

    facts = parse_json(line[len(CALL) + 1 : found.start() + 1])

    for name in ("issued_at", "resolved_at"):
        if name in facts:
            facts[name] = _micros(facts[name])

    return CallLine(facts, min(found.end(), stop), stop)


def _texts(line: bytes, start: int, stop: int) -> list[list[bytes]]:
    """Divide what is between the kind and ``at`` by its ``lengths``.

    One list for a line with messages or extra, two for a line with both.
    """
    cut = line.rfind(b',"lengths":[', start, stop)
    found = _LENGTHS.fullmatch(line, cut, stop) if cut >= 0 else None

    if found is None:  # one message that is an array
        return [[line[start:stop]]]

    lengths = parse_json(found[1])
    groups = lengths if lengths and isinstance(lengths[0], list) else [lengths]
    texts: list[list[bytes]] = []
    position = start + 1

    for group in groups:
        texts.append([])

        for length in group:
            texts[-1].append(line[position : position + length])
            position += length + 1

        position += len(',"extra":{') + (not group)

    if position - len(',"extra":{') != cut:
        raise ValueError("the lengths do not fit the line")

    return texts


def _paired(texts: list[bytes]) -> list[tuple[bytes, bytes]]:
    if len(texts) % 2:
        raise ValueError("a key of extra has no value")

    return list(zip(texts[::2], texts[1::2], strict=True))


def _micros(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)
