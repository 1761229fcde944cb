"""Messages for the tests."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, *tools: str, model: str | None = None) -> Message:
    """Return an assistant's message; a tool's name is also its call id."""
    calls = [
        {"type": "toolCall", "id": tool, "name": tool, "arguments": {}}
        for tool in tools
    ]
    named = {} if model is None else {"provider": "lab", "model": model}
    content = [{"type": "text", "text": text}, *calls]
    return {"role": "assistant", "content": content, **named}


def result(tool: str, text: str = "done") -> Message:
    return {
        "role": "toolResult",
        "toolCallId": tool,
        "toolName": tool,
        "content": [{"type": "text", "text": text}],
        "isError": False,
    }


def texts(messages: list[Message]) -> list[str]:
    """Return the text of each message."""
    return [_text(message) for message in messages]


def _text(message: Message) -> str:
    content = message.get("content", message.get("summary"))
    return str(content if isinstance(content, str) else content[0]["text"])  # type: ignore[index]  # a test's own content
