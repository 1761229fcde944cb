"""An Agents SDK agent with a scripted model, in this process or in others.

``python -m tests.integrations.openai_worker URL SESSION WORK``: says ``ready``, waits
for a line, and does its work. ``pop`` pops until nothing is left and prints each item;
``add NAME`` adds 20 items; ``turn TEXT`` runs one turn of the agent and prints what the
model was shown.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from agents import (
    Agent,
    Model,
    ModelResponse,
    RunConfig,
    Runner,
    Tool,
    Usage,
    function_tool,
)
from agents.items import TResponseOutputItem, TResponseStreamEvent
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from cpkit import open_checkpointer
from cpkit.integrations.openai_agents import Session

QUIET = RunConfig(tracing_disabled=True)


class ScriptedModel(Model):
    """A model that answers by a script, and records its inputs."""

    def __init__(self, *script: TResponseOutputItem) -> None:
        self.script = list(script)
        self.shown: list[Any] = []

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,
        *args: Any,
        **kwargs: Any,
    ) -> ModelResponse:
        self.shown.append(json.loads(json.dumps(input)))
        return ModelResponse([self.script.pop(0)], Usage(), None)

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[TResponseStreamEvent]:
        self.shown.append(json.loads(json.dumps(input)))
        response = Response(
            id="response",
            created_at=0,
            model="scripted",
            object="response",
            output=[self.script.pop(0)],
            tool_choice="none",
            tools=[],
            parallel_tool_calls=False,
        )
        yield ResponseCompletedEvent(
            type="response.completed", sequence_number=0, response=response
        )


def says(text: str) -> ResponseOutputMessage:
    content = ResponseOutputText(text=text, type="output_text", annotations=[])
    return ResponseOutputMessage(
        id=f"message-{text}",
        type="message",
        role="assistant",
        content=[content],
        status="completed",
    )


def calls(tool: str, call_id: str, **arguments: Any) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        id=f"call-{call_id}",
        call_id=call_id,
        type="function_call",
        name=tool,
        arguments=json.dumps(arguments),
    )


@function_tool
def weather(city: str) -> str:
    """Say what the weather is."""
    return f"sunny in {city}"


def agent(model: Model, *tools: Tool) -> Agent[Any]:
    return Agent(name="agent", model=model, tools=[weather, *tools])


def texts(items: list[Any]) -> list[str]:
    """Return the text of each item."""
    return [_text(item) for item in items]


def _text(item: Any) -> str:
    if item.get("type") == "function_call":
        return f"{item['name']}()"

    said = item.get("content", item.get("output"))
    return str(said if isinstance(said, str) else said[0]["text"])


async def work(url: str, session_id: str, kind: str, what: str = "") -> None:
    async with open_checkpointer(url) as cp:
        session = Session(session_id, cp)
        say("ready")
        await asyncio.to_thread(sys.stdin.readline)

        if kind == "pop":
            while (item := await session.pop_item()) is not None:
                say(json.dumps(item))
        elif kind == "add":
            for number in range(20):
                pair: Any = [{"of": what, "n": number, "half": h} for h in (0, 1)]
                await session.add_items(pair)
        else:
            model = ScriptedModel(says(f"answer to {what}"))
            await Runner.run(agent(model), what, session=session, run_config=QUIET)
            say(json.dumps(texts(model.shown[0])))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:5]))
