"""The ready-made messages: the role selects the class, unknown fields are kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from cpkit import SerializationError
from cpkit.driver.codec import Codec
from cpkit.messages import (
    AssistantMessage,
    ImageBlock,
    Message,
    ReasoningBlock,
    SystemMessage,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    UserMessage,
)

codec: Codec[Any] = Codec(Message, strict_roundtrip=True)

MESSAGES = [
    SystemMessage(content="be kind"),
    UserMessage(
        content=[
            TextBlock(text="look"),
            ImageBlock(media_type="image/png", data="AAAA"),
            ImageBlock(url="https://example.org/x.png"),
        ],
        metadata={"trace": {"id": 10**30}},
    ),
    AssistantMessage(
        content=[
            ReasoningBlock(text="hm", signature="s"),
            ToolCallBlock(id="1", name="book", args={"seats": [1, 2], "price": 0.1}),
        ],
        model="m",
    ),
    ToolResultMessage(content="done", tool_call_id="1", is_error=True),
]


def test_every_message_comes_back_as_its_class() -> None:
    """``role`` selects the class of a message, ``type`` that of a block."""
    again = codec.messages(codec.append("t", MESSAGES, None).bodies, "t")

    assert again == MESSAGES
    assert [type(message) for message in again] == [type(m) for m in MESSAGES]
    assert isinstance(again[1].content[1], ImageBlock)


def test_unknown_fields_are_kept_at_every_level() -> None:
    """An older program keeps the fields that a newer one wrote."""
    newer = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a", "citations": [{"n": 1}]}],
        "metadata": {"k": None},
        "model": None,
        "usage": {"tokens": 10**25, "cost": 0.1},
    }
    message = TypeAdapter(Message).validate_python(newer)
    (body,) = codec.append("t", [message], None).bodies
    (again,) = Codec[Any]().messages([body], "t")

    assert again == newer


@pytest.mark.parametrize(
    "wrong",
    [
        {"content": "no role"},
        {"role": "robot", "content": ""},
        {"role": "user"},
        {"role": "user", "content": [{"type": "sound"}]},
        {"role": "tool", "content": "no id"},
    ],
)
def test_a_value_that_is_not_a_message_is_refused(wrong: dict[str, Any]) -> None:
    """The known fields are validated."""
    with pytest.raises(ValidationError):
        TypeAdapter(Message).validate_python(wrong)


def test_infinity_is_refused_in_known_and_unknown_fields() -> None:
    """JSON has no infinity, in any field."""
    with pytest.raises(ValidationError):
        UserMessage(content="", metadata={"x": math.inf})

    odd = TypeAdapter(Message).validate_python(
        {"role": "user", "content": "", "score": math.inf}
    )

    with pytest.raises(SerializationError) as raised:
        codec.append("t", [odd], None)

    assert raised.value.path == (0, "score")
