"""The context that a branch gives."""

from __future__ import annotations

from typing import Any

import pytest

from cpkit.effects import Effect, EffectLedger, EffectTimeout
from cpkit.sessions import Model, SessionLog
from tests.sessions.conftest import Store
from tests.sessions.talk import assistant, result, texts, user


@pytest.fixture
async def log(cp: Store, session_id: str) -> SessionLog:
    """An empty session."""
    return await SessionLog.open(cp, session_id)


async def test_an_empty_session_has_an_empty_context(log: SessionLog) -> None:
    """It has no model, and thinking is off."""
    context = log.context()
    assert (context.messages, context.state, context.missing_results) == ([], {}, [])
    assert (context.model, context.thinking_level, context.compaction) == (
        None,
        "off",
        None,
    )


async def test_an_assistant_message_sets_the_default_model(log: SessionLog) -> None:
    """A later message or model change replaces it."""
    await log.append_model_change("lab", "large")
    await log.append_message(assistant("hi", model="small"))
    assert log.context().model == Model("lab", "small")

    await log.append_message({"role": "assistant", "content": "hi", "model": "bare"})
    assert log.context().model == Model(None, "bare")

    await log.append_message({"role": "assistant", "content": "who am I?"})
    await log.append_message({"role": "user", "content": "x", "model": "mine"})
    assert log.context().model == Model(None, "bare")

    await log.append_model_change("lab", "large")
    assert log.context().model == Model("lab", "large")


async def test_settings_belong_to_the_branch(log: SessionLog) -> None:
    """Settings of other branches, or of later entries, do not apply."""
    start = await log.append_message(user("hello"))
    await log.append_model_change("lab", "large")
    await log.append_thinking_level("high")
    await log.append_state(plan=["deep"])
    await log.move_to(start)
    context = log.context()
    assert (context.model, context.thinking_level, context.state) == (None, "off", {})


async def test_only_messages_are_shown(log: SessionLog) -> None:
    """Custom messages and branch summaries are messages; other entries are not."""
    first = await log.append_message(user("one"))
    await log.append_custom("note", {"text": "private"})
    await log.append_state(spent=1)
    await log.append_custom_message("hint", "be brief", details={"by": "me"})
    await log.append_custom_message("hint", "be kind", display=False)
    await log.label(first, "start")
    await log.set_name("Trip")
    await log.append_entry({"type": "weather", "message": user("rain")})
    await log.append_message(assistant("two"))
    left = log.leaf_id
    moved = await log.move_to(left, "went wrong")
    stamps = {entry["id"]: entry["timestamp"] for entry in log.entries}

    shown = log.context().messages
    assert texts(shown) == ["one", "be brief", "be kind", "two", "went wrong"]
    assert shown[1].pop("timestamp") > 1_700_000_000_000
    assert shown[1] == {
        "role": "custom",
        "customType": "hint",
        "content": "be brief",
        "display": True,
        "details": {"by": "me"},
    }
    assert "details" not in shown[2]
    assert shown[4].pop("timestamp") > 1_700_000_000_000
    assert shown[4] == {
        "role": "branchSummary",
        "summary": "went wrong",
        "fromId": left,
    }
    assert stamps[moved].endswith("Z")


async def test_registered_custom_entries_become_messages(
    cp: Store, session_id: str
) -> None:
    """The registered function returns the message, or None."""
    log = await SessionLog.open(
        cp,
        session_id,
        custom_messages={
            "note": lambda entry: user(entry["data"]) if "data" in entry else None
        },
    )
    await log.append_custom("note", "remember")
    await log.append_custom("note")
    await log.append_custom("other", "not me")
    assert texts(log.context().messages) == ["remember"]
    assert texts((await log.fork(session_id + "-fork")).context().messages) == [
        "remember"
    ]


async def test_only_the_newest_compaction_is_applied(log: SessionLog) -> None:
    """It replaces all before its first kept entry, older summaries too."""
    ids = [await log.append_message(user(str(n))) for n in range(4)]
    older = await log.append_compaction("0 and 1", ids[2], tokens_before=1)
    await log.append_message(user("4"))
    assert texts(log.context().messages) == ["0 and 1", "2", "3", "4"]

    newer = await log.append_compaction("0 to 2", ids[3], tokens_before=2)
    await log.append_message(user("5"))
    context = log.context()
    assert texts(context.messages) == ["0 to 2", "3", "4", "5"]
    assert context.compaction == log.entry(newer)
    summary = context.messages[0]
    assert summary.pop("timestamp") > 1_700_000_000_000
    assert summary == {
        "role": "compactionSummary",
        "summary": "0 to 2",
        "tokensBefore": 2,
    }
    assert texts(log.context(older).messages) == ["0 and 1", "2", "3"]
    assert texts(log.context(ids[3]).messages) == ["0", "1", "2", "3"]


async def test_a_compaction_without_kept_entries_shows_its_summary(
    cp: Store, session_id: str
) -> None:
    """If the first kept entry is not before it, only later messages follow."""
    header: dict[str, Any] = {"type": "session", "id": session_id, "version": 3}
    entries: list[dict[str, Any]] = [
        {"type": "message", "id": "a", "parentId": None, "message": user("a")},
        {"type": "compaction", "id": "b", "parentId": "a", "summary": "s"},
        {"type": "message", "id": "c", "parentId": "b", "message": user("c")},
    ]
    await cp.append(session_id, [header, *entries])
    log = await SessionLog.open(cp, session_id)
    assert texts(log.context().messages) == ["s", "c"]


async def test_settings_survive_a_compaction(log: SessionLog) -> None:
    """A summary replaces messages, not model, thinking level or state."""
    await log.append_model_change("lab", "large")
    await log.append_thinking_level("high")
    await log.append_state(plan=["a"], spent=1)
    kept = await log.append_message(user("one"))
    await log.append_compaction("sum", kept)
    await log.append_state(spent=2)
    context = log.context()
    assert context.model == Model("lab", "large")
    assert context.thinking_level == "high"
    assert context.state == {"plan": ["a"], "spent": 2}


async def test_fields_of_a_wrong_type_are_ignored(cp: Store, session_id: str) -> None:
    """Entries of other programs raise no error."""
    header: dict[str, Any] = {"type": "session", "id": session_id, "version": 3}
    strange: list[dict[str, Any]] = [
        {"type": "label", "targetId": ["a"], "label": "x"},
        {"type": "label", "targetId": "a", "label": {"no": "label"}},
        {"type": "session_info", "name": None},
        {"type": "session_info", "name": {"a": 1}},
        {"type": "session_info", "name": 5},
        {"type": "custom", "customType": ["cpkit.state"], "data": {"a": 1}},
        {"type": "custom", "customType": "cpkit.state", "data": [1]},
        {"type": "compaction", "firstKeptEntryId": {"a": 1}},
        {"type": "message", "message": {"role": ["user"], "content": 5}, "closes": []},
        {"type": "message", "message": {"role": "assistant", "content": ["x", None]}},
        {"type": "message", "message": {"role": "assistant", "tool_calls": "none"}},
        {"type": "custom_message"},
        {"type": "branch_summary"},
        {"type": "model_change"},
        {"type": "thinking_level_change"},
    ]
    entries: list[dict[str, Any]] = [
        {"id": f"e{n}", "parentId": f"e{n - 1}" if n else None, "timestamp": n, **entry}
        for n, entry in enumerate(strange)
    ]
    await cp.append(session_id, [header, *entries])
    log = await SessionLog.open(cp, session_id)
    assert log.context().state == {}
    assert len(log.context().messages) == 5
    assert all(point.time is None for point in log.versions())
    assert (log.labels, log.name) == ({}, None)


# Tool calls without a result


async def test_a_missing_result_is_reported_and_appended(log: SessionLog) -> None:
    """After a crash between call and result, closing only appends."""
    await log.append_message(user("book"))
    asked = await log.append_message(assistant("booking", "search", "book"))
    await log.append_message(result("search"))
    (missing,) = log.context().missing_results
    assert (missing.entry_id, missing.call_id, missing.tool_name) == (
        asked,
        "book",
        "book",
    )
    before = log.entries

    (closed,) = await log.close_missing_results()
    assert log.entries[:-1] == before
    shown = log.context()
    assert shown.missing_results == []
    assert [m["role"] for m in shown.messages][-2:] == ["toolResult", "toolResult"]
    synthetic = shown.messages[-1]
    assert synthetic["toolCallId"] == "book"
    assert synthetic["isError"] is True
    assert "may have had its effect" in synthetic["content"][0]["text"]
    assert log.entry(closed)["closes"] == asked
    assert await log.close_missing_results() == []


async def test_a_call_that_waits_for_a_person_stays_open(
    cp: Store, log: SessionLog
) -> None:
    """It is open until its approval is used, denied or withdrawn, as for ``heal``."""
    ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)
    await log.append_message(assistant("one", "pay", "look"))

    async def run(effect: Effect) -> str:
        return "paid"

    for decide in (None, ledger.approve):
        if decide is not None:
            (request,) = await ledger.pending(log.session_id)
            assert await decide(request.key)
        else:
            with pytest.raises(EffectTimeout):
                await ledger.run(log.session_id, "pay", {}, run)

        await log.close_missing_results()
        assert [one.call_id for one in log.context().missing_results] == ["pay"]

    assert await ledger.run(log.session_id, "pay", {}, run) == "paid"
    await log.close_missing_results()
    assert log.context().missing_results == []


async def test_a_synthetic_result_moves_behind_its_call(log: SessionLog) -> None:
    """Providers want the result right after the call."""
    await log.append_message(assistant("one", "a", "b"))
    await log.append_message(result("a", "result a"))
    await log.append_message(user("never mind"))
    await log.append_message(assistant("two", "a"))
    await log.append_message(user("hello?"))
    closed = await log.close_missing_results("gone")
    assert len(closed) == 2
    context = log.context()
    assert context.missing_results == []
    assert texts(context.messages) == [
        "one",
        "result a",
        "gone",
        "never mind",
        "two",
        "gone",
        "hello?",
    ]


async def test_a_compaction_hides_a_call_with_its_synthetic_result(
    log: SessionLog,
) -> None:
    """A synthetic result without its call is not shown."""
    await log.append_message(assistant("one", "a"))
    kept = await log.append_message(user("hello?"))
    await log.close_missing_results("gone")
    await log.append_compaction("sum", kept)
    context = log.context()
    assert texts(context.messages) == ["sum", "hello?"]
    assert context.missing_results == []


async def test_a_result_answers_the_newest_call_with_its_id(log: SessionLog) -> None:
    """An earlier call with the same id still has no result."""
    first = await log.append_message(assistant("one", "a"))
    await log.append_message(assistant("two", "a"))
    await log.append_message(result("a"))
    assert [m.entry_id for m in log.context().missing_results] == [first]


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (
            {"content": [{"type": "tool_call", "id": "c", "name": "pay", "args": {}}]},
            {
                "role": "tool",
                "tool_call_id": "c",
                "content": "gone",
                "tool_name": "pay",
                "is_error": True,
            },
        ),
        (
            {"content": None, "tool_calls": [{"id": "c", "function": {"name": "pay"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "gone"},
        ),
    ],
)
async def test_a_synthetic_result_has_the_form_of_its_call(
    log: SessionLog, call: dict[str, Any], answer: dict[str, Any]
) -> None:
    """The forms of cpkit.messages and of OpenAI's API are supported."""
    await log.append_message({"role": "assistant", **call})
    (missing,) = log.context().missing_results
    assert (missing.call_id, missing.tool_name) == ("c", "pay")
    await log.close_missing_results("gone")
    assert log.context().messages[1] == answer
    assert log.context().missing_results == []
