"""Import of transcripts, coding-agent sessions and sessions of the Agents SDK."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from agents import SQLiteSession

from cpkit import Checkpointer, MemoryCheckpointer, open_checkpointer
from cpkit.integrations.openai_agents import Session
from cpkit.sessions import SessionLog
from cpkit.tools.importing import BadSource, Report, import_from
from tests.sessions.spy import RangeSpy
from tests.stores import LAYERED, fresh_url

SAMPLES = Path(__file__).parents[3] / "shared" / "data"

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
HI: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "name": "count", "args": {"n": [1.0]}}],
}
BYE: dict[str, Any] = {"role": "tool", "tool_call_id": "1", "content": "b\0ye"}


@pytest.fixture(params=LAYERED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store in turn."""
    return fresh_url(request.param, tmp_path)


def written(path: Path, *lines: Any, end: str = "\n") -> Path:
    """Write a JSONL file; a str is written unchanged."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(texts) + end, encoding="utf-8")
    return path


async def messages(cp: Checkpointer[Any], thread_id: str) -> list[Any]:
    data = await cp.load(thread_id)
    return [] if data is None else data.messages


def statuses(report: Report) -> dict[str | None, str]:
    return {thread.thread_id: thread.status for thread in report.threads}


def lefts(report: Report) -> dict[str, int]:
    return {reason: len(names) for reason, names in report.left.items()}


async def test_each_line_may_be_a_conversation(url: str, tmp_path: Path) -> None:
    """Its thread id is in the line, or made of file name and line number."""
    name = tmp_path.name
    path = written(
        tmp_path / f"{name}.jsonl",
        {"thread_id": f"{name}-a", "messages": [HELLO, HI, BYE], "reward": 1},
        {"messages": [HELLO]},
        "",
        [HELLO, HI],
    )

    async with open_checkpointer(url) as cp:
        report = await import_from(str(path), cp)
        assert (report.kind, report.ok) == ("transcripts", True)
        assert (report.read, report.written) == (6, 6)
        assert lefts(report) == {"field 'reward' is not a message": 1}
        assert await messages(cp, f"{name}-a") == [HELLO, HI, BYE]
        assert await messages(cp, f"{name}:2") == [HELLO]
        assert await messages(cp, f"{name}:4") == [HELLO, HI]
        again = await import_from(str(path), cp)
        assert {*statuses(again).values()} == {"there"}
        assert again.written == 0


async def test_each_line_may_be_a_message(tmp_path: Path) -> None:
    """The file is one conversation, may grow, and may end unfinished."""
    path = written(tmp_path / "talk.jsonl", HELLO, HI, '{"role": "us', end="")

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(path), cp)
        assert statuses(report) == {"talk": "new"}
        assert lefts(report) == {"a last line that was not finished": 1}
        written(path, HELLO, HI, BYE)
        report = await import_from(str(path), cp)
        assert statuses(report) == {"talk": "grown"}
        assert (report.written, report.left) == (1, {})
        assert await messages(cp, "talk") == [HELLO, HI, BYE]


async def test_a_file_may_come_from_windows(tmp_path: Path) -> None:
    """A byte order mark and the ends of lines are not part of the messages."""
    path = tmp_path / "talk.jsonl"
    lines = [json.dumps(one) for one in (HELLO, HI)]
    path.write_text("".join(f"{one}\r\n" for one in lines), encoding="utf-8-sig")

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(path), cp)
        assert report.left == {}
        assert await messages(cp, "talk") == [HELLO, HI]


async def test_each_reason_is_counted(tmp_path: Path) -> None:
    """Lines that cannot be imported are named, and the others imported."""
    path = written(
        tmp_path / "mixed.jsonl",
        {"messages": [HELLO]},
        "not json",
        {"messages": [{"content": "no role"}]},
        {"messages": []},
        {"messages": [HELLO], "thread_id": "x" * 600},
        {"other": 1},
        '{"messages": [{"role": "us',
        end="",
    )

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(path), cp)

    assert not report.ok
    assert report.counts("new") == 1
    assert lefts(report) == {
        "not JSON": 1,
        "a message without a role": 1,
        "no messages": 1,
        "thread id has 600 bytes of UTF-8; 512 is the limit": 1,
        "neither messages nor a message with a role": 1,
        "a last line that was not finished": 1,
    }


async def test_an_unknown_form_of_a_tool_call_is_named(tmp_path: Path) -> None:
    """It is stored as it is; no other program of cpkit will read it."""
    call = {"role": "assistant", "content": [{"toolUse": {"name": "pay"}}]}
    path = written(tmp_path / "talk.jsonl", HELLO, HI, call)

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(path), cp)
        assert report.ok
        assert lefts(report) == {
            "a tool call in an unknown form (toolUse) is stored unchanged": 1
        }
        assert await messages(cp, "talk") == [HELLO, HI, call]


async def test_text_comes_as_it_was_written(url: str, tmp_path: Path) -> None:
    """A lone surrogate is kept, and two escapes of one character are one."""
    name = tmp_path.name
    cut = {"role": "tool", "content": "cut \ud83d", "\udfff": 1}
    smile = {"role": "user", "content": "😀"}
    escaped = json.dumps({"id": f"{name}-t", "messages": [cut, smile]})
    assert r"\ud83d\ude00" in escaped
    talk = written(tmp_path / "talk.jsonl", escaped)
    sessions = tmp_path / "sessions"
    written(sessions / "s.jsonl", *session_lines(f"{name}-s", "cut \ud83d", "😀"))
    own = SQLiteSession(f"{name}-o", tmp_path / "sessions.db")
    await own.add_items([cut, smile])  # type: ignore[list-item]  # any JSON will do
    assert await own.get_items() == [cut, smile]
    own.close()

    async with open_checkpointer(url) as cp:
        for source in (talk, sessions, tmp_path / "sessions.db"):
            report = await import_from(str(source), cp)
            assert (report.ok, report.left) == (True, {})
            again = await import_from(str(source), cp)
            assert {*statuses(again).values()} == {"there"}

        assert await messages(cp, f"{name}-t") == [cut, smile]
        assert await Session(f"{name}-o", cp).get_items() == [cut, smile]
        log = await SessionLog.open(cp, f"{name}-s")
        said = [one["content"] for one in log.context().messages]
        assert said == ["cut \ud83d", "😀"]


MISSING = "[cpkit: not stored: "


async def test_a_corrupt_line_costs_no_neighbour(tmp_path: Path) -> None:
    """A message in its place says what is missing; --skip-corrupt leaves it out."""
    path = written(tmp_path / "talk.jsonl", HELLO, "broken", '{"no": "role"}', BYE)
    flaws = {"not JSON": 1, "neither messages nor a message with a role": 1}

    async with open_checkpointer("memory://") as cp:
        for status in ("new", "there"):
            report = await import_from(str(path), cp)
            assert (statuses(report), lefts(report)) == ({"talk": status}, flaws)

        first, *placeholders, last = await messages(cp, "talk")
        assert [first, last] == [HELLO, BYE]
        assert [one["role"] for one in placeholders] == ["system", "system"]
        assert placeholders[0]["content"] == f"{MISSING}line 2: not JSON]"

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(path), cp, skip_corrupt=True)
        assert report.ok
        assert lefts(report) == flaws
        assert await messages(cp, "talk") == [HELLO, BYE]


async def test_a_message_that_cannot_be_stored_costs_no_neighbour(
    tmp_path: Path,
) -> None:
    """Numbers that JSON lacks, a line without an object, and one nested too deep."""
    deep = json.dumps(BYE | {"deep": 1})[:-2] + "[" * 400 + "]" * 400 + "}"
    infinite = json.dumps({**HI, "n": float("inf")})
    talk = written(tmp_path / "talk.jsonl", HELLO, infinite, deep)
    item: Any = {"type": "function_call", "call_id": "c"}
    line = {"id": "line", "messages": [HELLO, 7, item, {**BYE, "n": float("nan")}]}
    lines = written(tmp_path / "lines.jsonl", line)
    own = SQLiteSession("own", tmp_path / "sessions.db")
    await own.add_items([HELLO, {**HI, "n": float("nan")}])  # type: ignore[list-item]  # any JSON will do
    own.close()

    async with open_checkpointer("memory://") as cp:
        for status in ("new", "there"):
            for source in (talk, lines, tmp_path / "sessions.db"):
                report = await import_from(str(source), cp)
                assert {*statuses(report).values()} == {status}
                assert report.left

        first, second, third = await messages(cp, "talk")
        assert first == HELLO
        assert second == {**HI, "n": f"{MISSING}inf is not a JSON number]"}
        assert third.keys() == BYE.keys() | {"deep"}
        first, number, second, third = await messages(cp, "line")
        assert [first, second] == [HELLO, item]
        assert number == {
            "role": "system",
            "content": f"{MISSING}message 1 is not an object]",
        }
        assert third == {**BYE, "n": f"{MISSING}nan is not a JSON number]"}
        items: Any = await Session("own", cp).get_items()
        assert items == [HELLO, {**HI, "n": f"{MISSING}nan is not a JSON number]"}]


async def test_a_thread_with_other_messages_is_left(tmp_path: Path) -> None:
    """A thread that has all messages and more is complete."""
    path = written(
        tmp_path / "t.jsonl",
        {"id": "other", "messages": [HELLO, BYE]},
        {"id": "longer", "messages": [HELLO]},
        {"id": "one", "messages": [{**HELLO, "n": 1}]},
    )

    async with open_checkpointer("memory://") as cp:
        await cp.append("other", [HELLO, HI])
        await cp.append("one", [{**HELLO, "n": True}])  # equal in Python
        await cp.append("longer", [HELLO, HI])
        report = await import_from(str(path), cp)
        assert statuses(report) == {"other": "left", "longer": "there", "one": "left"}
        assert lefts(report) == {"the thread in the store has other messages": 2}
        assert await messages(cp, "other") == [HELLO, HI]


async def test_a_message_that_is_too_large_costs_no_neighbour(tmp_path: Path) -> None:
    """Its text is missing, and that is reported; all need several appends."""
    big = {"role": "user", "content": "x" * 2000}
    path = written(tmp_path / "t.jsonl", [HELLO, big, *[HI] * 90, BYE])

    async with open_checkpointer("memory://?max_payload=1000&max_append=3000") as cp:
        for status in ("new", "there"):
            report = await import_from(str(path), cp)
            assert statuses(report) == {"t:1": status}
            reason = "2002 bytes are more than the store takes"
            assert lefts(report) == ({reason: 1} if status == "new" else {})

        stored = await messages(cp, "t:1")
        assert stored.pop(1) == {
            "role": "user",
            "content": f"[cpkit: not stored: {reason}]",
        }
        assert stored == [HELLO, *[HI] * 90, BYE]
        written(path, [HELLO, {**big, "role": "tool"}, BYE])
        report = await import_from(str(path), cp)
        assert statuses(report) == {"t:1": "left"}


async def test_the_next_import_completes_an_interrupted_one(tmp_path: Path) -> None:
    """A lost answer to an append duplicates nothing."""
    lines = [{"id": str(n), "messages": [HELLO, HI]} for n in range(5)]
    path = written(tmp_path / "t.jsonl", *lines)

    async with MemoryCheckpointer[Any]() as inner:
        cp = RangeSpy(inner)
        cp.faults.extend(["", "lost after", "lost before"])
        cp.gate.clear()
        first = asyncio.create_task(import_from(str(path), cp))
        await cp.waiting.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        cp.gate.set()
        report = await import_from(str(path), cp)
        assert report.ok

        for number in range(5):
            assert await messages(inner, str(number)) == [HELLO, HI]


async def test_concurrent_imports_write_each_conversation_once(
    url: str, tmp_path: Path
) -> None:
    """The slower one finds the messages of the other."""
    name = tmp_path.name
    lines = [{"id": f"{name}-{n}", "messages": [HELLO, HI, BYE]} for n in range(8)]
    path = str(written(tmp_path / "t.jsonl", *lines))

    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        reports = await asyncio.gather(
            import_from(path, one), import_from(path, two), import_from(path, one)
        )
        assert all(report.ok for report in reports)
        assert sum(report.written for report in reports) == 24

        for line in lines:
            assert await messages(one, str(line["id"])) == line["messages"]


def session_lines(session_id: str, *texts: str) -> list[Any]:
    header = {"type": "session", "id": session_id, "timestamp": "2026-01-01T00:00:00Z"}
    said = [
        {"type": "message", "message": {"role": "user", "content": text}}
        for text in texts
    ]
    return [header, *said]


async def test_a_folder_of_sessions_is_imported(url: str, tmp_path: Path) -> None:
    """Each file becomes a session, in any version; a bad line is replaced."""
    folder, name = tmp_path / "sessions", tmp_path.name
    written(folder / "a.jsonl", *session_lines(f"{name}-a", "one", "two"))
    written(folder / "b.jsonl", *session_lines(f"{name}-b", "one"), "broken", "{}")
    written(folder / "c.jsonl", {"no": "session"})
    written(folder / "notes.txt", "not looked at")

    async with open_checkpointer(url) as cp:
        report = await import_from(str(folder), cp)
        assert report.kind == "sessions"
        assert (report.counts("new"), report.counts("left")) == (2, 1)
        log = await SessionLog.open(cp, f"{name}-a")
        assert [m["content"] for m in log.context().messages] == ["one", "two"]

        written(folder / "a.jsonl", *session_lines(f"{name}-a", "one", "two", "three"))
        report = await import_from(str(folder), cp)
        assert statuses(report) == {
            f"{name}-a": "grown",
            f"{name}-b": "there",
            None: "left",
        }
        assert lefts(report) == {"a line that is not an entry": 2, "no type": 1}
        written(folder / "b.jsonl", *session_lines(f"{name}-d", "one"), "broken", "{}")
        report = await import_from(str(folder), cp, skip_corrupt=True)
        assert statuses(report)[f"{name}-d"] == "new"
        assert len((await SessionLog.open(cp, f"{name}-b")).entries) == 3
        assert len((await SessionLog.open(cp, f"{name}-d")).entries) == 1
        assert [entry["type"] for entry in await log.refresh()] == ["message"]


async def test_files_of_one_name_are_not_mixed(tmp_path: Path) -> None:
    """Two folders may have a file of one name; the second one is left, and named."""
    written(tmp_path / "ann" / "chat.jsonl", HELLO)
    written(tmp_path / "bob" / "chat.jsonl", HELLO, HI)
    written(tmp_path / "bob" / "more.jsonl", {"messages": [HELLO]})
    written(tmp_path / "eve" / "more.jsonl", {"messages": [HELLO]}, {"messages": [HI]})

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(tmp_path), cp)
        assert await messages(cp, "chat") == [HELLO]
        assert (report.counts("new"), report.counts("left")) == (3, 2)
        assert [name for names in report.left.values() for name in names] == [
            f"{tmp_path}/bob/chat.jsonl",
            f"{tmp_path}/eve/more.jsonl, line 1",
        ]
        assert not report.ok


async def test_sessions_of_the_agents_sdk_are_imported(
    url: str, tmp_path: Path
) -> None:
    """The session may grow in the source or in the store afterwards."""
    path, name = tmp_path / "sessions.db", tmp_path.name
    ids = [f"{name}-a", f"{name}'; --", f"{name}-é"]
    items: list[Any] = [HELLO, BYE, {"role": "user", "content": "é"}]

    for session_id in ids:
        own = SQLiteSession(session_id, path)
        await own.add_items(items)
        await own.pop_item()
        await own.add_items([HI])  # type: ignore[list-item]  # any JSON will do
        own.close()

    async with open_checkpointer(url) as cp:
        report = await import_from(str(path), cp)
        assert (report.kind, report.ok) == ("openai-agents", True)
        assert (report.read, report.counts("new")) == (9, 3)

        for session_id in ids:
            session = Session(session_id, cp)
            assert [*await session.get_items()] == [HELLO, BYE, HI]

        assert await session.pop_item() == HI
        again = await import_from(str(path), cp)
        assert {*statuses(again).values()} == {"there"}

        own = SQLiteSession(ids[0], path)
        await own.add_items([HELLO])  # type: ignore[list-item]  # likewise
        own.close()
        grown = await import_from(str(path), cp)
        assert (grown.counts("grown"), grown.written) == (1, 1)
        assert len(await Session(ids[0], cp).get_items()) == 4
        assert await session.get_items() == [HELLO, BYE]


async def test_tables_are_recognized_by_their_columns(
    tmp_path: Path,
) -> None:
    """Rows that are not JSON are left, as in the SDK."""
    path = tmp_path / "sessions.db"
    own = SQLiteSession("s", path, "my_sessions", "my_messages")
    await own.add_items([HELLO])  # type: ignore[list-item]  # any JSON will do
    own.close()

    with sqlite3.connect(path) as connection:
        connection.execute(
            "INSERT INTO my_messages (session_id, message_data) VALUES ('s', '{')"
        )

    connection.close()

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(path), cp)
        assert lefts(report) == {"not JSON": 1}
        assert [*await Session("s", cp).get_items()] == [HELLO]


async def test_a_bad_source_is_explained(tmp_path: Path) -> None:
    """The error names the source and what to do."""
    empty = tmp_path / "empty"
    empty.mkdir()
    text = written(tmp_path / "text.jsonl", "hello")
    exported = written(tmp_path / "export.jsonl", {"cpkit_export": 1}, {"thread": "t"})
    (tmp_path / "other.db").touch()
    connection = sqlite3.connect(tmp_path / "other.db")
    connection.execute("CREATE TABLE t (a)")
    connection.close()
    torn = tmp_path / "torn.db"
    torn.write_bytes(b"SQLite format 3\0" + b"x" * 200)
    # Detecting the kind would consume its beginning.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async with open_checkpointer("memory://") as cp:
        for source, sentence in {
            str(tmp_path / "nothing"): "no such file or folder",
            "": "is empty",
            str(pipe): "pipe: neither a file nor a folder",
            str(empty): "no \\*.jsonl file",
            str(text): "--kind says what it is",
            str(tmp_path / "other.db"): "without checkpoints of LangGraph or sessions",
            str(torn): "torn.db: ",
            str(exported): "an export of cpkit; 'cpkit copy'",
            "redis://localhost": "cpkit copy",
        }.items():
            with pytest.raises(BadSource, match=sentence):
                await import_from(source, cp)

        with pytest.raises(
            BadSource, match="unknown kind 'csv'; the kinds are langgraph-sq"
        ):
            await import_from(str(text), cp, kind="csv")

        report = await import_from(str(text), cp, kind="transcripts")
        assert lefts(report) == {"no chat messages in this file": 1}


@pytest.mark.skipif(not SAMPLES.exists(), reason="the samples are not shipped")
async def test_real_samples_are_imported() -> None:
    """A hundred conversations of an airline's agent and a coding session."""
    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(SAMPLES / "airline_transcripts.jsonl"), cp)
        assert (report.counts("new"), report.counts("left")) == (100, 0)
        assert lefts(report) == {"field 'reward' is not a message": 100}
        report = await import_from(str(SAMPLES / "pi_session_v1.jsonl"), cp)
        assert (report.read, report.written, report.ok) == (1019, 1019, True)
        (session,) = statuses(report)
        assert len((await SessionLog.open(cp, str(session))).entries) == 1018
