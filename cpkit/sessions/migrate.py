"""Old versions of the session format, brought to the one of today.

Version 1 had no ids: entries followed each other, and a compaction gave the first kept
entry by its index in the file, the header being 0. Version 2 called the role of custom
messages ``hookMessage``.
"""

from __future__ import annotations

from collections.abc import Sequence

from cpkit.errors import SchemaMismatch
from cpkit.sessions.entries import VERSION, Entry

__all__ = ["migrate", "version_of"]


def version_of(header: Entry, source: str) -> int:
    """Return the header's version; raise ``SchemaMismatch`` if it is none of 1 to 3."""
    version = header.get("version", 1)

    if type(version) is not int or not 1 <= version <= VERSION:
        raise SchemaMismatch(source, version, VERSION)

    return version


def migrate(entries: Sequence[Entry]) -> list[Entry]:
    """Return copies of the entries, the header first, in version 3.

    Always the same for the same entries: an entry without an id gets its index, as
    eight hex digits, and one without a parent the entry before it as its parent. Ids
    and parents that are there stay, but for a parent that is the header, which is
    none. Order, unknown types and unknown fields are kept.

    Raises ``ValueError`` where no header comes first, and ``SchemaMismatch`` for a
    version above 3.
    """
    if not entries or entries[0].get("type") != "session":
        raise ValueError("the first entry is no session header")

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
    # By index in the file; the header's stands for the first entry.
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
    """Turn a compaction's index into an id; one that points nowhere is left there."""
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
    """Let an entry that follows the header, which is not of the tree, follow none."""
    parent = entry.get("parentId")
    return (
        entry if parent is None or parent != header_id else {**entry, "parentId": None}
    )
