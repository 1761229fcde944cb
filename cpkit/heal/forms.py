"""Tool calls and results in the messages of each framework.

``openai``
    The chat API: ``tool_calls`` of an assistant, and ``tool`` messages.
``cpkit``
    `cpkit.messages`: ``tool_call`` blocks with ``args``, and ``tool`` messages.
``session``
    Coding-agent sessions: ``toolCall`` blocks, and ``toolResult`` messages.
``cubeloop``
    ``tool_call`` blocks with ``arguments``, and ``tool_result`` messages.
``anthropic``
    ``tool_use`` blocks, and ``tool_result`` blocks in a user's message.
``claude``
    The same in a transcript's entries of the Claude Agent SDK.
``agents``
    Items ``function_call`` and ``function_call_output`` of the OpenAI Agents SDK.
``pydantic-ai``
    Parts ``tool-call`` of a response, and ``tool-return`` of a request.
``codex``
    Items of the Responses API in the lines of a session of Codex.
``adk``
    Parts with ``function_call`` and ``function_response`` in events of Google's ADK.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

__all__ = [
    "OpenCall",
    "Result",
    "answers_in",
    "calls_in",
    "closing_messages",
    "is_answer",
    "is_note",
    "long_running",
    "response_id",
]

Message = dict[str, Any]

# The items that are calls, and the items with their results.
_CODEX_CALLS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "local_shell_call": "function_call_output",
}


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A tool call in the message at a position of the thread."""

    position: int
    call_id: str
    tool_name: str
    form: str


@dataclass(frozen=True, slots=True)
class Result:
    """What to append for a call."""

    call: OpenCall
    text: str
    is_error: bool
    is_recorded: bool
    """Whether it is the result of an effect; otherwise the call was interrupted."""


def calls_in(position: int, message: Any) -> Iterator[OpenCall]:
    """Yield the tool calls in a message of any form."""
    for form, call_id, name in _calls(message):
        if isinstance(call_id, str) and call_id:
            yield OpenCall(position, call_id, str(name), form)


def answers_in(message: Any) -> Iterator[str]:
    """Yield the ids of the calls whose results are in a message of any form."""
    match message:
        case {"role": "tool" | "tool_result", "tool_call_id": str(call_id)}:
            yield call_id
        case {"role": "toolResult", "toolCallId": str(call_id)}:
            yield call_id
        case {"role": "user", "content": list(blocks)}:
            for block in _objects(blocks):
                if block.get("type") == "tool_result":
                    yield str(block.get("tool_use_id"))
        case {"entry": {"type": "user", "message": inner}}:
            yield from answers_in(inner)
        case (
            {"item": {"type": "function_call_output", "call_id": str(call_id)}}
            | {
                "type": "response_item",
                "payload": {
                    "type": "function_call_output" | "custom_tool_call_output",
                    "call_id": str(call_id),
                },
            }
            | {
                "type": "function_call_output" | "custom_tool_call_output",
                "call_id": str(call_id),
            }
        ):
            yield call_id
        case {"kind": "request", "parts": list(parts)}:
            for part in _objects(parts):
                if part.get("part_kind") in ("tool-return", "retry-prompt"):
                    yield str(part.get("tool_call_id"))
        case {"event": {"content": {"parts": list(parts)}}}:
            for part in _objects(parts):
                if isinstance(found := part.get("function_response"), dict):
                    yield str(found.get("id"))


def is_answer(message: Any) -> bool:
    """Return whether a message has the result of a call."""
    return next(answers_in(message), None) is not None


def is_note(message: Any) -> bool:
    """Return whether an entry of Claude's transcript is no part of the conversation."""
    match message:
        case {"entry": {"type": str(kind)}}:
            return kind not in ("user", "assistant")

    return False


def long_running(message: Any) -> Collection[str]:
    """Return the ids of an event's calls whose answers come later, as from a person."""
    match message:
        case {"event": {"long_running_tool_ids": list(ids)}}:
            return ids

    return ()


def response_id(message: Any) -> str | None:
    """Return the id that entries of one response of Claude share.

    The SDK writes each block of a response, so each of its parallel calls, as an entry.
    The results of such calls may be among these entries.
    """
    match message:
        case {"entry": {"type": "assistant", "message": {"id": str(shared)}}}:
            return shared

    return None


def closing_messages(
    form: str, results: list[Result], messages: list[Any]
) -> tuple[list[Message], dict[str, Any]]:
    """Return the messages that close calls of one form, and a change of extra."""
    now = time.time()

    match form:
        case "anthropic":
            blocks = [_block(one) for one in results]
            return [{"role": "user", "content": blocks}], {}
        case "claude":
            return _entries(results, messages), {}
        case "pydantic-ai":
            parts = [
                {
                    "part_kind": "tool-return",
                    "tool_name": one.call.tool_name,
                    "content": one.text,
                    "tool_call_id": one.call.call_id,
                    "timestamp": datetime.now(UTC).isoformat(),
                }
                for one in results
            ]
            return [{"kind": "request", "parts": parts}], {}
        case "codex":
            return [_line(one, messages[one.call.position]) for one in results], {}
        case "adk":
            return [{"event": _event(results, messages, now)}], {"updated": now}

    return [_message(form, one, now) for one in results], {}


def _calls(message: Any) -> Iterator[tuple[str, Any, Any]]:
    match message:
        case {"role": "assistant"}:
            seen: set[str] = set()

            for block in _objects(message.get("content")):
                match block.get("type"):
                    case "tool_call":
                        form = "cubeloop" if "arguments" in block else "cpkit"
                    case "toolCall":
                        form = "session"
                    case "tool_use":
                        form = "anthropic"
                    case _:
                        continue

                seen.add(str(block.get("id")))
                yield form, block.get("id"), block.get("name")

            for call in _objects(message.get("tool_calls")):
                function = call.get("function")
                name = function.get("name") if isinstance(function, dict) else None

                # Some libraries store the calls both as blocks and here.
                if call.get("id") not in seen:
                    yield "openai", call.get("id"), name
        case {"entry": {"type": "assistant", "message": dict(inner)}}:
            for _, call_id, name in _calls(inner):
                yield "claude", call_id, name
        case {"item": {"type": "function_call"} as item}:
            yield "agents", item.get("call_id"), item.get("name")
        case {"type": "response_item", "payload": {"type": str(kind)} as item} | (
            {"type": str(kind)} as item
        ) if kind in _CODEX_CALLS:
            yield "codex", item.get("call_id"), item.get("name") or kind
        case {"kind": "response", "parts": list(parts)}:
            for part in _objects(parts):
                if part.get("part_kind") == "tool-call":
                    name = part.get("tool_name")
                    yield "pydantic-ai", part.get("tool_call_id"), name
        case {"event": {"content": {"parts": list(parts)}}}:
            for part in _objects(parts):
                if isinstance(found := part.get("function_call"), dict):
                    yield "adk", found.get("id"), found.get("name")


def _message(form: str, result: Result, now: float) -> Message:
    """Return a message with one result."""
    call_id, name, text = result.call.call_id, result.call.tool_name, result.text
    content = [{"type": "text", "text": text}]

    match form:
        case "openai":
            return {"role": "tool", "tool_call_id": call_id, "content": text}
        case "cpkit":
            return {
                "role": "tool",
                "tool_call_id": call_id,
                "tool_name": name,
                "content": text,
                "is_error": result.is_error,
            }
        case "session":
            return {
                "role": "toolResult",
                "toolCallId": call_id,
                "toolName": name,
                "content": content,
                "isError": result.is_error,
                "timestamp": int(1000 * now),
            }
        case "cubeloop":
            return {
                "role": "tool_result",
                "tool_call_id": call_id,
                "tool_name": name,
                "content": content,
                "is_error": result.is_error,
                "timestamp": now,
            }
        case "agents":
            item = {"type": "function_call_output", "call_id": call_id, "output": text}
            return {"item": item, "by": uuid4().hex[:16]}

    raise ValueError(f"unknown form {form!r}")


def _block(result: Result) -> Message:
    return {
        "type": "tool_result",
        "tool_use_id": result.call.call_id,
        "content": result.text,
        "is_error": result.is_error,
    }


def _entries(results: list[Result], messages: list[Any]) -> list[Message]:
    """Return entries of a transcript, each a child of the entry before it."""
    last = messages[-1]
    entries = [one["entry"] for one in messages if "entry" in one]
    # Notes at the end, as Claude Code writes them, have no uuid.
    before = next((one for one in reversed(entries) if "uuid" in one), entries[-1])
    stamp = _stamp()
    records: list[Message] = []

    for result in results:
        before = {
            **{
                name: before[name]
                for name in ("sessionId", "cwd", "version", "isSidechain", "userType")
                if name in before
            },
            "type": "user",
            "uuid": str(uuid4()),
            "parentUuid": before.get("uuid"),
            "timestamp": stamp,
            "message": {"role": "user", "content": [_block(result)]},
        }
        records.append({"entry": before, "by": uuid4().hex[:16]})

    if "summary" in last:
        # The result of a tool changes nothing in a session's summary.
        records[-1]["summary"] = last["summary"]

    return records


def _line(result: Result, called: Message) -> Message:
    """Return the line of Codex with a result, of the form of the line with the call."""
    item = called["payload"] if called["type"] == "response_item" else called
    answer = {
        "type": _CODEX_CALLS[item["type"]],
        "call_id": result.call.call_id,
        "output": result.text,
    }

    if item is called:
        return answer

    return {"timestamp": _stamp(), "type": "response_item", "payload": answer}


def _stamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _event(results: list[Result], messages: list[Any], now: float) -> Message:
    called = messages[results[0].call.position]["event"]
    parts: list[Message] = []

    for one in results:
        key = "error" if one.is_error else "result"
        response = {
            "id": one.call.call_id,
            "name": one.call.tool_name,
            "response": {key: one.text},
        }
        parts.append({"function_response": response})

    return {
        "id": str(uuid4()),
        "invocation_id": called.get("invocation_id", ""),
        "author": called.get("author", "user"),
        "timestamp": now,
        "content": {"role": "user", "parts": parts},
        "actions": {},
    }


def _objects(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))
