"""The lines of a log: written, sealed with a checksum, and taken apart.

A line is one operation, so it is in the log wholly or not at all::

    {"thread":"user-42","log":"9f86d081884c7d65","at":[null,"iNp1Gw"]}
    {"created":1763696045123456,"at":[null,67,"7ZdDlA"]}
    {"add":{"role":"user"},"at":[1,1763696045123456,121,"pU4Zbw"]}
    {"add":[⇥{"n":1},⇥{"n":2}⇥],"at":[3,1763696046000001,"R1/d5A"]}
    {"extra":{⇥"plan":⇥null⇥},"at":[3,1763696047000001,"9Q0qMg"]}
    {"add":[⇥{}⇥],"extra":{⇥"n":⇥1⇥},"at":[4,…]}
    {"call":{"call_id":"c1",…,"status":"issued"},"args":{},"at":[4,…]}
    {"call":{"call_id":"c1","status":"completed",…},"result":{"ok":true},"at":[4,…]}

The kind comes first. Times are microseconds since 1970, UTC. Where a line holds several
JSON texts, tabs (⇥) are around them: a JSON text without white space has none. ``at``
comes last, with two to four values:

- the thread's version after the line and the time of its last change, or ``null`` while
  the log holds no thread: in its first two lines, and after ``delete_thread``, which
  leaves a ``call`` line with ``"erased":true`` for each call;
- the number of bytes before the line that were perhaps not on disk when it was written,
  if any. The last line of a log that replaced another one has 0 here: its bytes were on
  disk when the log got its name, but perhaps not the name;
- a checksum of all bytes of the log before it (CRC-32 in Base64).

Each checksum continues the one before. So a block of lines is checked by the checksum
of its last line, and a line by its own checksum and that of the line before. No line
can change, disappear or move without notice. The number of bytes tells damage from torn
writes: a power loss can damage only bytes that were not on disk.

The framing of one message is 44 to 48 bytes: less than 5 % of a message of 1 kB.
"""

from __future__ import annotations

import json
import re
import secrets
from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from zlib import crc32

from cpkit.driver import StoredCall
from cpkit.driver.jsontext import encode_json, parse_json

ADD = b'{"add":'
CALL = b'{"call":'
AT = b',"at":['
TAB = ord("\t")
"""The second byte before `AT`, in a line with several texts and in no other line."""
SEAL_LENGTH = len('CCCCCC"]}\n')
"""The number of bytes of a line's *seal*: its checksum and what follows it."""
NAME_UNSYNCED = 0
"""``End.unsynced`` of the last line of a replacement: its name may not be on disk."""
LONGEST_END = 96
"""An upper bound for the bytes of a line from `AT` on."""

_HEAD = b'{"thread":'
_LINE_END = re.compile(
    rb',"at":\[(?:null|(\d{1,19}),(-?\d{1,19}))(?:,(\d{1,19}))?,"[\w+/]{6}"\]\}\n\Z'
)
_SEALED = re.compile(rb'"[\w+/]{6}"\]\}')
_CREATED = re.compile(rb'\n\{"created":(-?\d{1,19}),')
# The first match is never inside a string: a quote inside one has a backslash before
# it, and the quote that closes one is not followed by a letter.
_AFTER_FACTS = re.compile(rb'\},"(args|result|at)":')

_FACTS = [n for n in StoredCall._fields if n not in ("thread_id", "args", "result")]

# A hole is a sector that did not reach the disk. It is seen as a run of zeros, at least
# this long. A shorter run is a hole only if the file ends with it, or if it goes from
# the start of the line to the end of a sector. Any other run is damage.
_HOLE = 16
_SECTOR = 512


class At(NamedTuple):
    """A thread's version and the time of its last change, after a line."""

    version: int
    updated_at: int


class End(NamedTuple):
    """What the end of a line says; ``unsynced`` counts bytes before the line."""

    at: At | None
    unsynced: int | None


# Writing. Except for `header`, these return a line without its ``at`` and its closing
# brace, which `seal` adds.


def header(thread_id: str) -> bytes:
    """Return the whole first line.

    Its random word distinguishes the file from earlier and later files of this name.
    """
    log = secrets.token_hex(8)
    return seal(b"", encode_json({"thread": thread_id, "log": log}, ())[:-1], None)


def created(micros: int) -> bytes:
    """Return the line that comes before the first operation of a thread.

    A kill can leave it without the operation. The next operation then writes another
    ``created`` line, and the last one counts.
    """
    return b'{"created":%d' % micros


def added(bodies: Sequence[bytes], items: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the line that appends messages, merges extra, or does both."""
    if len(bodies) == 1 and not items:
        return ADD + bodies[0]

    parts = []

    if bodies:
        parts.append(b'"add":[\t%b\t]' % b",\t".join(bodies))

    if items or not bodies:
        texts = b",\t".join([b"%b:\t%b" % item for item in items])
        parts.append(b'"extra":{\t%b\t}' % texts)

    return b"{" + b",".join(parts)


def issued(call: StoredCall) -> bytes:
    """Return the line of a claim."""
    facts = _facts(call._replace(status="issued", resolved_at=None))
    return b'{"call":%b,"args":%b' % (facts, _bytes(call.args))


def resolved(call: StoredCall) -> bytes:
    """Return the line of an outcome; without a result for an erased call."""
    facts = _facts(call, "call_id", "status", "resolved_at")
    result = b"" if call.result is None else b',"result":%b' % _bytes(call.result)
    return b'{"call":%b%b' % (facts, result)


def recorded(calls: Iterable[StoredCall]) -> Iterator[bytes]:
    """Yield the lines that put calls on record with the status that they have."""
    for call in calls:
        if call.erased:
            yield b'{"call":%b' % _facts(call)
        else:
            yield issued(call)

            if call.status != "issued":
                yield resolved(call)


def seal(
    before: bytes, content: bytes, at: At | None, unsynced: int | None = None
) -> bytes:
    """Return the whole line; ``before`` is the seal of the line before it."""
    end = b"null" if at is None else b"%d,%d" % at
    more = b"" if unsynced is None else b",%d" % unsynced
    line = b'%b,"at":[%b%b,"' % (content, end, more)
    return b'%b%b"]}\n' % (line, _checksum(before, line))


def _facts(call: StoredCall, *names: str) -> bytes:
    """Return these columns of a call, or all but its thread and content."""
    facts = {name: getattr(call, name) for name in names or _FACTS}
    known = {n: f for n, f in facts.items() if f is not None and f is not False}
    return encode_json(known, ())


def _bytes(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def _checksum(before: bytes, data: bytes | memoryview) -> bytes:
    """Continue the chain from a line's seal over the bytes that follow it."""
    return _as_text(crc32(data, _checksum_after(before)))


def _checksum_after(before: bytes) -> int:
    """Return the checksum of all bytes up to the end of the line with this seal."""
    if not before:
        return 0

    return crc32(before, int.from_bytes(a2b_base64(before[:6] + b"=="), "big"))


def _as_text(checksum: int) -> bytes:
    return b2a_base64(checksum.to_bytes(4, "big"))[:6]


# Reading


def follows(before: bytes, data: bytes) -> bool:
    """Return whether these lines continue the checksum of the line with this seal."""
    try:
        expected = _checksum(before, memoryview(data)[:-SEAL_LENGTH])
    except Error:
        return False

    return data[-SEAL_LENGTH:] == expected + b'"]}\n'


def first_broken(before: bytes, data: bytes) -> int:
    """Return the offset of the first line that does not continue the checksums."""
    start = 0

    while (stop := data.find(b"\n", start) + 1) and follows(before, data[start:stop]):
        before, start = data[stop - SEAL_LENGTH : stop], stop

    return start


def is_torn(before: bytes, rest: bytes, offset: int) -> bool:
    """Return whether a power loss or a kill can have left ``rest`` after good lines.

    That is a line that is cut short, or a line with a hole. Anything else is damage.
    """
    line, newline, others = rest.partition(b"\n")
    distance = len(line) + 1

    # A later line says how many bytes before it were perhaps not on disk. If fewer than
    # are between the two, the broken line was on disk.
    for other in others.splitlines(keepends=True):
        with suppress(ValueError):
            if (end_of(other).unsynced or 0) < distance:
                return False

        distance += len(other)

    for zeros in re.finditer(rb"\0+", line):
        start, stop = zeros.span()
        at_end = stop == len(line) and not newline
        fills_sector = start == 0 and (offset + stop) % _SECTOR == 0

        if stop - start >= _HOLE or at_end or fills_sector:
            return True

    # Another program's file is not a torn first write.
    is_log = offset > 0 or line.startswith(_HEAD) or _HEAD.startswith(line)
    return not newline and is_log and not _has_damaged_newline(before, line)


def _has_damaged_newline(before: bytes, text: bytes) -> bool:
    """Return whether the text starts with a whole line whose newline was changed.

    A message can look like the end of a line in many places. So the checksum continues
    from each place to the next, and reads each byte once.
    """
    done, checksum = 0, _checksum_after(before)

    for found in _SEALED.finditer(text):
        start = found.start() + 1
        checksum = crc32(memoryview(text)[done:start], checksum)
        done = start

        if found.end() < len(text) and found[0][1:7] == _as_text(checksum):
            return True

    return False


def end_of(line: bytes) -> End:
    """Return what the end of a line says; the line has its newline.

    Raises ``ValueError`` if cpkit does not write such a line.
    """
    found = _LINE_END.search(line, max(0, len(line) - LONGEST_END))

    if found is None:
        raise ValueError("the line does not end with a version, a time and a checksum")

    version, time, unsynced = found.groups()
    at = None if version is None else At(int(version), int(time))
    return End(at, None if unsynced is None else int(unsynced))


def thread_of(head: bytes) -> str:
    """Return the thread id in a log's first line; what follows it may be damaged.

    Raises ``ValueError`` if no id can be read.
    """
    found, _ = json.JSONDecoder().raw_decode(head.decode(errors="replace"), len(_HEAD))

    if not isinstance(found, str):
        raise ValueError("the first line has no thread id")

    found.encode()  # raises for half of a surrogate pair
    return found


def created_in(head: bytes) -> int | None:
    """Return the time in the last ``created`` line, if there is one."""
    found = _CREATED.findall(head)
    return int(found[-1]) if found else None


def texts(line: bytes) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """Return the messages, and the items of extra, of a line with tabs."""
    items = [item.partition(b":\t") for item in _parts(line, b'"extra":{\t', b"\t}")]
    bodies = _parts(line, b'"add":[\t', b"\t]")
    return bodies, [(key, value) for key, _, value in items]


def _parts(line: bytes, before: bytes, after: bytes) -> list[bytes]:
    text = line.partition(before)[2].partition(after)[0]
    return text.split(b",\t") if text else []


def call_line(line: bytes) -> tuple[dict[str, Any], int, int]:
    """Return the facts of a ``call`` line, and the span of its args or result.

    The span of a line without args and result is empty.
    """
    found = _AFTER_FACTS.search(line)
    assert found is not None
    stop = line.rindex(AT)
    facts = parse_json(line[len(CALL) : found.start() + 1])
    return facts, min(found.end(), stop), stop
