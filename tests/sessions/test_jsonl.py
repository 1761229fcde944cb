"""Session files: reading, checks and writing."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit import CorruptThread, SchemaMismatch, VersionConflict, open_checkpointer
from cpkit.sessions import SessionLog, SkippedLine, migrate, read_jsonl
from cpkit.sessions.jsonl import json_line, write_jsonl
from tests.sessions.conftest import Store
from tests.sessions.samples import (
    VERSION_1,
    Entry,
    as_file,
    json_values,
    linear_sessions,
    tree_sessions,
)
from tests.sessions.talk import texts, user

HEADER: Entry = {"type": "session", "version": 3, "id": "s-1"}
ENTRY: Entry = {"type": "message", "id": "a", "parentId": None, "message": user("a")}
NEXT: Entry = {"type": "message", "id": "b", "parentId": "a", "message": user("b")}


@settings(max_examples=25)
@given(lines=tree_sessions() | linear_sessions())
async def test_an_exported_file_imports_to_the_same_session(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Entry]
) -> None:
    """Entries, order, unknown types and fields, and bytes are kept."""
    folder = tmp_path_factory.mktemp("round")
    await asyncio.to_thread(write_jsonl, folder / "first.jsonl", lines)
    file = await asyncio.to_thread(read_jsonl, folder / "first.jsonl")
    assert file.lines == lines

    async with open_checkpointer("memory://") as cp:
        log = await SessionLog.import_jsonl(cp, folder / "first.jsonl", session_id="a")
        assert [log.header, *log.entries] == migrate(lines)
        await log.export_jsonl(folder / "second.jsonl")
        again = await SessionLog.import_jsonl(
            cp, folder / "second.jsonl", session_id="b"
        )
        await again.export_jsonl(folder / "third.jsonl")

    second = (folder / "second.jsonl").read_bytes()
    assert second == (folder / "third.jsonl").read_bytes()
    assert log.context() == again.context()

    if lines[0].get("version") == 3:
        assert second == (folder / "first.jsonl").read_bytes()


@given(value=json_values)
def test_a_value_is_read_back_with_its_types(value: Any) -> None:
    """A line without newlines holds any JSON value."""
    line = json_line(value)
    assert "\n" not in line
    assert repr(json.loads(line)) == repr(value)


@pytest.mark.parametrize(
    "line",
    [
        '{"a":0.000009,"b":1e-7,"c":123456789012345680000,"d":1e+21,"e":-1.5}',
        '{"text":"é😀\u2028\\u0000\\u001f\\"\\\\/\x7f\\n","empty":[{},[],""],"n":null}',
        '{"2":true,"1":false}',
    ],
)
def test_a_line_of_javascript_is_written_byte_for_byte(line: str) -> None:
    """The output equals that of JSON.stringify."""
    assert json_line(json.loads(line)) == line


def test_a_number_keeps_its_type() -> None:
    """Whole floats and long integers, which JavaScript lacks, are kept."""
    assert json_line([1.0, -0.0, 1, 2**70]) == f"[1.0,-0.0,1,{2**70}]"


def test_empty_lines_are_ignored(tmp_path: Path) -> None:
    """Carriage returns at line ends are ignored too."""
    path = as_file(tmp_path, [HEADER, "", json.dumps(ENTRY) + "\r", "  ", NEXT])
    file = read_jsonl(path)
    assert (file.lines, file.skipped) == ([HEADER, ENTRY, NEXT], [])
    assert file.name == str(path)


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    """Some editors write one at the start of a file."""
    path = as_file(tmp_path, [HEADER, ENTRY])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_jsonl(path).lines == [HEADER, ENTRY]


def test_the_last_newline_may_be_missing(tmp_path: Path) -> None:
    """A complete last line without a newline is read."""
    path = as_file(tmp_path, [HEADER, ENTRY])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read_jsonl(path).lines == [HEADER, ENTRY]


@given(cut=st.integers(1, len(json.dumps(NEXT)) - 1))
def test_an_unfinished_last_line_is_skipped(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    """Wherever the write was cut, the line is reported and not an error."""
    path = as_file(tmp_path_factory.mktemp("torn"), [HEADER, ENTRY])

    with path.open("a") as file:
        file.write(json.dumps(NEXT)[:cut])

    found = read_jsonl(path)
    assert found.lines == [HEADER, ENTRY]
    (torn,) = found.skipped
    assert torn.number == 3
    assert torn.reason.startswith("torn: ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"type": "mess', "not JSON that can be stored"),
        ('{"type": "x", "id": "i", "n": 1e999}', "not JSON that can be stored"),
        ('{"type": "x", "id": "i", "n": NaN}', "not JSON that can be stored"),
        ("[1]", "not a JSON object"),
        ({"id": "i"}, "no type"),
        ({"type": "x"}, "no id"),
        ({"type": "x", "id": None}, "no id"),
        ({"type": "x", "id": "a"}, "a second entry 'a'"),
        ({"type": "message", "id": "i"}, "a message entry without a message"),
        (HEADER, "a second session header"),
    ],
)
def test_a_corrupt_line_is_reported_or_skipped(
    tmp_path: Path, line: Any, reason: str
) -> None:
    """The report has its number and the reason; other lines are read."""
    path = as_file(tmp_path, [HEADER, ENTRY, line, NEXT])

    with pytest.raises(CorruptThread, match=re.escape(reason)) as caught:
        read_jsonl(path)

    assert caught.value.where == f"{path}, line 3"
    assert caught.value.thread_id == "s-1"

    file = read_jsonl(path, on_corrupt="skip")
    assert file.lines == [HEADER, ENTRY, NEXT]
    (skipped,) = file.skipped
    assert skipped.number == 3
    assert reason in skipped.reason


async def test_an_entry_in_the_place_of_a_line_keeps_the_branches(
    cp: Store, tmp_path: Path
) -> None:
    """It has the id that later entries name; the same file gives the same entries."""
    other: Entry = {**NEXT, "id": "c", "parentId": "a"}
    after: Entry = {**NEXT, "id": "d", "parentId": "lost"}
    lines = [HEADER, ENTRY, "{", "[]", other, after, '{"type": 1}', {**NEXT, "id": "e"}]
    path = as_file(tmp_path, [*lines, {"type": "x", "id": "e", "parentId": "b"}])
    file, again = [
        await asyncio.to_thread(read_jsonl, path, "replace") for _ in range(2)
    ]
    assert file == again
    assert [one.number for one in file.skipped] == [3, 4, 7, 9]
    header, *entries = file.lines
    assert header == HEADER
    assert [(one["id"], one["parentId"]) for one in entries] == [
        ("a", None),
        ("00000003", "a"),
        ("lost", "00000003"),
        ("c", "a"),
        ("d", "lost"),
        ("00000007", "d"),
        ("e", "a"),
        ("00000009", "e"),
    ]
    assert {one["data"]["line"] for one in entries if one["type"] == "custom"} == {
        3,
        4,
        7,
        9,
    }
    log = await SessionLog.import_jsonl(cp, path, on_corrupt="replace")
    assert log.orphans == []


def test_a_lost_line_of_version_1_keeps_its_place(tmp_path: Path) -> None:
    """A compaction names the first kept entry by its index in the file."""
    said = {"type": "message", "message": user("a")}
    kept = {"type": "compaction", "summary": "s", "firstKeptEntryIndex": 3}
    header = {"type": "session", "id": "s-1"}
    path = as_file(tmp_path, [header, said, "{", said, kept])
    entries = migrate(read_jsonl(path, on_corrupt="replace").lines)[1:]
    assert entries[3]["firstKeptEntryId"] == entries[2]["id"]
    assert [one["parentId"] for one in entries[1:]] == [
        one["id"] for one in entries[:3]
    ]


@pytest.mark.parametrize("on_corrupt", ["raise", "skip", "replace"])
@pytest.mark.parametrize(
    "lines", [[], [""], [ENTRY], ["{}"], ['{"type": "session"}'], ["{", ENTRY]]
)
def test_a_file_without_a_header_is_corrupt(
    tmp_path: Path, lines: list[Any], on_corrupt: Any
) -> None:
    """It raises with skip too, because its entries have no version."""
    with pytest.raises(CorruptThread):
        read_jsonl(as_file(tmp_path, lines), on_corrupt)


@pytest.mark.parametrize("version", [4, "3", 0, True, None])
def test_another_version_is_refused(tmp_path: Path, version: Any) -> None:
    """A newer version raises with skip too."""
    path = as_file(tmp_path, [{**HEADER, "version": version}, ENTRY])

    with pytest.raises(SchemaMismatch):
        read_jsonl(path, on_corrupt="skip")


def test_on_corrupt_is_raise_or_skip(tmp_path: Path) -> None:
    """Any other value raises."""
    wrong: Any = "ignore"

    with pytest.raises(ValueError, match="on_corrupt"):
        read_jsonl(as_file(tmp_path, [HEADER]), on_corrupt=wrong)


async def test_a_corrupt_line_stops_the_import(cp: Store, tmp_path: Path) -> None:
    """Nothing is written then."""
    path = as_file(tmp_path, [HEADER, ENTRY, "{", NEXT])

    with pytest.raises(CorruptThread):
        await SessionLog.import_jsonl(cp, path)

    assert await cp.load("s-1") is None


async def test_skipped_lines_are_logged(
    cp: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each skipped line is a warning, and the session is imported."""
    path = as_file(tmp_path, [HEADER, ENTRY, "{", {**NEXT, "parentId": "lost"}])
    file = await asyncio.to_thread(read_jsonl, path, "skip")
    (skipped,) = file.skipped
    assert isinstance(skipped, SkippedLine)

    with caplog.at_level(logging.WARNING):
        log = await SessionLog.import_jsonl(cp, path, on_corrupt="skip")

    assert caplog.messages == [f"{path}, {skipped}"]
    assert texts(log.context().messages) == ["a", "b"]
    assert log.orphans == ["b"]
    again = await SessionLog.import_jsonl(cp, file, session_id="again")
    assert again.entries == log.entries


async def test_an_import_does_not_change_an_existing_session(
    cp: Store, tmp_path: Path
) -> None:
    """It raises VersionConflict."""
    path = as_file(tmp_path, [HEADER, ENTRY])
    log = await SessionLog.import_jsonl(cp, path)
    await log.append_message(user("b"))

    with pytest.raises(VersionConflict):
        await SessionLog.import_jsonl(cp, path)

    assert await log.refresh() == []


async def test_an_imported_session_takes_appends(cp: Store, tmp_path: Path) -> None:
    """It opens again with all entries."""
    log = await SessionLog.import_jsonl(cp, as_file(tmp_path, VERSION_1))
    await log.append_message(user("d"))
    again = await SessionLog.open(cp, "s-1")
    assert again.entries == log.entries
    assert texts(again.context().messages) == ["a was said", "b", "c", "d"]


async def test_an_export_replaces_the_file(cp: Store, tmp_path: Path) -> None:
    """Only the owner may read it, and no temporary file is left."""
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    log = await SessionLog.open(cp, "s-1")
    await log.append_message(user("a"))
    await log.export_jsonl(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    file = await asyncio.to_thread(read_jsonl, path)
    assert file.lines == [log.header, *log.entries]


async def test_a_failed_export_leaves_no_file(cp: Store, tmp_path: Path) -> None:
    """The target stays, and the temporary file is removed."""
    log = await SessionLog.open(cp, "s-1")
    await log.append_message(user("a"))
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / "file").touch()

    with pytest.raises(OSError, match="taken"):
        await log.export_jsonl(folder)

    assert list(tmp_path.iterdir()) == [folder]


async def test_half_a_character_is_written_as_javascript_writes_it(
    cp: Store, tmp_path: Path
) -> None:
    """As an escape; a pair of surrogates in the file is one character."""
    cut = (
        r'{"type":"message","id":"a","message":{"role":"user","content":"cut \ud83d"}}'
    )
    pair = cut.replace(r"cut \ud83d", r"\ud83d\ude00")
    path = as_file(tmp_path, [json_line(HEADER), cut])
    log = await SessionLog.import_jsonl(cp, path)
    assert texts(log.context().messages) == ["cut \ud83d"]
    await log.export_jsonl(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == path.read_bytes()

    log = await SessionLog.import_jsonl(
        cp, as_file(tmp_path, [HEADER, pair]), session_id="again"
    )
    assert texts(log.context().messages) == ["😀"]
