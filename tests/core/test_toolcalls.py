"""Tool calls of every form are read by one function, and healed in their form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cpkit import MemoryCheckpointer
from cpkit.effects import Effect, EffectLedger, EffectTimeout
from cpkit.heal import heal
from cpkit.toolcalls import open_calls, read_message
from tests.core.tool_forms import ARGS, ASK, FORMS, UNKNOWN


@pytest.fixture
async def cp() -> AsyncIterator[MemoryCheckpointer[Any]]:
    async with MemoryCheckpointer[Any]() as opened:
        yield opened


async def pay(effect: Effect) -> str:
    return "receipt 5"


async def ran(cp: Any, *, tool_call_id: str | None) -> None:
    ledger = EffectLedger(cp)
    await ledger.run("t", "pay", ARGS, pay, tool_call_id=tool_call_id)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_and_its_result_are_read(form: str) -> None:
    """The call has name and arguments, and the result belongs to it."""
    history, answer = FORMS[form]
    readings = list(enumerate(map(read_message, [*history, *answer])))
    (call,) = [call for _, reading in readings for call in reading.calls]
    (result,) = [one for _, reading in readings for one in reading.results]
    assert (call.tool_name, call.args) == ("pay", ARGS)
    assert call.call_id in ("a", "")
    assert "paid" in json.dumps(result.content)
    assert not any(reading.unknown for _, reading in readings)
    assert open_calls(readings) == []
    (still,) = open_calls(readings[: len(history)])
    assert still.call is call


@pytest.mark.parametrize("form", FORMS)
async def test_an_open_call_is_closed_in_its_form(
    form: str, cp: MemoryCheckpointer[Any]
) -> None:
    """What heal appends is the result of that call, and a second heal finds it."""
    history, answer = FORMS[form]
    await cp.append("t", history)
    report = await heal(cp, "t")
    assert [one.source for one in report.closed] == ["interrupted"]
    added = await cp.read("t", len(history))
    (result,) = read_message(added[-1]).results
    assert "interrupted" in json.dumps(result.content)
    assert {*answer[0]} <= {*added[0], "status"}
    assert str(await heal(cp, "t")) == "thread 't': every call has a result"


@pytest.mark.parametrize("form", FORMS)
async def test_an_answered_call_is_not_answered_again(
    form: str, cp: MemoryCheckpointer[Any]
) -> None:
    history, answer = FORMS[form]
    await cp.append("t", [*history, *answer])
    report = await heal(cp, "t")
    assert (report.closed, report.left) == ((), ())
    assert len(await cp.read("t")) == len(history) + len(answer)


@pytest.mark.parametrize("tool_call_id", ["a", None])
@pytest.mark.parametrize("form", FORMS)
async def test_a_recorded_call_gets_its_result(
    form: str, tool_call_id: str | None, cp: MemoryCheckpointer[Any]
) -> None:
    """Also if the ledger was not given the id: tool and arguments name the effect."""
    history, _ = FORMS[form]
    await cp.append("t", history)
    await ran(cp, tool_call_id=tool_call_id)
    report = await heal(cp, "t")
    assert [one.source for one in report.closed] == ["recorded"]
    assert "receipt 5" in json.dumps((await cp.read("t"))[-1])


@pytest.mark.parametrize("form", FORMS)
async def test_a_call_that_waits_or_is_in_doubt_is_left(
    form: str, cp: MemoryCheckpointer[Any]
) -> None:
    """It waits for an approval; then it is issued, without the id of its call."""
    history, _ = FORMS[form]
    await cp.append("t", history)
    ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)

    with pytest.raises(EffectTimeout):
        await ledger.run("t", "pay", ARGS, pay)

    report = await heal(cp, "t")
    assert [one.tool_name for one in report.left] == ["pay"]
    assert "approval request is undecided" in report.left[0].reason

    (request,) = await ledger.pending("t")
    await ledger.deny(request.key)
    await EffectLedger(cp).begin("t", "pay", {"amount": 8})
    report = await heal(cp, "t")
    assert "outcome unknown" in report.left[0].reason
    assert report.closed == ()
    assert len(await cp.read("t")) == len(history)


@pytest.mark.parametrize("name", UNKNOWN)
async def test_an_unknown_form_is_named_and_left_alone(
    name: str, cp: MemoryCheckpointer[Any]
) -> None:
    """A known call is left too: the unknown message may have its result."""
    reading = read_message(UNKNOWN[name])
    assert (reading.calls, reading.results) == ((), ())
    assert reading.unknown == (name,)

    history = [*FORMS["openai chat"][0], UNKNOWN[name]]
    await cp.append("t", history)
    report = await heal(cp, "t")
    assert name in str(report)
    assert {one.call_id for one in report.left} == {"message 2", "a"}
    assert await cp.read("t") == history


async def test_a_call_of_the_provider_needs_no_result(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The provider runs it, and its result is in the same message."""
    hosted = [
        {"type": "server_tool_use", "id": "s", "name": "web_search"},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    ]
    part = {"part_kind": "builtin-tool-call", "tool_name": "w", "tool_call_id": "s"}

    for message in (
        {"role": "assistant", "content": hosted},
        {"kind": "response", "parts": [part]},
        {"type": "web_search_call", "id": "w"},
    ):
        reading = read_message(message)
        assert (reading.calls, reading.results, reading.unknown) == ((), (), ())


async def test_a_result_of_other_arguments_is_not_that_of_the_call(
    cp: MemoryCheckpointer[Any],
) -> None:
    """It belongs to an answered call; else it is not clear whose it is."""
    history, answer = FORMS["the tutorial"]
    await ran(cp, tool_call_id=None)
    other = {"id": "a", "name": "pay", "args": {"amount": 8}}
    call = {"role": "assistant", "content": "", "tool_calls": [other]}
    await cp.append("t", [*history, *answer, ASK, call])
    assert [one.source for one in (await heal(cp, "t")).closed] == ["interrupted"]

    await EffectLedger(cp).run("t", "pay", ARGS, pay, idempotency_key="order 9")
    await cp.append("t", [ASK, call])
    assert [one.source for one in (await heal(cp, "t")).closed] == ["interrupted"]

    await EffectLedger(cp).run("t", "pay", {"amount": 9}, pay, idempotency_key="9")
    await cp.append("t", [ASK, call])
    report = await heal(cp, "t")
    assert report.closed == ()
    assert "tool_call_id=" in report.left[0].reason


async def test_an_item_whose_result_is_not_text_is_left(
    cp: MemoryCheckpointer[Any],
) -> None:
    """cpkit does not invent the picture of a screen."""
    call = {"type": "computer_call", "call_id": "a", "action": {}}
    await cp.append("t", [ASK, call])
    (left,) = (await heal(cp, "t")).left
    assert left.tool_name == "computer_call"
    assert "writes no result" in left.reason
