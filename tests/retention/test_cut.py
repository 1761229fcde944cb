"""Where a thread may be cut: between turns, and never off a tool's result."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit import open_checkpointer
from cpkit.retention import find_cut
from cpkit.toolcalls import Reading, begins_turn, open_calls, read_message

USER = {"role": "user", "content": "go on"}
SAID = {"role": "assistant", "content": "done"}


def calls(call_id: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    called = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": called}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "ok"}


async def cut_of(messages: list[Any], want: int) -> int:
    async with open_checkpointer("memory://") as cp:
        await cp.append("t", messages)
        return await find_cut(cp, "t", want, 0, len(messages))


@pytest.mark.parametrize(
    ("want", "expected"),
    [(0, 0), (1, 0), (3, 0), (4, 4), (5, 4), (7, 4), (8, 8), (9, 8)],
)
async def test_a_cut_comes_before_a_users_message(want: int, expected: int) -> None:
    """It never goes beyond what was asked for, and the last turn stays."""
    turn = [USER, calls("c"), result("c"), SAID]
    assert await cut_of([*turn, *turn, *turn[:2]], want) == expected


async def test_a_late_result_keeps_its_call() -> None:
    """A user's message came between a call and its result."""
    messages = [USER, SAID, USER, calls("c"), USER, result("c"), SAID, USER, SAID]
    assert await cut_of(messages, 6) == 2
    assert await cut_of(messages, 8) == 7


async def test_a_result_without_a_call_holds_nothing() -> None:
    """Its call was never stored, or was cut off before."""
    assert await cut_of([USER, SAID, USER, result("x"), USER, SAID], 3) == 2


async def test_without_roles_each_message_begins_a_turn() -> None:
    """A log of other objects is cut exactly where it was asked for."""
    assert await cut_of([{"n": n} for n in range(1_000)], 777) == 777


async def test_a_long_turn_is_read_to_its_begin() -> None:
    """The turn has more messages than are read at a time."""
    steps = [one for n in range(400) for one in (calls(f"c{n}"), result(f"c{n}"))]
    assert await cut_of([USER, SAID, USER, *steps, USER, SAID], 790) == 2


FORMS: list[tuple[dict[str, Any], bool | None]] = [
    (USER, True),
    (SAID, False),
    ({"role": "system", "content": "s"}, False),
    ({"type": "human", "content": "x"}, True),
    ({"type": "ai", "content": "x"}, False),
    ({"type": "human", "data": {"content": "x", "type": "human"}}, True),
    ({"lc": 1, "id": ["x", "HumanMessage"], "kwargs": {"content": "x"}}, True),
    ({"item": {"role": "user", "content": "x"}}, True),
    ({"item": {"type": "function_call", "call_id": "c", "name": "f"}}, None),
    ({"entry": {"message": {"role": "user", "content": "x"}}}, True),
    ({"event": {"content": {"role": "user", "parts": [{"text": "x"}]}}}, True),
    ({"type": "message", "message": USER}, True),
    ({"type": "model_change", "modelId": "m"}, None),
    ({"kind": "request", "parts": [{"part_kind": "user-prompt"}]}, True),
    ({"kind": "request", "parts": [{"part_kind": "system-prompt"}]}, False),
    ({"kind": "response", "parts": []}, False),
    ({"n": 1}, None),
    (
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}],
        },
        False,
    ),
]


@pytest.mark.parametrize(("message", "expected"), FORMS)
def test_each_framework_says_who_speaks(
    message: dict[str, Any], expected: bool | None
) -> None:
    """A message of results alone begins no turn, also where it is the user's."""
    assert begins_turn(message) is expected


STEPS = st.sampled_from("uacr")


@given(st.lists(STEPS, max_size=40), st.integers(0, 40))
async def test_no_call_is_cut_off_from_its_result(steps: list[str], want: int) -> None:
    """In any order: what stays pairs its calls and results as the whole thread did."""
    makers = {"u": lambda _: USER, "a": lambda _: SAID, "c": calls, "r": result}
    messages = [makers[one](f"c{n % 3}") for n, one in enumerate(steps)]
    cut = await cut_of(messages, min(want, len(messages)))
    assert cut <= want
    assert cut == 0 or messages[cut] == USER
    readings = [read_message(one) for one in messages]
    # No call before the cut has its result after it.
    assert left_open(readings[:cut]) <= left_open(readings)


def left_open(readings: list[Reading]) -> set[tuple[int, str]]:
    """Return the position and the id of each call without a result."""
    return {(it.position, it.call.call_id) for it in open_calls(enumerate(readings))}
