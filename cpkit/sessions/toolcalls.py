"""Tool calls and their results in messages, in three known forms.

- The session format: ``toolCall`` blocks and ``toolResult`` messages.
- `cpkit.messages`: ``tool_call`` blocks and ``tool`` messages.
- OpenAI's chat API: ``tool_calls`` and ``tool`` messages.

In messages of another form no calls are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cpkit.sessions.entries import Message

__all__ = ["MissingResult", "answered_call", "calls_in", "synthetic_result"]


@dataclass(frozen=True)
class MissingResult:
    """A tool call without a result; ``entry_id`` is the entry with the call."""

    entry_id: str
    call_id: str
    tool_name: str
    form: Literal["toolCall", "tool_call", "tool_calls"]


def calls_in(entry_id: str, message: Message) -> Iterator[MissingResult]:
    """Yield the calls in an assistant's message."""
    if message.get("role") != "assistant":
        return

    for block in _objects(message.get("content")):
        form = block.get("type")

        if form in ("toolCall", "tool_call"):
            yield MissingResult(
                entry_id, str(block.get("id")), str(block.get("name")), form
            )

    for call in _objects(message.get("tool_calls")):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        yield MissingResult(entry_id, str(call.get("id")), str(name), "tool_calls")


def answered_call(message: Message) -> str | None:
    """Return the call id of a result message, or ``None`` for another message."""
    field = {"toolResult": "toolCallId", "tool": "tool_call_id"}.get(
        str(message.get("role"))
    )
    return None if field is None else str(message.get(field))


def synthetic_result(missing: MissingResult, text: str, timestamp: int) -> Message:
    """Return a result message with this text, in the form of the call."""
    if missing.form == "toolCall":
        return {
            "role": "toolResult",
            "toolCallId": missing.call_id,
            "toolName": missing.tool_name,
            "content": [{"type": "text", "text": text}],
            "isError": True,
            "timestamp": timestamp,
        }

    result: Message = {"role": "tool", "tool_call_id": missing.call_id, "content": text}

    if missing.form == "tool_call":
        result |= {"tool_name": missing.tool_name, "is_error": True}

    return result


def _objects(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))
