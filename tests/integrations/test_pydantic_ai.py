"""pydantic-ai's own agent, with its history in every store."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest
from pydantic_ai import Agent
from pydantic_ai.messages import (
    DocumentUrl,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_core import to_json

from cpkit import SerializationError, VersionConflict, open_checkpointer
from tests.integrations.pydantic_ai_parts import MESSAGES, kinds_without_sample

# Pytest would take TestModel for a test class.
TestModel.__test__ = False


@pytest.fixture
def thread_id() -> str:
    """An id that is not used in any store."""
    return uuid4().hex


async def turn(url: str, thread_id: str, agent: Agent[Any, str], text: str) -> str:
    """Run one turn on a new handle, with the history from the store."""
    async with open_checkpointer(url, message_type=ModelMessage) as cp:
        data = await cp.load(thread_id)
        history = data.messages if data else []
        result = await agent.run(text, message_history=history)
        await cp.append(thread_id, result.new_messages(), expected_version=len(history))
        return result.output


async def test_two_turns_with_a_tool(url: str, thread_id: str) -> None:
    """The model sees equal messages of the first turn in the second."""
    shown: list[list[ModelMessage]] = []

    def answer(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
        shown.append(list(messages))

        if len(messages) == 1:
            return ModelResponse(parts=[ToolCallPart("weather", {"city": "Oslo"})])

        return ModelResponse(parts=[TextPart(f"shown {len(messages)}")])

    agent = Agent(FunctionModel(answer))

    @agent.tool_plain
    def weather(city: str) -> str:
        """Say what the weather is."""
        return f"sunny in {city}"

    assert await turn(url, thread_id, agent, "weather?") == "shown 3"
    assert await turn(url, thread_id, agent, "and now?") == "shown 5"

    async with open_checkpointer(url, message_type=ModelMessage) as cp:
        data = await cp.load(thread_id)

    assert data is not None
    assert data.version == 6
    assert data.messages[:3] == shown[1]
    assert data.messages[:5] == shown[2]
    assert isinstance(data.messages[2].parts[0], ToolReturnPart)
    assert data.messages[2].parts[0].content == "sunny in Oslo"


async def test_the_test_model_runs_its_tools(url: str, thread_id: str) -> None:
    """pydantic-ai's TestModel runs twice."""
    agent = Agent(TestModel())

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    for _ in range(2):
        assert await turn(url, thread_id, agent, "add") == '{"add":0}'


async def test_messages_keep_their_own_json(url: str, thread_id: str) -> None:
    """Every kind of part keeps every field, also fields that ``==`` leaves out."""
    own = ModelMessagesTypeAdapter
    assert kinds_without_sample() == set()

    async with open_checkpointer(url, message_type=ModelMessage) as cp:
        await cp.append(thread_id, MESSAGES)
        data = await cp.load(thread_id)

    assert data is not None
    assert data.messages == own.validate_json(own.dump_json(MESSAGES))

    for before, after in zip(MESSAGES, data.messages, strict=True):
        for given, loaded in zip(before.parts, after.parts, strict=True):
            assert json.loads(to_json(given)) == json.loads(to_json(loaded))

    assert json.loads(own.dump_json(data.messages)) == json.loads(
        own.dump_json(MESSAGES)
    )


async def test_a_file_keeps_its_media_type_and_identifier(thread_id: str) -> None:
    """Both are computed fields, and the caller may give both explicitly."""
    file = DocumentUrl(
        "https://example.org/x", media_type="application/pdf", identifier="invoice-7"
    )
    message = ModelRequest([UserPromptPart([file])])

    async with open_checkpointer(
        "memory://", message_type=ModelMessage, strict_roundtrip=True
    ) as cp:
        await cp.append(thread_id, [message])
        data = await cp.load(thread_id)

    assert data is not None
    (part,) = data.messages[0].parts
    assert isinstance(part, UserPromptPart)
    again = part.content[0]
    assert isinstance(again, DocumentUrl)
    assert (again.media_type, again.identifier) == ("application/pdf", "invoice-7")


async def test_a_turn_with_a_stale_history_is_refused(thread_id: str) -> None:
    """Another process has continued the thread."""
    async with open_checkpointer("memory://", message_type=ModelMessage) as cp:
        agent = Agent(TestModel())
        first, second = [await agent.run(text) for text in ("a", "b")]
        await cp.append(thread_id, first.new_messages(), expected_version=0)

        with pytest.raises(VersionConflict):
            await cp.append(thread_id, second.new_messages(), expected_version=0)


async def test_raw_bytes_are_refused(thread_id: str) -> None:
    """They could not be loaded as bytes; BinaryContent can."""
    async with open_checkpointer("memory://", message_type=ModelMessage) as cp:
        raw = ModelRequest(parts=[ToolReturnPart("look", {"raw": b"\xff"}, "call-1")])

        with pytest.raises(SerializationError):
            await cp.append(thread_id, [raw])

        assert await cp.load(thread_id) is None
