"""Import of transcripts of Claude Code and Codex, and of ChatGPT's export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cpkit import open_checkpointer
from cpkit.heal import heal
from cpkit.integrations.claude_agent_sdk import ClaudeSessionStore, transcript_thread
from cpkit.sessions import SessionLog
from cpkit.tools.importing import import_from
from tests.importing.test_sources import lefts, messages, statuses, written

KEY: Any = {"project_key": "-home-me", "session_id": "s-1"}


def said(uuid: str, parent: str | None, content: Any, kind: str = "user") -> Any:
    return {
        "parentUuid": parent,
        "sessionId": "s-1",
        "type": kind,
        "message": {"role": kind, "content": content, "id": f"m-{uuid}"},
        "uuid": uuid,
        "timestamp": "2026-01-01T00:00:00.000Z",
    }


def use(*names: str) -> list[Any]:
    return [
        {"type": "tool_use", "id": one, "name": "Bash", "input": {}} for one in names
    ]


SNAPSHOT = {
    "type": "file-history-snapshot",
    "messageId": "1",
    "isSnapshotUpdate": False,
}
HELLO, CALL = said("1", None, "hello"), said("2", "1", use("a"), "assistant")
END = {"type": "last-prompt", "lastPrompt": "hello", "sessionId": "s-1"}


async def test_claude_code_becomes_what_the_agent_sdk_resumes(tmp_path: Path) -> None:
    """Every entry, subagents too, under the SDK's own keys; the title is folded."""
    project = tmp_path / "-home-me"
    written(project / "s-1.jsonl", SNAPSHOT, HELLO, CALL, END)
    below = project / "s-1" / "subagents"
    below.mkdir(parents=True)
    written(below / "agent-x.jsonl", said("3", None, "task"))
    (below / "agent-x.meta.json").write_text('{"agentType": "explorer"}')
    sub: Any = {**KEY, "subpath": "subagents/agent-x"}

    async with open_checkpointer("memory://") as cp:
        for status in ("new", "there"):
            report = await import_from(str(tmp_path), cp)
            assert (report.kind, report.left) == ("claude-code", {})
            assert statuses(report) == {
                transcript_thread(KEY): status,
                transcript_thread(sub): status,
            }

        store = ClaudeSessionStore(cp)
        assert await store.load(KEY) == [SNAPSHOT, HELLO, CALL, END]
        assert await store.list_subkeys(KEY) == ["subagents/agent-x"]
        metadata = {"agentType": "explorer", "type": "agent_metadata"}
        assert await store.load(sub) == [metadata, said("3", None, "task")]
        assert await store.list_session_summaries("-home-me") == []
        written(project / "s-1.jsonl", SNAPSHOT, HELLO, CALL, END, said("4", "2", "b"))
        report = await import_from(str(project / "s-1.jsonl"), cp)
        assert statuses(report) == {transcript_thread(KEY): "grown"}
        await store.append(KEY, [HELLO, said("5", "4", "later")])
        assert len(await store.load(KEY) or []) == 6
        (summary,) = await store.list_session_summaries("-home-me")
        assert summary["data"]["first_prompt"] == "hello"


async def test_heal_closes_what_claude_code_left_open(tmp_path: Path) -> None:
    """Behind the notes at the end; the result follows the last entry with a uuid."""
    path = written(tmp_path / "-home-me" / "s-1.jsonl", HELLO, CALL, END, SNAPSHOT)

    async with open_checkpointer("memory://") as cp:
        await import_from(str(path), cp)
        report = await heal(cp, transcript_thread(KEY))
        assert [one.call_id for one in report.closed] == ["a"]
        assert report
        last: Any = (await ClaudeSessionStore(cp).load(KEY) or [])[-1]
        assert (last["parentUuid"], last["sessionId"]) == ("2", "s-1")
        assert last["message"]["content"][0]["tool_use_id"] == "a"
        assert not (await heal(cp, transcript_thread(KEY))).closed


async def test_a_lost_line_of_claude_code_keeps_the_chain(tmp_path: Path) -> None:
    """An entry that says what is missing has the uuid that the next one follows."""
    after = said("9", "lost", "after")
    infinite = {**said("10", "9", "b"), "n": float("inf")}
    lines = [HELLO, '{"uuid": "los', after, "7", infinite, '{"uuid": ']
    path = written(tmp_path / "p" / "s-1.jsonl", *lines, end="")
    flaws = {
        "not JSON": 1,
        "not an object": 1,
        "inf is not a JSON number": 1,
        "a last line that was not finished": 1,
    }
    key: Any = {**KEY, "project_key": "p"}

    async with open_checkpointer("memory://") as cp:
        for status in ("new", "there"):
            report = await import_from(str(path), cp)
            assert [*statuses(report).values()] == [status]
            assert lefts(report) == flaws

        first, lost, third, text, last = await ClaudeSessionStore(cp).load(key) or []
        assert [first, third] == [HELLO, after]
        assert (lost["uuid"], lost["parentUuid"]) == ("lost", "1")
        assert lost["sessionId"] == "s-1"
        assert "line 2: not JSON" in lost["content"]
        assert "line 4: not an object" in text["content"]
        assert last["uuid"] == "10"

    async with open_checkpointer("memory://") as cp:
        await import_from(str(path), cp, skip_corrupt=True)
        assert len(await ClaudeSessionStore(cp).load(key) or []) == 3


def item(**fields: Any) -> Any:
    stamp = "2026-01-01T00:00:00.000Z"
    return {"timestamp": stamp, "type": "response_item", "payload": fields}


META = {"timestamp": "t", "type": "session_meta", "payload": {"id": "c-1", "cwd": "/"}}
COUNT = {"timestamp": "t", "type": "event_msg", "payload": {"type": "token_count"}}


def call(call_id: str, kind: str = "function_call") -> Any:
    return item(type=kind, call_id=call_id, name="shell", arguments="{}")


async def test_codex_becomes_a_thread_of_its_lines(tmp_path: Path) -> None:
    """Unchanged, under the session's id; heal closes the calls without outputs."""
    answer = item(type="function_call_output", call_id="a", output="ok")
    lines = [META, call("gone"), {"timestamp": "t", "type": "compacted", "payload": {}}]
    lines += [call("a"), answer, call("b"), call("c", "custom_tool_call"), COUNT]
    path = written(tmp_path / "2026" / "rollout-2026-01-01T00-00-00-c-1.jsonl", *lines)

    async with open_checkpointer("memory://") as cp:
        for status in ("new", "there"):
            report = await import_from(str(tmp_path), cp)
            assert (report.kind, report.left) == ("codex", {})
            assert statuses(report) == {"c-1": status}

        assert await messages(cp, "c-1") == lines
        closed = (await heal(cp, "c-1")).closed
        assert [one.call_id for one in closed] == ["b", "c"]
        added = [one["payload"] for one in (await messages(cp, "c-1"))[len(lines) :]]
        assert [(one["type"], one["call_id"]) for one in added] == [
            ("function_call_output", "b"),
            ("custom_tool_call_output", "c"),
        ]
        assert not (await heal(cp, "c-1")).closed
        written(path, *lines, "{", item(type="message", role="user", content=[]))
        report = await import_from(str(path), cp)
        assert statuses(report) == {"c-1": "left"}  # it went on in both places


async def test_older_sessions_of_codex_have_no_envelopes(tmp_path: Path) -> None:
    """The first line has the id, and the items stand in their lines."""
    head: Any = {"id": "old", "timestamp": "t", "instructions": None, "git": {}}
    bare = {"type": "local_shell_call", "call_id": "a", "action": {}}
    lines = [head, {"record_type": "state"}, bare]
    path = written(tmp_path / "rollout-old.jsonl", *lines, json.dumps(bare)[:-9], "{}")

    async with open_checkpointer("memory://") as cp:
        report = await import_from(str(path), cp)
        assert (report.kind, lefts(report)) == ("codex", {"not JSON": 1})
        *stored, lost, last = await messages(cp, "old")
        assert [*stored, last] == [*lines, {}]
        assert "line 4: not JSON" in lost["payload"]["message"]
        await heal(cp, "old")
        (*_, closing) = await messages(cp, "old")
        assert closing["type"] == "function_call_output"
        assert closing["call_id"] == "a"


def node(
    node_id: str, parent: str | None, role: str = "", *parts: Any, at: float = 0.5
) -> Any:
    message = role and {
        "id": node_id,
        "author": {"role": role},
        "create_time": 1_700_000_000 + at,
        "content": {"content_type": "text", "parts": [*parts]},
    }
    return {"id": node_id, "parent": parent, "message": message or None}


async def test_a_conversation_of_chatgpt_becomes_a_session(tmp_path: Path) -> None:
    """With every branch; the newest message is the leaf, and it may go on."""
    nodes = [
        node("root", None),
        node("new", "ask", "assistant", "better", at=7),
        node("ask", "root", "user", "hello", "you"),
        node("old", "ask", "assistant", "worse", at=2),
        node("image", "new", "user", {"asset_pointer": "file"}, at=9),
    ]
    talk: Any = {
        "title": "A talk",
        "create_time": 1_700_000_000,
        "mapping": {one["id"]: one for one in nodes},
        "conversation_id": "g-1",
    }
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([talk, {"id": "g-2"}, {**talk, "conversation_id": 7}]))

    async with open_checkpointer("memory://") as cp:
        for status in ("new", "there"):
            report = await import_from(str(path), cp)
            assert report.kind == "chatgpt"
            assert [one.status for one in report.threads] == [status, "left", "left"]

        log = await SessionLog.open(cp, "g-1")
        assert (log.name, log.orphans) == ("A talk", [])
        assert log.leaf_id == "image"
        assert set(log.leaves()) == {"old", "image"}
        said = [(one["role"], one["content"]) for one in log.context("new").messages]
        assert said == [("user", "hello\nyou"), ("assistant", "better")]
        assert log.entry("ask")["timestamp"] == "2023-11-14T22:13:20.500Z"
        kept = log.entry("image")["chatgpt"]["content"]["parts"]
        assert kept == [{"asset_pointer": "file"}]
        # The conversation went on with the other answer.
        talk["mapping"]["more"] = node("more", "old", "user", "go on", at=11)
        path.write_text(json.dumps([talk]))
        report = await import_from(str(path), cp)
        assert [one.status for one in report.threads] == ["grown"]
        assert (await SessionLog.open(cp, "g-1")).leaf_id == "more"
