"""Old versions of the format, brought to version 3."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings

from cpkit import SchemaMismatch
from cpkit.sessions import migrate
from tests.sessions.samples import VERSION_1, Entry, linear_sessions, tree_sessions


def test_version_1_gets_ids_in_order() -> None:
    """Each entry follows the one before; indices become ids, roles are renamed."""
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


def test_ids_that_exist_stay() -> None:
    """Also where one looks like those that are made here, and in a first version."""
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
def test_the_header_is_no_parent(version: int) -> None:
    """Files are about whose first entry follows the header; it follows none."""
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
    """The header is 0, and keeping it is keeping all."""
    compaction: Entry = {"type": "compaction", "firstKeptEntryIndex": index}
    header: Entry = {"type": "session", "id": "s"}
    lines = [header, {"type": "x"}, {"type": "x"}, compaction]
    assert migrate(lines)[-1]["firstKeptEntryId"] == kept


@pytest.mark.parametrize("index", [4, -1, "1", True, None])
def test_an_index_that_points_nowhere_is_left(index: object) -> None:
    """Nothing is made up, and the field is kept."""
    compaction: Entry = {"type": "compaction", "firstKeptEntryIndex": index}
    migrated = migrate([{"type": "session", "id": "s"}, compaction])[-1]
    assert migrated["firstKeptEntryIndex"] == index
    assert "firstKeptEntryId" not in migrated


def test_version_2_keeps_its_ids() -> None:
    """Only the role and the header's version change, each in its place."""
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
def test_a_header_comes_first(lines: list[Entry]) -> None:
    """Without one there is no version to migrate from."""
    with pytest.raises(ValueError, match="header"):
        migrate(lines)


def test_a_newer_version_is_refused() -> None:
    """What it means is not known here."""
    with pytest.raises(SchemaMismatch, match="upgrade"):
        migrate([{"type": "session", "id": "s", "version": 4}])


@settings(deadline=None)
@given(lines=linear_sessions() | tree_sessions(2) | tree_sessions())
def test_migration_keeps_what_it_does_not_know(lines: list[Entry]) -> None:
    """Order, types, unknown fields; it is repeatable, and leaves its input alone."""
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


@settings(deadline=None)
@given(lines=linear_sessions())
def test_a_longer_file_migrates_to_the_same_beginning(lines: list[Entry]) -> None:
    """So that an old session can be imported again when it has grown."""
    migrated = migrate(lines)

    for length in range(1, len(lines)):
        shorter = [entry["id"] for entry in migrate(lines[:length])[1:]]
        assert shorter == [entry["id"] for entry in migrated[1:length]]
