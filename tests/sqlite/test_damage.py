"""Damaged rows and files are reported with their place, and never overwritten."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    SchemaMismatch,
    SerializationError,
    ToolCall,
)
from cpkit.driver import StoreInfo
from cpkit.messages import Message
from cpkit.registry import inspect_store
from cpkit_sqlite import SQLiteCheckpointer
from tests.sweeps import sweep

Store = SQLiteCheckpointer[Any]

# Bodies that are not JSON objects; the last two are not UTF-8 text either.
DAMAGED = ["'{'", "''", "'[]'", "'{},{}'", "'NaN'", "x'7bff7d'", "CAST(x'ff' AS TEXT)"]


def first_key(raw: sqlite3.Connection, thread_id: str) -> int:
    (number,) = raw.execute(
        "SELECT number FROM cpkit_threads WHERE thread_id = ?", (thread_id,)
    ).fetchone()
    return int(number) << 32


def everything(raw: sqlite3.Connection) -> list[str]:
    return [
        repr(row)
        for table in ("threads", "messages", "extra", "calls")
        for row in raw.execute(f"SELECT * FROM cpkit_{table}")
    ]


async def error_of(read: Coroutine[Any, Any, Any]) -> CorruptThread:
    with pytest.raises(CorruptThread) as raised:
        await read

    return raised.value


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("position", [0, 700, 1299])
async def test_a_damaged_message_is_named_and_left_as_it_is(
    path: str, raw: sqlite3.Connection, damage: str, position: int
) -> None:
    """``load`` and ``read`` name thread and position; other threads still work."""
    raw.text_factory = bytes

    async with Store(path) as cp:
        await cp.append("other", [{}])
        await cp.append("t", [{"i": i} for i in range(1300)])
        key = first_key(raw, "t") + position
        raw.execute(f"UPDATE cpkit_messages SET body = {damage} WHERE key = {key}")
        before = everything(raw)

        for read in (cp.load("t"), cp.read("t"), cp.read("t", position, position + 1)):
            with pytest.raises(CorruptThread) as raised:
                await read

            assert raised.value.thread_id == "t"
            assert raised.value.where == f"message {position}"

        assert everything(raw) == before
        assert await cp.append("t", [{"i": 1300}], expected_version=1300) == 1301
        assert await cp.read("t", 1300) == [{"i": 1300}]
        assert await cp.read("other") == [{}]
        assert set(before) < set(everything(raw))

        with pytest.raises(CorruptThread):
            await cp.load("t")


async def test_a_kept_error_does_not_keep_an_old_snapshot(
    path: str, raw: sqlite3.Connection
) -> None:
    """A read after a failed read sees the present state.

    A statement that is still open keeps its snapshot, and an error can keep it alive.
    """
    async with Store(path) as cp:
        await cp.append("t", [{"i": i} for i in range(2000)])
        await cp.save_extra("t", {"a": 1, "b": 2})
        key = first_key(raw, "t")
        raw.execute(f"UPDATE cpkit_messages SET body = '' WHERE key = {key}")
        kept = [await error_of(cp.load("t"))]
        raw.execute(f"UPDATE cpkit_messages SET body = '{{}}' WHERE key = {key}")
        raw.execute("UPDATE cpkit_extra SET value = '' WHERE key = '\"a\"'")
        kept += [await error_of(cp.load("t"))]
        raw.execute("UPDATE cpkit_extra SET value = '3' WHERE key = '\"a\"'")
        assert [error.where for error in kept] == [
            "message 0",
            """extra key b'"a"'""",
        ]

        data = await cp.load("t")
        assert data is not None
        assert (data.messages[0], data.extra) == ({}, {"a": 3, "b": 2})


@pytest.mark.parametrize("missing", [0, 5, 8])
async def test_a_missing_message_is_corruption(
    path: str, raw: sqlite3.Connection, missing: int
) -> None:
    """A thread with a hole is not read as a shorter thread."""
    async with Store(path) as cp:
        await cp.append("t", [{"i": i} for i in range(10)])
        key = first_key(raw, "t") + missing
        raw.execute(f"DELETE FROM cpkit_messages WHERE key = {key}")

        with pytest.raises(CorruptThread, match="missing") as raised:
            await cp.load("t")

        assert raised.value.where == "messages 0 to 9"
        assert await cp.append("t", [{}]) == 11


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ("UPDATE cpkit_extra SET value = '{'", """extra key b'"k"'"""),
        ("UPDATE cpkit_extra SET value = CAST(x'ff' AS TEXT)", """extra key b'"k"'"""),
        ("UPDATE cpkit_extra SET key = 'k'", "extra key b'k'"),
        ("UPDATE cpkit_calls SET args = CAST(x'7bff7d' AS TEXT)", "call 'c'"),
        ("UPDATE cpkit_calls SET issued_at = 'noon'", "call 'c'"),
    ],
)
async def test_damaged_extra_and_calls_are_named(
    path: str, raw: sqlite3.Connection, change: str, where: str
) -> None:
    """The error names the extra key or the call."""
    async with Store(path) as cp:
        await cp.save_extra("t", {"k": 1})
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))
        raw.execute(change)

        with pytest.raises(CorruptThread) as raised:
            await cp.load("t")

        assert (raised.value.thread_id, raised.value.where) == ("t", where)

        if where == "call 'c'":
            for read in (cp.find_call("key"), cp.list_calls("t")):
                with pytest.raises(CorruptThread, match="'t'"):
                    await read


async def test_damage_in_one_thread_does_not_fail_other_threads(
    path: str, raw: sqlite3.Connection
) -> None:
    """Writes that share a batch with one that finds a damaged row are done."""
    async with Store(path) as cp:
        call = ToolCall("c", "tool", {}, "key")
        await cp.record_issued("t", call)
        raw.execute("UPDATE cpkit_calls SET args = CAST(x'ff' AS TEXT)")
        outcomes = await asyncio.gather(
            cp.append("a", [{}]),
            cp.record_issued("t", call),
            cp.record_result("t", "c", 1),
            cp.append("b", [{}]),
            return_exceptions=True,
        )
        assert outcomes[0] == outcomes[3] == 1
        assert [type(outcome) for outcome in outcomes[1:3]] == [CorruptThread] * 2
        assert {getattr(outcome, "thread_id", "") for outcome in outcomes[1:3]} == {"t"}


async def test_a_stored_message_of_another_type_is_named(path: str) -> None:
    """JSON that does not fit ``message_type`` raises ``SerializationError``."""
    async with Store(path) as cp:
        await cp.append("t", [{"role": "user", "content": ""}, {"role": "robot"}])

    async with Store(path, message_type=Message) as cp:
        assert len(await cp.read("t", 0, 1)) == 1

        with pytest.raises(SerializationError) as raised:
            await cp.read("t", 1)

        assert (raised.value.thread_id, raised.value.path) == ("t", (1,))


async def test_a_damaged_page_is_corruption_of_the_thread(
    path: str, raw: sqlite3.Connection
) -> None:
    """An error of SQLite about the file names the thread that was read."""
    async with Store(path) as cp:
        await cp.append("t", [{"pad": "x" * 500} for _ in range(200)])

    (size,) = raw.execute("PRAGMA page_size").fetchone()
    (root,) = raw.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'cpkit_messages'"
    ).fetchone()
    raw.close()

    with Path(path).open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * size)

    async with Store(path) as cp:
        with pytest.raises(CorruptThread) as raised:
            await cp.load("t")

        assert raised.value.thread_id == "t"
        assert "malformed" in raised.value.reason

        with pytest.raises(CorruptThread):
            await cp.append("t", [{}])


async def test_an_id_that_is_not_utf_8_is_corruption(
    path: str, raw: sqlite3.Connection
) -> None:
    """A list that meets it raises, and other threads still work."""
    async with Store(path) as cp:
        await cp.append("t", [{}])
        await cp.append("u", [{}])
        raw.execute(
            "UPDATE cpkit_threads SET thread_id = CAST(x'7580ff' AS TEXT) "
            "WHERE thread_id = 'u'"
        )
        error = await error_of(cp.list_threads())
        assert str(error).startswith(f"{cp.store.name} is corrupt: ")
        assert await cp.read("t") == [{}]
        assert await cp.append("t", [{}]) == 2


@pytest.mark.parametrize(
    "change",
    [
        "cpkit_threads SET updated_at = 1 << 62",
        "cpkit_threads SET created_at = 'noon'",
        "cpkit_messages SET appended_at = 'noon'",
    ],
)
async def test_damaged_times_of_a_thread_are_named(
    path: str, raw: sqlite3.Connection, change: str
) -> None:
    """A list and a dump raise, and the thread can be read."""
    async with Store(path) as cp:
        await cp.append("t", [{}])
        raw.execute(f"UPDATE {change}")

        for operation in (cp.list_threads(), cp.dump_thread("t")):
            error = await error_of(operation)
            assert (error.thread_id, error.where) == ("t", "its times")

        assert await cp.read("t") == [{}]


# Files without a store of this version


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("UPDATE cpkit_schema SET version = 2", 2),
        ("UPDATE cpkit_schema SET version = 0", 0),
        ("UPDATE cpkit_schema SET version = 'one'", "one"),
    ],
)
async def test_a_store_of_another_version_is_refused_untouched(
    path: str, raw: sqlite3.Connection, statement: str, found: object
) -> None:
    """A newer store is not written by older code; the error says what to do."""
    async with Store(path) as cp:
        await cp.append("t", [{}])

    raw.execute(statement)
    raw.close()
    before = Path(path).read_bytes()

    with pytest.raises(SchemaMismatch) as raised:
        await Store(path).__aenter__()

    assert raised.value.found == found
    assert ("upgrade cpkit" in str(raised.value)) is (found == 2)
    assert Path(path).read_bytes() == before


async def test_a_file_that_is_not_a_database_is_refused_untouched(path: str) -> None:
    """A file of another kind is not overwritten."""
    content = b"dear diary, today " * 500
    Path(path).write_bytes(content)

    with pytest.raises(SchemaMismatch, match="another place") as raised:
        await Store(path).__aenter__()

    assert path in str(raised.value)
    assert Path(path).read_bytes() == content


async def test_an_empty_file_becomes_a_store(path: str) -> None:
    """``mktemp`` creates such a file."""
    Path(path).touch()

    async with Store(path) as cp:
        assert await cp.append("t", [{}]) == 1


async def test_a_folder_in_the_place_of_the_file_is_unavailable(path: str) -> None:
    """The error names the store."""
    Path(path).mkdir()

    with pytest.raises(BackendUnavailable) as raised:
        await Store(path).__aenter__()

    assert raised.value.maybe_applied is False
    assert path in str(raised.value)


@pytest.mark.parametrize("bit", sweep([0x01, 0x80], [0x01]))
async def test_a_flipped_bit_in_the_schema_is_an_error_of_the_contract(
    path: str, bit: int
) -> None:
    """Opening, reading and writing raise no other error."""
    async with Store(path) as cp:
        await cp.append("t", [{"n": 1}])

    intact = Path(path).read_bytes()
    texts = [found.start() for found in re.finditer(rb"CREATE", intact)]
    places = {0, *range(18, 100, 3), *range(100, 140), *range(min(texts), 4096, 29)}

    for place in sorted(places | {*texts}):
        damaged = bytearray(intact)
        damaged[place] ^= bit
        Path(path).write_bytes(damaged)

        with suppress(SchemaMismatch, CorruptThread, BackendUnavailable):
            async with Store(path) as cp:
                await cp.read("t")
                await cp.append("t", [{}])


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE cpkit_threads (thread_id TEXT PRIMARY KEY, mine TEXT)",
        "CREATE TABLE CPKIT_MESSAGES (key INTEGER PRIMARY KEY, body TEXT)",
        "CREATE VIEW cpkit_calls AS SELECT 1 AS sequence",
    ],
)
async def test_a_table_of_another_program_is_not_written(
    path: str, raw: sqlite3.Connection, statement: str
) -> None:
    """The store does not open, or its operations are refused."""
    raw.execute(statement)

    with pytest.raises(BackendUnavailable) as raised:
        async with Store(path) as cp:
            await cp.append("t", [{}])

    assert raised.value.maybe_applied is False
    (name,) = re.findall("(?i)cpkit_[a-z]+", statement)
    assert len(raw.execute(f"SELECT * FROM {name}").fetchall()) <= 1


async def test_a_log_that_is_removed_during_the_look_is_not_a_missing_store(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last process that closes the store removes it."""
    getsize = os.path.getsize

    def removed(name: str) -> int:
        if name != path:
            raise FileNotFoundError(2, "No such file or directory", name)

        return getsize(name)

    async with Store(path) as cp:
        await cp.append("t", [{}])
        monkeypatch.setattr(os.path, "getsize", removed)
        found = await inspect_store(f"sqlite:///{path}")

    assert found is not None
    assert (found.exists, found.version, found.path) == (True, 1, path)


async def test_a_store_in_use_is_found_by_a_link(path: str, tmp_path: Path) -> None:
    """Its tables may be in the log alone, which is beside the file."""
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(path)

    async with Store(path) as cp:
        await cp.append("t", [{}])
        found = await inspect_store(f"sqlite:///{link}")

    assert found is not None
    assert (found.exists, found.version) == (True, 1)


@pytest.mark.parametrize("content", [b"xy", b"dear diary, today " * 500])
async def test_looking_at_a_file_creates_and_changes_nothing(
    path: str, content: bytes
) -> None:
    """``inspect`` says whether there is a store, and what it cannot read it leaves."""
    url = f"sqlite:///{path}"
    assert await inspect_store(url) == StoreInfo(False)
    assert await inspect_store("sqlite:///:memory:") is None
    assert not Path(path).exists()

    async with Store(path) as cp:
        await cp.append("t", [{}])
        found = await inspect_store(url)
        assert found is not None
        assert (found.exists, found.version, found.path) == (True, 1, path)
        assert found.size is not None
        assert found.size > os.path.getsize(path)

    assert await inspect_store(url) == StoreInfo(True, 1, os.path.getsize(path), path)
    assert [one.name for one in Path(path).parent.iterdir()] == ["agent.db"]

    Path(path).write_bytes(content)
    assert await inspect_store(url) is None
    assert Path(path).read_bytes() == content

    Path(path).unlink()
    sqlite3.connect(path).execute("CREATE TABLE mine (x)").connection.close()
    found = await inspect_store(url)
    assert found is not None
    assert (found.exists, found.path) == (False, path)
