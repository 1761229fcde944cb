"""The lines of a thread's log and of a register of keys: written, sealed, taken apart.

A line is one operation, so it is in the file wholly or not at all::

    {"thread":"user-42","created":1763696045123456,"at":[null,"1c291ca3"]}
    {"add":{"role":"user"},"at":[1,1763696045123456,71,"b2d4dd26"]}
    {"add":[⇥{"n":1}⇥,⇥{"n":2}⇥],"at":[3,1763696046000001,"f1f0a7b3"]}
    {"add":[⇥{}⇥],"extra":{⇥"n"⇥:⇥1⇥},"at":[4,…]}
    {"extra":{⇥"plan"⇥:⇥null⇥},"at":[4,1763696047000001,"42d3b6e5"]}
    {"call":⇥{"call_id":"c1",…,"status":"issued"}⇥,"args":⇥{}⇥,"at":[4,…]}
    {"call":⇥{"call_id":"c1","status":"completed",…}⇥,"result":⇥{"ok":true}⇥,"at":[4,…]}

and in a register::

    {"key":"order 7","attempt":1,"thread":"user-42","call":"c1","at":[null,"0ab5f0e1"]}

The first line of a log that was trimmed has ``"trimmed":120``, the position of the
first message left.

The kind comes first. Times are microseconds since 1970, UTC. JSON texts are between
tabs (⇥), unless a line has one message alone: a JSON text without white space has no
tab. ``at`` comes last, with two to four values:

- the thread's version after the line and the time of its last change, or ``null`` while
  the log holds no thread: in its first line, and after ``delete_thread``, which leaves
  a ``call`` line with ``"erased":true`` for each call. A thread that begins behind such
  lines has a first line of its own;
- the number of bytes before the line that were written together with it, if any. A
  power loss can damage only the bytes of the last write;
- the *seal*: a checksum of all bytes of the file before it (CRC-32). So a block of
  lines is checked by the seal of its last line and that of the line before the block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias
from zlib import crc32

from pydantic_core import to_json

from cpkit.driver import StoredCall

HEAD, CALL, KEY = b'{"thread":', b'{"call":', b'{"key":'
ADD, EXTRA, ARGS, RESULT = b'{"add":', b'"extra":{', b',"args":', b',"result":'
SEAL = len('01234567"]}\n')
"""The number of bytes of a seal, with all that follows it in the line."""

Line: TypeAlias = tuple[bytes, int, int]
"""A line up to ``at``, and the version and the time there; no thread has the time 0."""

_AT = b',"at":['
_END = re.compile(
    rb',"at":\[(?:null|(\d{1,19}),(\d{1,19}))(?:,(\d{1,19}))?,"[0-9a-f]{8}"\]\}\n\Z'
)
_FACTS = {*StoredCall._fields} - {"thread_id", "args", "result"}
_OUTCOME = {"call_id", "status", "resolved_at"}


# Writing


def sealed(seal: bytes, added: Sequence[Line], *, together: bool = True) -> bytes:
    """Return lines for the end of a file, whose last line has this seal.

    ``together``: as one write, which a power loss can tear. Else the file is synced
    before it is in use.
    """
    texts: list[bytes] = []
    size = 0

    for content, version, updated_at in added:
        end = b"%d,%d" % (version, updated_at) if updated_at else b"null"
        before = b",%d" % size if size and together else b""
        text = b'%b,"at":[%b%b,"' % (content, end, before)
        seal = b'%08x"]}\n' % crc32(text, _sum_after(seal))
        texts += text, seal
        size += len(text) + SEAL

    return b"".join(texts)


def header(thread_id: str, created_at: int | None, trimmed: int = 0) -> Line:
    """Return the first line of a log."""
    facts = {"thread": thread_id, "created": created_at, "trimmed": trimmed}
    return to_json({name: one for name, one in facts.items() if one})[:-1], 0, 0


def added(bodies: Sequence[bytes], items: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the line that appends messages, merges extra, or does both."""
    if bodies and not items and not bodies[1:]:
        return ADD + bodies[0]

    texts = b"\t,\t".join([b"%b\t:\t%b" % item for item in items])
    extra = b"%b\t%b\t}" % (EXTRA, texts) if items else EXTRA + b"}"

    if not bodies:
        return b"{" + extra

    messages = b"%b[\t%b\t]" % (ADD, b"\t,\t".join(bodies))
    return b"%b,%b" % (messages, extra) if items else messages


def claimed(call: StoredCall) -> Line:
    """Return the line of a register: this call claims its key."""
    facts = {"key": call.idempotency_key, "attempt": call.attempt}
    facts |= {"thread": call.thread_id, "call": call.call_id}
    return to_json(facts)[:-1], 0, 0


def recorded(call: StoredCall, *, resolves: bool = False) -> bytes:
    """Return the line that puts a call on record, or that ``resolves`` it."""
    names = _OUTCOME if resolves else _FACTS
    columns = zip(StoredCall._fields, call, strict=True)
    facts = {name: one for name, one in columns if name in names and one}
    line = b"%b\t%b\t" % (CALL, to_json(facts))
    args = None if resolves or call.erased else call.args

    for name, text in ((ARGS, args), (RESULT, call.result)):
        if isinstance(text, bytes):
            line += b"%b\t%b\t" % (name, text)

    return line


# Reading


def _sum_after(seal: bytes) -> int:
    """Return the checksum of all bytes up to the end of the line with this seal."""
    return crc32(seal, int(seal[:8], 16)) if seal else 0


def fits(seal: bytes, data: bytes) -> bool:
    """Return whether whole lines continue the line with this seal."""
    try:
        checksum = crc32(memoryview(data)[:-SEAL], _sum_after(seal))
        return data[-SEAL:] == b'%08x"]}\n' % checksum
    except ValueError:
        return False


def intact(seal: bytes, data: bytes) -> int:
    """Return how many bytes of lines continue the line with this seal."""
    start = 0

    while (stop := data.find(b"\n", start) + 1) and fits(seal, data[start:stop]):
        seal, start = data[stop - SEAL : stop], stop

    return start


def end_of(line: bytes) -> tuple[int, int, int] | None:
    """Return what the end of a line says: version, time, and bytes before the line."""
    if found := _END.search(line, max(0, len(line) - 96)):
        version, time, together = (int(one or 0) for one in found.groups())
        return version, time, together

    return None


def take_apart(block: bytes) -> tuple[list[bytes], list[tuple[int, list[bytes]]]]:
    """Return the messages in whole lines, and the other lines with their offsets.

    The others are split at their tabs: each second part is a JSON text.
    """
    bodies: list[bytes] = []
    others: list[tuple[int, list[bytes]]] = []
    start = 0

    for line in block.splitlines(keepends=True):
        if line[: len(ADD)] == ADD and b"\t" not in line:
            bodies.append(line[len(ADD) : line.rfind(_AT)])
        else:
            others.append((start, parts := line.split(b"\t")))

            if parts[0] == ADD + b"[":
                stop = next(n for n, part in enumerate(parts) if part[:1] == b"]")
                bodies += parts[1:stop:2]

        start += len(line)

    return bodies, others
