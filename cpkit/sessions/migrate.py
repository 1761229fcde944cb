"""Migration of session files from versions 1 and 2 of the format to version 3.

Version 1 had no ids: each entry followed the one before it, and a compaction named the
first kept entry by its index in the file, where the header has index 0. Version 2
called the role of custom messages ``hookMessage``.
"""

from __future__ import annotations

from collections.abc import Sequence

from cpkit.errors import SchemaMismatch
from cpkit.sessions.entries import VERSION, Entry

__all__ = ["migrate", "version_of"]


def version_of(header: Entry, source: str) -> int:
    """Return the header's version; raise ``SchemaMismatch`` if it is not 1, 2 or 3."""
    version = header.get("version", 1)

    if type(version) is not int or not 1 <= version <= VERSION:
        raise SchemaMismatch(source, version, VERSION)

    return version


def migrate(entries: Sequence[Entry]) -> list[Entry]:
    """Return copies of the entries, the header first, in version 3.

    The result depends on the entries alone. An entry without an id gets its index, as
    eight hex digits, and an entry without a parent gets the entry before it. Existing
    ids and parents stay, except that a parent which is the header becomes ``None``.
    Order, unknown types and unknown fields are kept.

    Raises ``ValueError`` if the first entry is not a header, and ``SchemaMismatch`` for
    a version above 3.
    """
    if not entries or entries[0].get("type") != "session":
        raise ValueError("the first entry is not a session header")

    header = entries[0]
    version = version_of(header, f"session {header.get('id')!r}")
    migrated = list(entries[1:])

    if version < 2:
        migrated = _with_ids(migrated)

    if version < 3:
        header = _with_version(header)
        migrated = [_with_role(entry) for entry in migrated]

    return [header, *(_without_header(entry, header.get("id")) for entry in migrated)]


def _with_version(header: Entry) -> Entry:
    if "version" in header:
        return {**header, "version": VERSION}

    return {"type": header["type"], "version": VERSION, **header}


def _with_ids(entries: Sequence[Entry]) -> list[Entry]:
    taken = {entry["id"] for entry in entries if "id" in entry}
    # By index in the file; index 0, the header, is set to the first entry below.
    ids: list[str | None] = [None]

    for index, entry in enumerate(entries, 1):
        ids.append(entry["id"] if "id" in entry else _free(f"{index:08x}", taken))

    ids[0] = ids[1] if len(ids) > 1 else None
    linked = []

    for index, entry in enumerate(entries, 1):
        parent = ids[index - 1] if index > 1 else None
        link = {"id": ids[index], "parentId": parent}
        linked.append(_with_kept_id({"type": entry["type"], **link, **entry}, ids))

    return linked


def _free(entry_id: str, taken: set[str]) -> str:
    while entry_id in taken:
        entry_id += "0"

    taken.add(entry_id)
    return entry_id


def _with_kept_id(entry: Entry, ids: Sequence[str | None]) -> Entry:
    """Replace a compaction's index by an id, unless no entry has that index."""
    index = entry.get("firstKeptEntryIndex")

    if (
        entry["type"] != "compaction"
        or "firstKeptEntryId" in entry
        or type(index) is not int
        or not 0 <= index < len(ids)
    ):
        return entry

    return {
        ("firstKeptEntryId" if name == "firstKeptEntryIndex" else name): (
            ids[index] if name == "firstKeptEntryIndex" else value
        )
        for name, value in entry.items()
    }


def _with_role(entry: Entry) -> Entry:
    message = entry.get("message")

    if (
        entry["type"] != "message"
        or not isinstance(message, dict)
        or message.get("role") != "hookMessage"
    ):
        return entry

    return {**entry, "message": {**message, "role": "custom"}}


def _without_header(entry: Entry, header_id: object) -> Entry:
    """Replace a parent that is the header, which is not in the tree, by ``None``."""
    parent = entry.get("parentId")
    return (
        entry if parent is None or parent != header_id else {**entry, "parentId": None}
    )
