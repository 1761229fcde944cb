"""Tool calls without a result are closed, in the messages of every framework."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agents import TResponseInputItem
from cubeloop import Message
from google.adk.events import Event
from openai.types.responses import ResponseInputItemParam
from pydantic import TypeAdapter
from pydantic_ai.messages import ModelMessagesTypeAdapter

from cpkit import MemoryCheckpointer, VersionConflict, open_checkpointer
from cpkit.effects import Effect, EffectLedger, EffectTimeout
from cpkit.heal import HealReport, heal
from cpkit.integrations.claude_agent_sdk import ClaudeSessionStore
from cpkit.integrations.google_adk import SessionService
from cpkit.integrations.openai_agents import Session
from tests.sessions.spy import Spy
from tests.stores import LAYERED, fresh_url

ASK: dict[str, Any] = {"role": "user", "content": "pay"}

# Two calls, a and b, as each framework stores them.
HISTORIES: dict[str, list[Any]] = {
    "openai": [
        ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": one, "type": "function", "function": {"name": "pay"}}
                for one in "ab"
            ],
        },
    ],
    "cpkit": [
        ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_call", "id": one, "name": "pay", "args": {}}
                for one in "ab"
            ],
        },
    ],
    "cubeloop": [
        {"role": "user", "content": [{"type": "text", "text": "pay"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_call", "id": one, "name": "pay", "arguments": {}}
                for one in "ab"
            ],
        },
    ],
    "anthropic": [
        ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": one, "name": "pay", "input": {}}
                for one in "ab"
            ],
        },
    ],
    "session": [
        ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "toolCall", "id": one, "name": "pay", "arguments": {}}
                for one in "ab"
            ],
        },
    ],
    "pydantic-ai": [
        {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "pay"}]},
        {
            "kind": "response",
            "parts": [
                {"part_kind": "tool-call", "tool_name": "pay", "tool_call_id": one}
                for one in "ab"
            ],
        },
    ],
    "claude": [
        {"entry": {"type": "user", "uuid": "1", "message": ASK}, "by": "x"},
        {
            "entry": {
                "type": "assistant",
                "uuid": "2",
                "parentUuid": "1",
                "sessionId": "s",
                "message": {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": one, "name": "pay", "input": {}}
                        for one in "ab"
                    ],
                },
            },
            "by": "y",
            "summary": {"opaque": 1},
        },
    ],
    "agents": [
        {"item": ASK, "by": "x"},
        *(
            {
                "item": {
                    "type": "function_call",
                    "call_id": one,
                    "name": "pay",
                    "arguments": "{}",
                },
                "by": "y",
            }
            for one in "ab"
        ),
    ],
    "adk": [
        {"created": "x"},
        {
            "event": {
                "id": "e1",
                "author": "agent",
                "invocation_id": "i",
                "timestamp": 1.0,
                "content": {
                    "role": "model",
                    "parts": [
                        {"function_call": {"id": one, "name": "pay", "args": {}}}
                        for one in "ab"
                    ],
                },
            }
        },
    ],
}


async def pay(effect: Effect) -> Any:
    return {"paid": effect.args["amount"]}


async def pay_of(effect: Effect) -> Any:
    return "paid"


async def ran(cp: Any, thread_id: str, tool_call_id: str) -> None:
    """Run an effect as the tool of a model's call does."""
    await EffectLedger(cp).run(
        thread_id, "pay", {"amount": 7}, pay, tool_call_id=tool_call_id
    )


@pytest.mark.parametrize("form", HISTORIES)
async def test_recorded_and_interrupted_results(form: str) -> None:
    """Call a has a recorded result, and b has none; nothing is left then."""
    async with MemoryCheckpointer[Any]() as cp:
        await cp.append("t", HISTORIES[form])
        await ran(cp, "t", "a")
        report = await heal(cp, "t")
        assert [(one.call_id, one.source) for one in report.closed] == [
            ("a", "recorded"),
            ("b", "interrupted"),
        ]
        assert report
        data = await cp.load("t")
        assert data is not None
        added = json.dumps(data.messages[len(HISTORIES[form]) :])
        assert '{\\"paid\\": 7}' in added
        assert "interrupted" in added
        again = await heal(cp, "t")
        assert (again.closed, again.left) == ((), ())
        assert await cp.load("t") == data


@pytest.mark.parametrize("form", HISTORIES)
async def test_half_a_character_is_given_to_the_call(form: str) -> None:
    """The result of an effect may be cut in the middle of one."""

    async def fetch(effect: Effect) -> Any:
        return "cut \ud83d"

    async with MemoryCheckpointer[Any]() as cp:
        await cp.append("t", [{"role": "user", "content": "\udfff"}])
        await cp.append("t", HISTORIES[form])
        await EffectLedger(cp).run("t", "pay", {}, fetch, tool_call_id="a")
        report = await heal(cp, "t")
        assert [one.source for one in report.closed] == ["recorded", "interrupted"]
        assert r"cut \ud83d" in json.dumps(await cp.read("t", -2))


async def test_the_frameworks_read_what_was_added() -> None:
    """Each result has the form of its framework."""
    async with MemoryCheckpointer[Any]() as cp:
        for form in ("cubeloop", "pydantic-ai", "agents", "adk"):
            await cp.append(form, HISTORIES[form])
            await heal(cp, form)

        data = {form: await cp.read(form) for form in ("cubeloop", "pydantic-ai")}
        TypeAdapter(list[Message]).validate_python(data["cubeloop"])
        (*_, last) = ModelMessagesTypeAdapter.validate_python(data["pydantic-ai"])
        assert [part.part_kind for part in last.parts] == ["tool-return"] * 2
        (*_, item) = await cp.read("agents")
        items: TypeAdapter[TResponseInputItem] = TypeAdapter(ResponseInputItemParam)
        items.validate_python(item["item"])
        (*_, event) = await cp.read("adk")
        responses = Event.model_validate(event["event"]).get_function_responses()
        assert [one.id for one in responses] == ["a", "b"]


@pytest.mark.parametrize("kind", LAYERED)
async def test_adapters_go_on_after_it(kind: str, tmp_path: Any) -> None:
    """Each adapter reads the healed thread, and appends to it."""
    async with open_checkpointer(fresh_url(kind, tmp_path)) as cp:
        session = Session("s", cp)
        await session.add_items([one["item"] for one in HISTORIES["agents"]])
        await ran(cp, "s", "a")
        assert len((await heal(cp, session.thread_id)).closed) == 2
        items: Any = await session.get_items()
        assert [one.get("type") for one in items[-2:]] == ["function_call_output"] * 2
        assert items[-2]["output"] == '{"paid": 7}'

        store = ClaudeSessionStore(cp)
        key: Any = {"project_key": "p", "session_id": "s"}
        await store.append(key, [one["entry"] for one in HISTORIES["claude"]])
        await heal(cp, "cpkit:claude-agent-sdk:p/s/")
        entries: Any = await store.load(key)
        assert [one["parentUuid"] for one in entries[-2:]] == ["2", entries[-2]["uuid"]]
        assert len(await store.list_session_summaries("p")) == 1
        await store.append(key, [{"type": "user", "uuid": "9"}])

        service = SessionService(cp)
        ids: Any = {"app_name": "app", "user_id": "u", "session_id": "s"}
        live = await service.create_session(**ids)
        event = Event.model_validate(HISTORIES["adk"][1]["event"])
        await service.append_event(live, event)
        await heal(cp, "cpkit:google-adk:app/u/s")
        fresh: Any = await service.get_session(**ids)
        assert len(fresh.events[-1].get_function_responses()) == 2
        await service.append_event(fresh, Event(author="user"))


async def test_an_unknown_outcome_is_left(cp: MemoryCheckpointer[Any]) -> None:
    """The effect may have happened: a person or verify decides first."""
    await cp.append("t", HISTORIES["openai"])
    ledger = EffectLedger(cp)
    begun = await ledger.begin("t", "pay", {"amount": 7}, tool_call_id="a")
    report = await heal(cp, "t")
    assert not report
    assert [one.call_id for one in report.left] == ["a"]
    assert [one.call_id for one in report.closed] == ["b"]
    assert "recover" in str(report)
    await ledger.commit(begun.record, "paid")
    assert [one.source for one in (await heal(cp, "t")).closed] == ["recorded"]


@pytest.mark.parametrize("place", ["its own", "another"])
async def test_a_call_that_waits_for_a_person_is_left(
    place: str, cp: MemoryCheckpointer[Any]
) -> None:
    """It is open until its approval is used, denied or withdrawn."""
    calls = [openai_call("a"), {**openai_call("b"), "function": {"name": "look"}}]
    history = {"role": "assistant", "content": None, "tool_calls": calls}
    ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)

    async def run(thread: str) -> Any:
        where, args = thread if place == "its own" else f"sub {thread}", {"of": thread}
        return await ledger.run(
            where, "pay", args, pay_of, tool_call_id="a", run_thread=thread
        )

    for thread in ("t", "denied"):
        await cp.append(thread, [history])

        with pytest.raises(EffectTimeout):
            await run(thread)

    report = await heal(cp, "t")
    assert [(one.call_id, "undecided" in one.reason) for one in report.left] == [
        ("a", True)
    ]
    assert [one.call_id for one in report.closed] == ["b"]

    one, other = await ledger.requests()
    await ledger.approve(one.key)
    await ledger.deny(other.key)
    report = await heal(cp, "t")
    assert [(one.call_id, "not used" in one.reason) for one in report.left] == [
        ("a", True)
    ]
    assert [one.call_id for one in (await heal(cp, "denied")).closed] == ["a", "b"]

    assert await run("t") == "paid"
    assert [one.call_id for one in (await heal(cp, "t")).closed] == ["a"]


async def test_recover_heals_last(cp: MemoryCheckpointer[Any]) -> None:
    """`EffectLedger.recover` takes it as ``heal=``."""
    await cp.append("t", HISTORIES["openai"])
    await ran(cp, "t", "a")
    report = await EffectLedger(cp).recover("t", [], heal=heal)
    assert isinstance(report.healed, HealReport)
    assert [one.source for one in report.healed.closed] == ["recorded", "interrupted"]


async def test_a_call_behind_which_the_talk_went_on_is_left(
    cp: MemoryCheckpointer[Any],
) -> None:
    """A result at the end of the thread would not stand behind its call."""
    await cp.append("t", [*HISTORIES["openai"], ASK])
    report = await heal(cp, "t")
    assert [one.reason for one in report.left] == ["other messages follow it"] * 2
    data = await cp.load("t")
    assert data is not None
    assert data.version == 3


def openai_call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "pay"}}


async def test_calls_with_one_id_get_a_result_each(
    cp: MemoryCheckpointer[Any],
) -> None:
    """A model may repeat an id. A second heal finds nothing to do."""
    calls = {"role": "assistant", "tool_calls": [openai_call("c"), openai_call("c")]}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    await cp.append("open", [calls])
    assert len((await heal(cp, "open")).closed) == 2
    await cp.append("half", [calls, result])
    assert len((await heal(cp, "half")).closed) == 1
    await cp.append("complete", [calls, result, result])

    for thread in ("open", "half", "complete"):
        assert (await heal(cp, thread)).closed == ()
        assert len(await cp.read(thread)) == 3


@pytest.mark.parametrize("amounts", [[7], [7, 8]])
async def test_a_result_is_not_given_to_two_calls(
    cp: MemoryCheckpointer[Any], amounts: list[int]
) -> None:
    """Two open calls with one id are left, if one of them or both have a result."""
    calls = {"role": "assistant", "tool_calls": [openai_call("c"), openai_call("c")]}
    await cp.append("t", [ASK, calls])

    for amount in amounts:
        await EffectLedger(cp).run(
            "t", "pay", {"amount": amount}, pay, tool_call_id="c"
        )

    report = await heal(cp, "t")
    assert report.closed == ()
    assert [one.reason for one in report.left] == [
        "another open call has the same id, and the result may be of either"
    ] * 2
    assert len(await cp.read("t")) == 2


async def test_a_result_belongs_to_the_newest_call_of_its_id(
    cp: MemoryCheckpointer[Any],
) -> None:
    """An older call of the same id stays open."""
    call = {"role": "assistant", "tool_calls": [openai_call("c")]}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    await cp.append("t", [call, ASK, call, result])
    report = await heal(cp, "t")
    assert [one.call_id for one in report.left] == ["c"]
    assert report.closed == ()


async def test_a_repeated_id_does_not_bring_back_an_earlier_result(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Only if every call of the tool with this id has a result, the last is its own."""
    call = {"role": "assistant", "tool_calls": [openai_call("c")]}
    result = {"role": "tool", "tool_call_id": "c", "content": "first"}
    other = {**openai_call("c"), "function": {"name": "look"}}
    look = {"role": "assistant", "tool_calls": [other]}

    for thread in ("died before", "died behind", "other tool"):
        await ran(cp, thread, "c")
        await cp.append(thread, [call, result, ASK])

    await cp.append("died before", [call])
    await cp.append("died behind", [call])
    await EffectLedger(cp).run(
        "died behind", "pay", {"amount": 8}, pay, tool_call_id="c"
    )
    await cp.append("other tool", [look])

    sources = {
        thread: [one.source for one in (await heal(cp, thread)).closed]
        for thread in ("died before", "died behind", "other tool")
    }
    assert sources == {
        "died before": ["interrupted"],
        "died behind": ["recorded"],
        "other tool": ["interrupted"],
    }
    assert (await cp.read("died behind"))[-1]["content"] == '{"paid": 8}'


async def test_the_result_of_another_effect_is_not_that_of_the_call(
    cp: MemoryCheckpointer[Any],
) -> None:
    """A call that ran one of its two effects; and a call that repeats an id."""
    call = {"role": "assistant", "tool_calls": [openai_call("c")]}
    result = {"role": "tool", "tool_call_id": "c", "content": "both"}
    ledger = EffectLedger(cp)
    await cp.append("half", [call])
    await ledger.run("half", "withdraw", {"n": 1}, pay_of, tool_call_id="c")
    await cp.append("thrice", [call])

    for n in range(3):
        await ledger.run("thrice", "pay", {"n": n}, pay_of, tool_call_id="c")

    await cp.append("thrice", [result, call])

    for thread in ("half", "thrice"):
        report = await heal(cp, thread)
        assert [one.source for one in report.closed] == ["interrupted"]


PAY: Any = {"type": "function_call", "call_id": "c", "name": "pay", "arguments": ""}
PAID: Any = {"type": "function_call_output", "call_id": "c", "output": "paid"}


async def test_popped_and_cleared_items_of_a_session_do_not_count(
    cp: MemoryCheckpointer[Any],
) -> None:
    """A cleared session has its call once; a popped result leaves it open."""
    for change in ("cleared", "result popped"):
        session = Session(change, cp)
        await session.add_items([{"role": "user", "content": "pay"}, PAY])

        if change == "cleared":
            await session.clear_session()
            assert (await heal(cp, session.thread_id)).closed == ()
            assert await session.get_items() == []
        else:
            await ran(cp, change, "c")
            await session.add_items([PAID])
            await session.pop_item()
            report = await heal(cp, session.thread_id)
            assert [one.source for one in report.closed] == ["recorded"]
            last: Any = (await session.get_items())[-1]
            assert last["output"] == '{"paid": 7}'


@pytest.mark.parametrize("change", ["cleared", "popped"])
async def test_the_result_of_a_call_that_was_removed_is_not_that_of_a_later_call(
    cp: MemoryCheckpointer[Any], change: str
) -> None:
    """The model repeats the id. The later call gets a result only if it ran too."""
    sources = {}

    for thread in ("died before", "died behind"):
        session = Session(thread, cp)
        await session.add_items([PAY])
        await ran(cp, thread, "c")
        await session.add_items([PAID])

        if change == "cleared":
            await session.clear_session()
        else:
            assert await session.pop_item() == PAID
            assert await session.pop_item() == PAY

        await session.add_items([PAY])

        if thread == "died behind":
            await EffectLedger(cp).run(
                thread, "pay", {"amount": 8}, pay, tool_call_id="c"
            )

        report = await heal(cp, session.thread_id)
        last: Any = (await session.get_items())[-1]
        sources[thread] = [one.source for one in report.closed], last["output"][:11]

    assert sources == {
        "died before": (["interrupted"], "interrupted"),
        "died behind": (["recorded"], '{"paid": 8}'),
    }


async def test_a_long_running_call_is_left(cp: MemoryCheckpointer[Any]) -> None:
    """Its answer comes later, for instance from a person."""
    created, called = HISTORIES["adk"]
    event = called["event"] | {"long_running_tool_ids": ["a"]}
    await cp.append("t", [created, {"event": event}])
    report = await heal(cp, "t")
    assert [one.call_id for one in report.left] == ["a"]
    assert [one.call_id for one in report.closed] == ["b"]


async def test_a_call_in_two_notations_is_one_call(
    cp: MemoryCheckpointer[Any],
) -> None:
    """As a block and in tool_calls. Two calls get results of their own forms."""
    block = {"type": "tool_use", "id": "a", "name": "pay", "input": {}}
    both = {"role": "assistant", "content": [block]}
    await cp.append("t", [{**both, "tool_calls": [openai_call("a")]}])
    assert [one.call_id for one in (await heal(cp, "t")).closed] == ["a"]
    await cp.append("u", [{**both, "tool_calls": [openai_call("b")]}])
    assert len((await heal(cp, "u")).closed) == 2
    _, first, second = await cp.read("u")
    assert first["content"][0]["tool_use_id"] == "a"
    assert second["tool_call_id"] == "b"


async def test_parallel_calls_of_claude_are_entries_of_one_response(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The SDK writes an entry for each block, and results may be among them."""

    def entry(uuid: str, block: dict[str, Any], response: str = "m2") -> dict[str, Any]:
        message = {"id": response, "role": "assistant", "content": [block]}
        return {"entry": {"type": "assistant", "uuid": uuid, "message": message}}

    def call(call_id: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": call_id, "name": "pay", "input": {}}

    result = {"type": "tool_result", "tool_use_id": "b", "content": "1"}
    answer = {
        "entry": {
            "type": "user",
            "uuid": "6",
            "message": {"role": "user", "content": [result]},
        }
    }
    history = [
        entry("2", call("old"), response="m1"),
        {"entry": {"type": "user", "uuid": "3", "message": ASK}},
        entry("4", {"type": "text", "text": "I pay."}),
        entry("5", call("a")),
        entry("5b", call("b")),
        answer,
        entry("7", call("c")),
    ]
    await cp.append("t", history)
    report = await heal(cp, "t")
    assert [one.call_id for one in report.closed] == ["a", "c"]
    assert [one.call_id for one in report.left] == ["old"]
    assert (await heal(cp, "t")).closed == ()


async def test_a_failed_effect_gets_its_error(cp: MemoryCheckpointer[Any]) -> None:
    """A final error is a result."""

    async def fail(effect: Effect) -> Any:
        raise ValueError("no money")

    await cp.append("t", HISTORIES["cpkit"])

    with pytest.raises(ValueError, match="no money"):
        await EffectLedger(cp).run("t", "pay", {}, fail, tool_call_id="a")

    await heal(cp, "t")
    result = (await cp.read("t"))[2]
    assert result["is_error"]
    assert result["content"] == "ValueError: no money"


async def test_a_lost_answer_closes_once() -> None:
    """The retry finds the results that the first try appended."""
    async with MemoryCheckpointer[Any]() as inner:
        await inner.append("t", HISTORIES["openai"])
        spy: Any = Spy(inner)
        spy.faults.append("lost after")
        spy.list_calls = inner.list_calls
        spy.find_call = inner.find_call
        assert len((await heal(spy, "t")).closed) == 2
        assert len(await inner.read("t")) == 4


async def test_another_writer_wins(cp: MemoryCheckpointer[Any]) -> None:
    """The thread was continued meanwhile: nothing is appended."""
    await cp.append("t", HISTORIES["openai"])

    class Late(Spy):
        async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
            await self.inner.append(thread_id, [ASK])
            return await self.inner.append(thread_id, messages, **options)

    spy: Any = Late(cp)
    spy.list_calls = cp.list_calls
    spy.find_call = cp.find_call

    with pytest.raises(VersionConflict):
        await heal(spy, "t")

    assert len(await cp.read("t")) == 3


async def test_other_threads_are_refused(cp: MemoryCheckpointer[Any]) -> None:
    """The error says what to use instead."""
    await cp.append("s", [{"type": "session", "id": "s"}])

    with pytest.raises(ValueError, match="close_missing_results"):
        await heal(cp, "s")

    with pytest.raises(ValueError, match=r"langgraph\.heal"):
        await heal(cp, "cpkit:langgraph:t")

    assert str(await heal(cp, "none")) == "thread 'none': every call has a result"
