"""Session files: one JSON object on each line, the header first.

Files are written as JavaScript's ``JSON.stringify`` writes them: keys in their order,
no spaces, numbers in ECMAScript's form, only lone surrogates as escapes. So a file from
JavaScript is exported byte for byte as it was imported. Python's numbers are kept too:
a whole float stays ``1.0``, and an integer of any size stays exact. A high surrogate
followed by a low one is one character, as in JavaScript.
"""

from __future__ import annotations

import json
import os
import tempfile
from codecs import BOM_UTF8
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cpkit.canonical import canonical_json
from cpkit.driver.jsontext import encode_json
from cpkit.errors import CorruptThread, SerializationError
from cpkit.foreign_json import encode_text, parse_foreign_json
from cpkit.sessions.entries import Entry, flaw
from cpkit.sessions.migrate import version_of

__all__ = ["SessionFile", "SkippedLine", "json_line", "read_jsonl", "write_jsonl"]

MISSING = "cpkit:missing"
"""The type of custom entries in the place of lines that are not entries."""

_json_string = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class SkippedLine:
    """A line that is not an entry: its number in the file, from 1, and the reason.

    ``is_torn`` if it is the last line and its writer did not finish it.
    """

    number: int
    reason: str
    is_torn: bool = False

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


@dataclass(frozen=True)
class SessionFile:
    """A session file as it was read, in its own version of the format.

    ``lines`` are the header and the entries. ``skipped`` are all other lines. A last
    line that its writer did not finish is skipped too, and is not an error.
    """

    name: str
    lines: list[Entry]
    skipped: list[SkippedLine]


def read_jsonl(
    path: str | os.PathLike[str],
    on_corrupt: Literal["raise", "skip", "replace"] = "raise",
) -> SessionFile:
    """Read a session file of any version; `migrate` converts it to version 3.

    Empty lines and a byte order mark are ignored. A last line without a newline that
    does not parse is skipped. Any other line that is not an entry is skipped or raises
    ``CorruptThread`` with its number, as ``on_corrupt`` says. With ``"replace"`` it is
    skipped too, and a custom entry in its place says what is missing; later entries
    that followed it follow that one. A missing header always raises ``CorruptThread``.

    Raises ``SchemaMismatch`` for a version above 3, and ``OSError`` as `open` does. It
    blocks: in an event loop, call it through `asyncio.to_thread`.
    """
    if on_corrupt not in ("raise", "skip", "replace"):
        raise ValueError(
            f"on_corrupt is 'raise', 'skip' or 'replace', not {on_corrupt!r}"
        )

    name = os.fspath(path)
    texts = Path(path).read_bytes().removeprefix(BOM_UTF8).split(b"\n")
    lines: list[Entry] = []
    skipped: list[SkippedLine] = []
    seen: set[str] = set()

    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue

        line, reason = _parsed(text)

        if reason is not None and number == len(texts):
            skipped.append(SkippedLine(number, f"torn: {reason}", is_torn=True))
            continue

        if reason is None:
            reason = _flaw_in_file(line, lines, seen)

        if reason is None:
            lines.append(line)
            continue

        if on_corrupt == "raise" or not lines:
            raise CorruptThread(
                lines[0]["id"] if lines else "", f"{name}, line {number}", reason
            )

        skipped.append(SkippedLine(number, reason))

        if on_corrupt == "replace":
            lines.append(_missing(number, reason))

    if not lines:
        raise CorruptThread("", name, "no session header")

    if on_corrupt == "replace":
        _link_missing(lines)

    return SessionFile(name, lines, skipped)


def _missing(number: int, reason: str) -> Entry:
    """Return an entry in the place of a line; it has no id and no parent yet."""
    data = {"line": number, "reason": reason}
    return {"type": "custom", "customType": MISSING, "data": data}


def _link_missing(lines: list[Entry]) -> None:
    """Give the entries for lost lines the ids that later entries name as their parent.

    The same file always gives the same ids. Entries of version 1 have none; `migrate`
    gives them some.
    """
    if version_of(lines[0], "") < 2:
        return

    pairs = zip(lines[1:], lines, strict=False)
    replaced = [(line, before) for line, before in pairs if "id" not in line]
    ids = {line["id"] for line in lines if "id" in line}
    lost: list[Entry] = []

    for line in lines[1:]:
        parent = line.get("parentId")

        if "id" not in line:
            lost.append(line)
        elif lost and isinstance(parent, str) and parent and parent not in ids:
            _give_id(lost.pop(), parent, ids)

    for line in lost:
        _give_id(line, f"{line['data']['line']:08x}", ids)

    for line, before in replaced:
        line["parentId"] = None if before is lines[0] else before["id"]
        line["timestamp"] = before.get("timestamp")


def _give_id(line: Entry, entry_id: str, ids: set[str]) -> None:
    while entry_id in ids:
        entry_id += "0"

    ids.add(entry_id)
    line["id"] = entry_id


def write_jsonl(path: str | os.PathLike[str], lines: Iterable[Entry]) -> None:
    """Write a session file completely or not at all.

    Only the owner may read the file. It is synced before it replaces an existing file.
    """
    target = Path(path)
    handle, draft = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)

    try:
        with open(handle, "wb") as file:
            file.writelines(encode_text(json_line(line) + "\n") for line in lines)
            file.flush()
            os.fsync(file.fileno())

        os.replace(draft, target)
    except BaseException:
        os.unlink(draft)
        raise


def json_line(value: Any) -> str:
    """Return the text of a JSON value as ``JSON.stringify`` writes it.

    A surrogate stays as it is in the text; `encode_text` writes it as an escape.
    """
    if isinstance(value, dict):
        members = (f"{_json_string(n)}:{json_line(v)}" for n, v in value.items())
        return "{" + ",".join(members) + "}"

    if isinstance(value, list):
        return "[" + ",".join(map(json_line, value)) + "]"

    # The canonical form writes 1.0 as 1, which is read as an integer, and -0.0 as 0.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return f"{value:.1f}"

    return canonical_json(value)


def _parsed(text: bytes) -> tuple[Any, str | None]:
    """Return the line's value, or the reason why it cannot be stored."""
    try:
        line = parse_foreign_json(text)
        encode_json(line, ())
    except (ValueError, SerializationError) as exc:
        return None, f"not JSON that can be stored: {exc}"

    return line, None


def _flaw_in_file(line: Any, before: list[Entry], seen: set[str]) -> str | None:
    """Return why the line is not the next line of a session; remember its id."""
    reason = flaw(line)

    if reason is not None:
        return reason

    if not before:
        return _flaw_in_header(line)

    if line["type"] == "session":
        return "a second session header"

    entry_id = line.get("id")

    if entry_id is None and "id" not in line and version_of(before[0], "") < 2:
        return None

    if not isinstance(entry_id, str) or not entry_id:
        return "no id"

    if entry_id in seen:
        return f"a second entry {entry_id!r}"

    seen.add(entry_id)
    return None


def _flaw_in_header(line: Entry) -> str | None:
    if line["type"] != "session":
        return "no session header"

    if not isinstance(line.get("id"), str) or not line["id"]:
        return "a session header without an id"

    version_of(line, f"session {line['id']!r}")
    return None
