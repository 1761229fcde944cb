"""Migration of versions 1 and 2 of the format to version 3."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings

from cpkit import SchemaMismatch
from cpkit.sessions import migrate
from tests.sessions.samples import VERSION_1, Entry, linear_sessions, tree_sessions


def test_version_1_gets_ids_in_order() -> None:
    """Parents, kept entries and roles are converted too."""
    header, *entries = migrate(VERSION_1)
    assert header == {**VERSION_1[0], "version": 3}
    assert list(header) == ["type", "version", "id", "timestamp"]
    ids = [entry["id"] for entry in entries]
    assert ids == [f"{n:08x}" for n in range(1, 7)]
    assert [entry["parentId"] for entry in entries] == [None, *ids[:-1]]
    assert entries[4] == {
        "type": "compaction",
        "id": ids[4],
        "parentId": ids[3],
        "summary": "a was said",
        "firstKeptEntryId": ids[3],
        "tokensBefore": 100,
    }
    assert entries[5]["message"] == {"role": "custom", "content": "c"}
    assert list(entries[0]) == ["type", "id", "parentId", "message"]


def test_existing_ids_stay() -> None:
    """A new id avoids an existing one, and a version 1 file may have ids."""
    lines = [
        {"type": "session", "id": "s"},
        {"type": "x", "id": "00000002"},
        {"type": "x"},
        {"type": "x", "id": "mine", "parentId": "00000002"},
        {"type": "x"},
    ]
    entries = migrate(lines)[1:]
    ids = [entry["id"] for entry in entries]
    assert ids == ["00000002", "000000020", "mine", "00000004"]
    parents = [entry["parentId"] for entry in entries]
    assert parents == [None, "00000002", "00000002", "mine"]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_parent_that_is_the_header_becomes_none(version: int) -> None:
    """Some files have a first entry that follows the header."""
    lines: list[Entry] = [
        {"type": "session", "version": version, "id": "s"},
        {"type": "x", "id": "a", "parentId": "s"},
        {"type": "x", "id": "b", "parentId": "a"},
    ]
    entries = migrate(lines)[1:]
    assert [entry["parentId"] for entry in entries] == [None, "a"]


@pytest.mark.parametrize(
    ("index", "kept"), [(0, "00000001"), (1, "00000001"), (2, "00000002")]
)
def test_an_index_becomes_an_id(index: int, kept: str) -> None:
    """Index 0, the header, becomes the first entry."""
    compaction: Entry = {"type": "compaction", "firstKeptEntryIndex": index}
    header: Entry = {"type": "session", "id": "s"}
    lines = [header, {"type": "x"}, {"type": "x"}, compaction]
    assert migrate(lines)[-1]["firstKeptEntryId"] == kept


@pytest.mark.parametrize("index", [4, -1, "1", True, None])
def test_an_unknown_index_stays(index: object) -> None:
    """The compaction gets no id."""
    compaction: Entry = {"type": "compaction", "firstKeptEntryIndex": index}
    migrated = migrate([{"type": "session", "id": "s"}, compaction])[-1]
    assert migrated["firstKeptEntryIndex"] == index
    assert "firstKeptEntryId" not in migrated


def test_version_2_keeps_its_ids() -> None:
    """Only the role and the header's version change."""
    lines: list[Entry] = [
        {"version": 2, "type": "session", "id": "s"},
        {"message": {"role": "hookMessage"}, "type": "message", "id": "a"},
        {"type": "compaction", "id": "b", "firstKeptEntryIndex": 1},
    ]
    header, message, compaction = migrate(lines)
    assert list(header.items()) == [("version", 3), ("type", "session"), ("id", "s")]
    assert message == {"message": {"role": "custom"}, "type": "message", "id": "a"}
    assert compaction == lines[2]


@pytest.mark.parametrize("lines", [[], [{"type": "message"}], [{}]])
def test_entries_without_a_header_are_refused(lines: list[Entry]) -> None:
    """They have no version to migrate from."""
    with pytest.raises(ValueError, match="header"):
        migrate(lines)


def test_a_newer_version_is_refused() -> None:
    """It raises SchemaMismatch."""
    with pytest.raises(SchemaMismatch, match="upgrade"):
        migrate([{"type": "session", "id": "s", "version": 4}])


@settings(max_examples=25)
@given(lines=linear_sessions() | tree_sessions(2) | tree_sessions())
def test_migration_keeps_unknown_types_and_fields(lines: list[Entry]) -> None:
    """It is deterministic and idempotent, and does not change its input."""
    given_lines = copy.deepcopy(lines)
    migrated = migrate(lines)
    assert lines == given_lines
    assert migrated == migrate(lines) == migrate(migrated)
    assert len(migrated) == len(lines)

    ids = [entry["id"] for entry in migrated[1:]]
    assert len(set(ids)) == len(ids)
    changed = {"id", "parentId", "version", "message"}
    changed |= {"firstKeptEntryIndex", "firstKeptEntryId"}

    for old, new in zip(lines, migrated, strict=True):
        for name in old.keys() - changed:
            assert old[name] == new[name]

        assert new.keys() - old.keys() <= changed


@pytest.mark.long
@settings(max_examples=25)
@given(lines=linear_sessions())
def test_the_entries_of_a_grown_file_get_the_same_ids(lines: list[Entry]) -> None:
    """So a repeated import finds the entries that it wrote before."""
    migrated = migrate(lines)

    for length in range(1, len(lines)):
        shorter = [entry["id"] for entry in migrate(lines[:length])[1:]]
        assert shorter == [entry["id"] for entry in migrated[1:length]]
