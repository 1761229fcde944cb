"""``cpkit export``: write threads as lines of JSON, and copy them back."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from cpkit import ToolCall, open_checkpointer
from cpkit.cli.stores import Store
from cpkit.tools.copying import ExportFile, copy_store, export_lines
from tests.cli.command import call, in_store, invoke, run_main
from tests.cli.stocked import CUT, everything, stock, stock_cut
from tests.processes import interrupted_output
from tests.stores import fresh_url


def test_an_export_can_be_copied_back(url: str, tmp_path: Path) -> None:
    """The copy is exact, with all times, and the file has mode 0600."""
    in_store(url, stock)
    file = tmp_path / "all.jsonl"
    assert run_main("export", url, "--output", str(file)).code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.glob(".all*")] == []

    back = fresh_url("sqlite", tmp_path, "back")
    ended = invoke("copy", str(file), back, "--json")
    assert ended.json["complete"]
    assert in_store(back, everything) == in_store(url, everything)
    assert invoke("export", url, "-o", str(file)).code == 2


def test_standard_output_has_only_the_exported_lines(sqlite_url: str) -> None:
    """They are those of the named threads, in the given order."""
    in_store(sqlite_url, stock)
    ended = run_main("export", sqlite_url, "values", "only-extra")
    assert (ended.code, ended.err) == (0, "")
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert [one["thread"] for one in lines if "thread" in one] == [
        "values",
        "only-extra",
    ]
    assert [one["message"] for one in lines if "message" in one] == [
        "text",
        3,
        None,
        [1, {"k": "\x00"}],
    ]
    assert lines[-1] == {"threads": 2}


def test_an_export_that_is_stopped_and_continued_is_complete(sqlite_url: str) -> None:
    """Also with ``PYTHONUNBUFFERED``."""
    text = "x" * 1_000_000

    async def fill(cp: Store) -> None:
        await cp.append("t", [{"text": text}])

    in_store(sqlite_url, fill)
    output = interrupted_output("-m", "cpkit", "export", sqlite_url)
    lines = [json.loads(line) for line in output.splitlines()]
    assert {"text": text} in [line.get("message") for line in lines]


@pytest.mark.parametrize("before", [3, 9])
def test_a_trimmed_thread_is_exported_where_it_begins(
    sqlite_url: str, tmp_path: Path, before: int
) -> None:
    """Its line has the position of its first message; a copy has it too."""

    async def fill(cp: Store) -> int:
        await cp.append("t", [{"n": n} for n in range(5)])
        return await cp.trim("t", before)

    removed, file = in_store(sqlite_url, fill), str(tmp_path / "all.jsonl")
    assert run_main("export", sqlite_url, "--output", file).code == 0
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    assert (lines[1]["version"], lines[1]["first"]) == (5, removed)
    back = fresh_url("sqlite", tmp_path, "back")
    assert invoke("copy", file, back).code == 0
    assert in_store(back, everything) == in_store(sqlite_url, everything)


def test_a_deleted_thread_is_exported_by_name(sqlite_url: str) -> None:
    """Its line says that it has nothing but erased calls."""
    in_store(sqlite_url, stock)
    ended = run_main("export", sqlite_url, "pruned")
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert [(one["thread"], one["erased"]) for one in lines if "thread" in one] == [
        ("pruned", True)
    ]
    assert [one["call"]["status"] for one in lines if "call" in one] == ["completed"]
    missing = invoke("export", sqlite_url, "forgotten")
    assert missing.code == 1
    assert "there is no thread 'forgotten'" in missing.err


def test_a_thread_named_twice_is_exported_once(sqlite_url: str) -> None:
    """`cpkit copy` refuses a file that has a thread twice."""
    in_store(sqlite_url, stock)
    ended = run_main("export", sqlite_url, "pruned", "pruned")
    assert json.loads(ended.out.splitlines()[-1]) == {"threads": 1}


def test_a_deeply_nested_message_is_exported(sqlite_url: str, tmp_path: Path) -> None:
    """The file adds no nesting that would exceed the limit of a reader."""
    deep: list[object] = []

    for _ in range(199):
        deep = [deep]

    async def append(cp: Store) -> None:
        await cp.append("t", [deep])
        await cp.save_extra("t", {"deep": deep})  # type: ignore[dict-item]  # JSON

    in_store(sqlite_url, append)
    file = tmp_path / "deep.jsonl"
    ended = invoke("export", sqlite_url, "-o", str(file))
    assert (ended.code, ended.err) == (0, f"exported 1 thread to {file}\n")
    assert invoke("copy", str(file), fresh_url("sqlite", tmp_path, "b")).code == 0


async def test_text_is_exported_as_it_was(tmp_path: Path) -> None:
    """The lines are JSON for any tool; two halves in a row come back as two."""
    file = tmp_path / "cut.jsonl"

    async with (
        open_checkpointer("memory://") as src,
        open_checkpointer("memory://") as dst,
    ):
        source, destination = cast("Store", src), cast("Store", dst)
        await stock_cut(source, "t")
        lines = [line async for line in export_lines(source)]
        found = [json.loads(line.decode()) for line in lines]
        said = [one["message"].get("content") for one in found if "message" in one]
        assert said[:3] == [
            "cut \ud83d",
            "😀",  # as every reader of JSON takes the two escapes
            "😀 \ude00",
        ]
        file.write_bytes(b"".join(lines))
        exported = await asyncio.to_thread(ExportFile, file)
        assert (await copy_store(exported, destination)).is_complete
        assert await everything(destination) == await everything(source)


async def test_a_tool_may_write_an_export_with_escapes(tmp_path: Path) -> None:
    """A character that it writes as two escapes is one."""
    file = tmp_path / "escaped.jsonl"

    async with open_checkpointer("memory://") as cp:
        source = cast("Store", cp)
        await source.append("t", [{"n": "😀"}, {"n": CUT[0]}])
        lines = [json.loads(line) async for line in export_lines(source)]

    file.write_text(
        "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in lines)
    )
    assert r"\ud83d\ude00" in file.read_text()
    exported = await asyncio.to_thread(ExportFile, file)
    dump = await exported.dump_thread("t")
    assert dump is not None
    assert dump.messages == [{"n": "😀"}, {"n": CUT[0]}]


def changed(before: bytes, after: bytes) -> Callable[[list[bytes]], list[bytes]]:
    """Return what edits the lines; the text occurs in one of them."""

    def change(lines: list[bytes]) -> list[bytes]:
        assert sum(before in one for one in lines) == 1
        return [one.replace(before, after) for one in lines]

    return change


def field_changed(name: str, value: bytes) -> Callable[[list[bytes]], list[bytes]]:
    """Return what gives a field of the first thread's line another value."""

    def change(lines: list[bytes]) -> list[bytes]:
        fields = json.loads(lines[1]) | {name: json.loads(value)}
        return [lines[0], json.dumps(fields).encode() + b"\n", *lines[2:]]

    return change


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda lines: lines[:-1], "the file is truncated"),
        (lambda lines: lines[:-3], "the file is truncated"),
        (lambda lines: [*lines[:2], *lines[3:]], "the thread is not complete"),
        # Without its last line, the thread would take the messages of the next one.
        (
            lambda lines: [*lines[:5], *lines[1:]],
            "line 6 is corrupt: not the line that comes here",
        ),
        (
            lambda lines: [*lines[:7], *lines[1:-1], b'{"threads":1}\n'],
            "line 8 is corrupt: the thread is in the file twice",
        ),
        (
            lambda lines: [lines[0], *lines[2:]],
            "line 2 is corrupt: not the line that comes here",
        ),
        (
            lambda lines: [*lines, *lines[1:]],
            "line 9 is corrupt: not the line that comes here",
        ),
        (lambda lines: [b"{}\n", *lines[1:]], "another file"),
        (
            lambda lines: [lines[0], b'{"x": 1}\n', *lines[1:]],
            "not a line of an export",
        ),
        (lambda lines: [lines[0][:-3] + b"9}\n", *lines[1:]], "not JSON"),
        (
            lambda lines: [lines[0], b'{"thread":' + 100_000 * b"[" + b"\n"],
            "not JSON",
        ),
        (field_changed("thread", b"{}"), "line 2 is corrupt: not a thread"),
        (field_changed("thread", b"1"), "line 2 is corrupt: not a thread"),
        (field_changed("version", b'"1"'), "line 2 is corrupt: not a thread"),
        (field_changed("erased", b"0"), "line 2 is corrupt: not a thread"),
        (field_changed("created_at", b"null"), "line 2 is corrupt: not a thread"),
        (
            field_changed("created_at", b'"2026-11-24T12:00:00"'),
            (
                "line 2 is corrupt: not a thread "
                "(created_at: Value error, not a time with a zone)"
            ),
        ),
        (
            field_changed("version", b"3"),
            "line 7 is corrupt: the thread is not complete",
        ),
        (lambda lines: [b'{"cpkit_export":3}\n', *lines[1:]], "upgrade cpkit"),
        (lambda lines: [b'{"cpkit_export":1}\n', *lines[1:]], "the cpkit that made"),
    ],
)
def test_a_damaged_export_is_refused(
    sqlite_url: str,
    tmp_path: Path,
    cut: object,
    said: str,
) -> None:
    """The error names the line, and nothing is written."""

    async def fill(cp: Store) -> None:
        await cp.append("t", [{"n": 1}, {"n": 2}])
        await call(cp, "t", "c", "k")

    in_store(sqlite_url, fill)
    file = tmp_path / "x.jsonl"
    assert invoke("export", sqlite_url, "-o", str(file)).code == 0
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(cut(lines)))  # type: ignore[operator]  # a function
    ended = invoke("copy", str(file), fresh_url("sqlite", tmp_path, "back"))
    assert ended.code == 2
    assert said in ended.err
    assert not (tmp_path / "back.db").exists()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (b'"extra":{}', b'"extra":[1]', "line 5 is corrupt: not extra (extra: "),
        (b'"args":{}', b'"args":[1]', "line 6 is corrupt: not a call (args: "),
        (b'"attempt":1', b'"attempt":"1"', "line 6 is corrupt: not a call (attempt: "),
        (
            b'"status":"issued"',
            b'"status":"paid"',
            "line 6 is corrupt: not a call (status: ",
        ),
        (
            b'"resolved_at":null',
            b'"resolved_at":1',
            "line 6 is corrupt: not a call (resolved_at",
        ),
        (b'{"call":{', b'{"call":5,"x":{', "line 6 is corrupt: not a call (line: "),
    ],
)
def test_a_damaged_thread_of_an_export_is_named(
    sqlite_url: str, tmp_path: Path, before: bytes, after: bytes, said: str
) -> None:
    """The others are copied, onto an empty store and onto one that has them."""

    async def fill(cp: Store) -> None:
        await cp.append("t", [{"n": 1}, {"n": 2}])
        await cp.record_issued("t", ToolCall("c", "pay", {}, "k"))
        await cp.append("u", [{"n": 1}])
        await cp.save_extra("u", {"x": 1})

    in_store(sqlite_url, fill)
    file = tmp_path / "x.jsonl"
    assert invoke("export", sqlite_url, "-o", str(file)).code == 0
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(changed(before, after)(lines)))

    for target in (fresh_url("sqlite", tmp_path, "back"), sqlite_url):
        ended = invoke("copy", str(file), target)
        assert ended.code == 1
        assert said in ended.err


def test_a_damaged_thread_does_not_end_an_export(
    sqlite_url: str, tmp_path: Path
) -> None:
    """The others are exported; the command names the thread and exits with 1."""

    async def fill(cp: Store) -> None:
        for thread in ("a", "broken", "c"):
            await cp.append(thread, [{"of": thread}])

    in_store(sqlite_url, fill)

    with closing(sqlite3.connect(tmp_path / "store.db")) as raw, raw:
        raw.execute("UPDATE cpkit_messages SET body = '{' WHERE body LIKE '%broken%'")

    file = tmp_path / "some.jsonl"
    said = "not exported: thread 'broken': corrupt at message 0: "

    for ended in (
        invoke("export", sqlite_url),
        invoke("export", sqlite_url, "-o", str(file)),
    ):
        assert ended.code == 1
        assert ended.err.startswith(said)

    assert ended.err.splitlines()[1:] == [f"exported 2 threads to {file}"]
    copied = invoke("copy", str(file), fresh_url("sqlite", tmp_path, "back"), "--json")
    assert (copied.code, copied.json["copied"]) == (0, 2)
    assert invoke("export", sqlite_url, "a").code == 0


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_file_system_without_hard_links_takes_an_export(
    is_taken: bool,
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that another program creates meanwhile is not replaced."""
    in_store(sqlite_url, stock)
    file = tmp_path / "all.jsonl"

    def refuse(source: str, target: Path) -> None:
        if is_taken:
            target.write_text("mine")

        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    ended = invoke("export", sqlite_url, "-o", str(file))
    assert ended.code == (2 if is_taken else 0), ended.err
    assert [one.name for one in tmp_path.glob("*all*")] == ["all.jsonl"]

    if is_taken:
        assert file.read_text() == "mine"
    else:
        assert file.stat().st_mode & 0o777 == 0o600
        assert invoke("copy", str(file), fresh_url("sqlite", tmp_path, "b")).code == 0
