"""Damaged logs and folders are reported; they are not repaired or overwritten."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    MemoryCheckpointer,
    SchemaMismatch,
    SerializationError,
    ToolCall,
)
from cpkit.messages import Message
from cpkit.tools.copying import copy_store
from cpkit_file import FileCheckpointer
from cpkit_file.schema import log_name

Store = FileCheckpointer[Any]

# Replacements of a message that are not JSON objects.
DAMAGED = [b"{", b"[]", b"{},{}", b"NaN", b"\xff{}", b"1", b"", b'{"a":}']


def lines_of(log: Path) -> list[bytes]:
    return log.read_bytes().splitlines(keepends=True)


async def error_of(use: Coroutine[Any, Any, Any]) -> CorruptThread:
    with pytest.raises(CorruptThread) as raised:
        await use

    return raised.value


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("position", [0, 700, 1000])
async def test_a_damaged_message_is_reported_and_left_unchanged(
    home: Path, log: Path, damage: bytes, position: int
) -> None:
    """The error of load and read has thread, file and line; others can be read."""
    async with Store(home) as cp:
        await cp.append("other", [{}])
        await asyncio.gather(*(cp.append("t", [{"i": i}]) for i in range(1300)))

    async with Store(home) as cp:
        await cp.append("t", [{"i": 1300}])
        await cp.append("t", [{"i": 1301}])
        lines = lines_of(log)
        number = position + 1
        lines[number] = lines[number].replace(b'{"i":%d}' % position, damage)
        before = b"".join(lines)
        log.write_bytes(before)

    async with Store(home) as cp:
        for read in (cp.load("t"), cp.read("t"), cp.read("t", position, position + 1)):
            error = await error_of(read)
            assert error.thread_id == "t"
            assert error.where == f"{log}, line {number + 1}"

        assert log.read_bytes() == before
        assert await cp.append("t", [{"i": 1302}], expected_version=1302) == 1303
        assert await cp.read("other") == [{}]
        assert log.read_bytes().startswith(before)
        await error_of(cp.load("t"))


STRANGE = {
    "no json": b"dear diary\n",
    "an empty line": b"\n",
    "another json": b'{"hello":1}\n',
    "no end": b'{"add":{}}\n',
    "another checksum": b'{"add":{},"at":[2,1795232045123456,"00000000"]}\n',
}


@pytest.mark.parametrize("name", STRANGE)
async def test_after_an_unknown_last_line_nothing_is_written(
    home: Path, log: Path, name: str
) -> None:
    """A complete line without its checksum is corruption, for writers too."""
    call = ToolCall("c", "tool", {}, "key")

    async with Store(home) as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", call)

        with log.open("ab") as file:
            file.write(STRANGE[name])

        before = log.read_bytes()

        for use in (
            cp.load("t"),
            cp.append("t", [{}]),
            cp.record_result("t", "c", 1),
            cp.record_issued("t", ToolCall("d", "tool", {}, "other")),
            cp.find_call("key"),
            cp.delete_thread("t"),
        ):
            error = await error_of(use)
            assert error.thread_id == "t"
            assert error.where == f"{log}, line 4"

        assert log.read_bytes() == before


@pytest.mark.parametrize("name", [*STRANGE, "zeros", "nothing"])
async def test_an_unknown_line_is_reported_by_each_operation_that_needs_it(
    home: Path, log: Path, name: str
) -> None:
    """Readers of all lines report the damaged one; no reader takes the key as free."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))
        await cp.append("t", [{}])

    lines = lines_of(log)
    others = {"zeros": b"\0" * 90 + b"\n", "nothing": b""}
    lines[2] = (STRANGE | others)[name]
    log.write_bytes(b"".join(lines))

    async with Store(home) as cp:
        other = ToolCall("d", "tool", {}, "key")

        for use in (
            cp.load("t"),
            cp.find_completed("key"),
            cp.record_issued("elsewhere", other),
            cp.list_calls("t"),
        ):
            error = await error_of(use)
            assert error.where == f"{log}, line 3"


@pytest.mark.parametrize("missing", [1, 5, 10])
async def test_a_missing_message_is_reported(
    home: Path, log: Path, missing: int
) -> None:
    """A gap is corruption, not a shorter thread."""
    async with Store(home) as cp:
        for i in range(10):
            await cp.append("t", [{"i": i}])

    lines = lines_of(log)
    del lines[missing]
    log.write_bytes(b"".join(lines))

    async with Store(home) as cp:
        if missing == 10:  # the last one: what is left is a shorter thread
            assert len(await cp.read("t")) == 9
        else:
            error = await error_of(cp.load("t"))
            assert error.where == f"{log}, line {missing + 1}"


@pytest.mark.parametrize(
    ("old", "new", "number"),
    [
        (b"\t1\t}", b"\t2\t}", 3),
        (b"\t1\t}", b"\t{\t}", 3),
        (b'"args":\t{}', b'"args":\t[]', 4),
        (b'"attempt":1', b'"attempt":2', 4),
        (b'"status":"issued"', b'"status":"failed"', 4),
        (b'"issued_at":1', b'"issued_at":2', 4),
        (b'"call_id":"c"', b'"call_id":"d"', 4),
        (b'"idempotency_key":"key"', b'"idempotency_key":"kez"', 4),
        (b'"thread":"t"', b'"thread":"u"', 1),
        (b'"at":[1,', b'"at":[2,', 2),
    ],
)
@pytest.mark.parametrize("last", [True, False])
async def test_each_changed_byte_of_a_line_is_reported(
    home: Path, log: Path, old: bytes, new: bytes, number: int, last: bool
) -> None:
    """The error names the line, also where the change is valid JSON."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        await cp.save_extra("t", {"k": 1})
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))

        if not last:
            await cp.append("t", [{}])

    log.write_bytes(log.read_bytes().replace(old, new, 1))

    async with Store(home) as cp:
        call = ToolCall("d", "tool", {}, "key")

        for use in (
            cp.load("t"),
            cp.find_call("key"),
            cp.list_calls("t"),
            cp.dump_thread("t"),
            cp.record_issued("u", call),
        ):
            error = await error_of(use)
            assert error.thread_id == "t"
            assert error.where == f"{log}, line {number}"


@pytest.mark.long
async def test_every_flipped_bit_is_detected(home: Path, log: Path) -> None:
    """A load raises, or returns what was written; damage does not free a key."""
    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}], extra={"k": 1})
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))
        await cp.record_result("t", "c", 1)
        await cp.append("t", [{"n": 2}])
        before = await cp.load("t")

    intact = log.read_bytes()
    newline = intact.rindex(b"\n", 0, -1)

    for position in range(newline + 1):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << (position % 8)
        log.write_bytes(damaged)

        async with Store(home) as cp:
            for use in (
                cp.load("t"),
                cp.record_issued("u", ToolCall("d", "x", {}, "key")),
            ):
                await error_of(use)

    log.write_bytes(intact)

    async with Store(home) as cp:
        assert await cp.load("t") == before


async def test_a_load_finds_damage_in_what_the_handle_has_read(
    home: Path, log: Path
) -> None:
    """It reads the messages again, and checks them again."""
    async with Store(home) as cp:
        for n in range(3):
            await cp.append("t", [{"n": n}])

        await cp.load("t")
        log.write_bytes(log.read_bytes().replace(b'{"n":1}', b'{"n":7}'))
        error = await error_of(cp.load("t"))
        assert error.where == f"{log}, line 3"


@pytest.mark.parametrize("refilled", [True, False])
async def test_a_log_that_a_person_cut_is_read_again_by_an_open_handle(
    home: Path, log: Path, refilled: bool
) -> None:
    """What it acknowledges then can be read, also if the log has its old length."""
    async with Store(home) as cp, Store(home) as other:
        await cp.append("t", [{"n": 1}])
        await cp.record_issued("u", ToolCall("c", "pay", {}, "key"))
        assert await cp.append("t", [{"n": 2}]) == 2
        assert len(await cp.list_calls("u")) == 1

        for path in (log, log.with_name(log_name("u"))):
            os.truncate(path, sum(map(len, lines_of(path)[:-1])))

        if refilled:
            assert await other.append("t", [{"n": 3}]) == 2
            await other.record_issued("u", ToolCall("d", "pay", {}, "kez"))

        assert await cp.append("t", [{"n": 4}]) == 2 + refilled
        calls = await cp.list_calls("u")
        assert [call.call.call_id for call in calls] == ["d"] * refilled

    async with Store(home) as cp:
        assert await cp.read("t", 1) == [{"n": 3}] * refilled + [{"n": 4}]
        assert await cp.list_calls("u") == calls


async def test_damage_in_one_thread_does_not_fail_writes_to_others(
    home: Path, log: Path
) -> None:
    """Writes that share a batch with a write to a damaged log are done."""
    async with Store(home) as cp:
        await cp.append("t", [{}])

        with log.open("ab") as file:
            file.write(b"no line\n")

        threads = ["t" if i % 3 == 0 else f"other {i}" for i in range(60)]
        outcomes = await asyncio.gather(
            *(cp.append(thread_id, [{}]) for thread_id in threads),
            return_exceptions=True,
        )

        for thread_id, outcome in zip(threads, outcomes, strict=True):
            if thread_id == "t":
                assert isinstance(outcome, CorruptThread)
            else:
                assert outcome == 1

        errors = [outcome for outcome in outcomes if outcome != 1]
        assert len({id(error) for error in errors}) == 20


async def test_damage_in_another_thread_does_not_fail_a_deletion(home: Path) -> None:
    """Its log has an older attempt of a key that is forgotten."""
    async with Store(home) as cp:
        await cp.record_issued("other", ToolCall("c", "pay", {}, "key"))
        await cp.record_result("other", "c", "declined", success=False)
        await cp.record_issued("t", ToolCall("c", "pay", {}, "key"))

        with (home / "threads" / log_name("other")).open("ab") as file:
            file.write(b"no line\n")

        await cp.delete_thread("t", forget_keys=True)
        assert await cp.list_calls("t") == []
        error = await error_of(cp.find_call("key"))
        assert error.thread_id == "other"


@pytest.mark.parametrize("line", [0, 1])
async def test_a_list_that_meets_a_damaged_log_raises(
    home: Path, log: Path, line: int
) -> None:
    """So that a copy does not leave it out. Other lists do not read it."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        await cp.append("other", [{}])

    lines = lines_of(log)
    lines[line] = lines[line].replace(b'"]}', b'"]]')
    log.write_bytes(b"".join(lines))

    async with Store(home) as cp, MemoryCheckpointer[Any]() as copy:
        for use in (cp.list_threads(), cp.list_threads(prefix="t")):
            error = await error_of(use)
            assert error.where == f"{log}, line {line + 1}"

        await error_of(copy_store(cp, copy))
        assert len(await cp.list_threads(prefix="other")) == 1
        assert await cp.list_threads(prefix="tenants") == []
        await error_of(cp.load("t"))

        for thread_id in ("other", "new"):
            await cp.append(thread_id, [{}])
            assert await cp.load(thread_id) is not None


async def test_a_stored_message_of_another_type_is_reported(home: Path) -> None:
    """JSON that does not fit ``message_type`` is a ``SerializationError``."""
    async with Store(home) as cp:
        await cp.append("t", [{"role": "user", "content": ""}, {"role": "robot"}])

    async with Store(home, message_type=Message) as cp:
        assert len(await cp.read("t", 0, 1)) == 1

        with pytest.raises(SerializationError) as raised:
            await cp.read("t", 1)

        assert (raised.value.thread_id, raised.value.path) == ("t", (1,))


# Torn lines


@pytest.mark.parametrize("kept", [1, 7, 30, 60])
async def test_a_torn_line_is_skipped_by_readers_and_set_aside_by_a_writer(
    home: Path, log: Path, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    """The bytes are kept in a file beside the log, and a warning names it."""
    torn = b'{"add":{"never":"acknowledged"},"at":[2,1795232045123456,"00000000"]}'
    aside = log.with_name(f"{log.name}.torn")

    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}])
        whole = log.read_bytes()
        log.write_bytes(whole + torn[:kept])

        assert await cp.read("t") == [{"n": 1}]
        assert await cp.append("t", [], expected_version=1) == 1
        assert log.read_bytes() == whole
        log.write_bytes(whole + torn[:kept])
        assert await cp.append("t", [{"n": 2}]) == 2
        assert await cp.read("t") == [{"n": 1}, {"n": 2}]
        assert aside.read_bytes() == 2 * (torn[:kept] + b"\n")
        assert aside.stat().st_mode & 0o777 == 0o600
        assert [info.version for info in await cp.list_threads()] == [2]

    (first, _) = caplog.records
    assert first.name == "cpkit_file"
    assert first.levelno == logging.WARNING
    assert str(aside) in first.getMessage()


@pytest.mark.parametrize("kept", [0, 1, 50, 70])
async def test_a_log_whose_first_write_is_torn_is_an_absent_thread(
    home: Path, log: Path, kept: int
) -> None:
    """Its first line, or the operation after it, is incomplete."""
    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}])
        log.write_bytes(log.read_bytes()[:kept])

        assert await cp.load("t") is None
        assert await cp.list_threads() == []
        assert await cp.list_calls("t") == []
        assert await cp.append("t", [{"n": 2}], expected_version=0) == 1
        assert await cp.read("t") == [{"n": 2}]


@pytest.mark.parametrize("erased", [True, False])
async def test_a_thread_whose_first_write_was_torn_is_not_older_than_its_first_message(
    home: Path, log: Path, erased: bool
) -> None:
    """The line with the time of creation was whole, and the message after it not."""
    async with Store(home) as cp:
        if erased:
            await cp.record_issued("t", ToolCall("c", "pay", {}, "key"))
            await cp.delete_thread("t")

        await cp.append("t", [{"n": 1}])
        os.truncate(log, log.stat().st_size - 20)
        await cp.append("t", [{"n": 2}])
        (info,) = await cp.list_threads()
        dump = await cp.dump_thread("t")

    assert dump is not None
    assert dump.messages == [{"n": 2}]
    assert info.created_at == info.updated_at == dump.created_at


async def test_a_deletion_removes_torn_lines_too(home: Path, log: Path) -> None:
    """They may have content that was to be erased."""
    async with Store(home) as cp:
        await cp.append("t", [{}])

        with log.open("ab") as file:
            file.write(b'{"add":{"secret":')

        await cp.append("t", [{}])

        with log.open("ab") as file:
            file.write(b'{"add":{"secret":')

        await cp.delete_thread("t")

    assert list(log.parent.iterdir()) == []


@pytest.mark.parametrize("end", ["torn", "tmp"])
async def test_a_deletion_removes_what_a_crash_left_without_a_log(
    home: Path, log: Path, end: str
) -> None:
    """A killed restore, or a torn first write that was set aside."""
    async with Store(home) as cp:
        left = log.with_name(f"{log.name}.{end}")
        left.write_bytes(b'{"add":{"secret":')
        await cp.delete_thread("t")
        assert not left.exists()
        await cp.delete_thread("t")


async def test_a_deletion_removes_no_draft_of_a_restore_under_way(
    home: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft is removed only by the process that holds the log's lock."""
    draft = log.with_name(f"{log.name}.tmp")
    unlink = os.unlink

    def checked(path: str) -> None:
        if path == str(draft):
            with log.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        unlink(path)

    async with Store(home) as cp:
        draft.write_bytes(b'{"add":{"secret":')
        monkeypatch.setattr("os.unlink", checked)
        await cp.delete_thread("t")

    assert list(log.parent.iterdir()) == []


# Folders and files of other programs


@pytest.mark.parametrize(
    ("mark", "found"),
    [
        (b'{"cpkit":"file","version":2}\n', 2),
        (b'{"cpkit":"file","version":0}\n', 0),
        (b'{"cpkit":"file"}', "in b'"),
        (b"[]", "in b'"),
        (b"", "in b'"),
        (b"\xff\xfe", "in b'"),
    ],
)
async def test_a_folder_of_another_version_is_refused_and_not_changed(
    home: Path, mark: bytes, found: object
) -> None:
    """Older code does not write a newer store; the error says what to do."""
    async with Store(home) as cp:
        await cp.append("t", [{}])

    (home / "cpkit.json").write_bytes(mark)
    before = sorted(home.rglob("*"))

    with pytest.raises(SchemaMismatch) as raised:
        await Store(home).__aenter__()

    assert str(found) in str(raised.value.found)
    assert ("upgrade cpkit" in str(raised.value)) is (found == 2)
    assert str(home) in str(raised.value)
    assert (home / "cpkit.json").read_bytes() == mark
    assert sorted(home.rglob("*")) == before


async def test_foreign_files_in_the_folder_are_ignored(home: Path) -> None:
    """A folder may also have notes, temporary files and other links."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        threads = home / "threads"
        foreign = {
            home / "notes.txt",
            home / ".DS_Store",
            threads / "notes.jsonl",
            threads / f"{log_name('x')}.tmp",
            threads / f"{log_name('x')}.torn",
            threads / log_name("x").upper(),
            threads / f".{log_name('x')}",
            home / "used-keys" / "note",
        }

        for path in foreign:
            path.write_text("mine")

        (threads / "folder").mkdir()
        (threads / log_name("empty")).touch()
        assert [info.thread_id for info in await cp.list_threads()] == ["t"]
        await cp.append("x", [{}])
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))
        await cp.delete_thread("t", forget_keys=True)
        kept = foreign - {threads / f"{log_name('x')}.torn"}
        assert all(path.read_text() == "mine" for path in kept)


async def test_a_link_in_the_place_of_a_log_is_not_followed(
    home: Path, log: Path
) -> None:
    """The link's target is not read and not written."""
    target = home.parent / "target"
    target.write_text("mine")

    async with Store(home) as cp:
        log.symlink_to(target)

        for use in (cp.load("t"), cp.append("t", [{}]), cp.delete_thread("t")):
            with pytest.raises(BackendUnavailable) as raised:
                await use

            assert raised.value.maybe_applied is False

    assert target.read_text() == "mine"


async def test_a_log_that_cannot_be_read_ends_only_lists_that_may_have_it(
    home: Path, log: Path
) -> None:
    """It belongs to another user, or the disk fails; here it is a folder."""
    async with Store(home) as cp:
        await cp.append("other", [{}])

    log.mkdir()

    async with Store(home) as cp:
        (info,) = await cp.list_threads(prefix="other")
        assert info.thread_id == "other"

        with pytest.raises(BackendUnavailable, match="Is a directory"):
            await cp.list_threads()


async def test_a_file_in_the_place_of_the_folder_is_unavailable(home: Path) -> None:
    """The error has the store's name."""
    home.write_text("mine")

    with pytest.raises(BackendUnavailable) as raised:
        await Store(home).__aenter__()

    assert raised.value.maybe_applied is False
    assert str(home) in str(raised.value)
    assert home.read_text() == "mine"


async def test_a_copy_that_lost_what_was_empty_is_a_store(home: Path) -> None:
    """git and some archives leave empty folders out."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))

    for register in (home / "used-keys").iterdir():
        if not register.stat().st_size:
            register.unlink()

    async with Store(home) as cp:
        assert await cp.find_call("key") is not None

        for i in range(40):
            assert await cp.find_call(f"free {i}") is None
            call = ToolCall(f"c{i}", "tool", {}, f"free {i}")
            assert await cp.record_issued("t", call) is None

    os.rename(home / "threads", home.parent / "gone")
    (home / "used-keys").rename(home.parent / "gone too")

    async with Store(home) as cp:
        assert await cp.append("t", [{}]) == 1
        assert await cp.record_issued("t", ToolCall("c", "tool", {}, "key")) is None
