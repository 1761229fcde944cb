"""Read the tool calls and results of one message.

A message may stand inside a *wrapper*, the record of an adapter or a log:

``claude``, ``transcript``
    An entry of the Claude Agent SDK: ``{"entry": {"message": …}}``, or the entry alone.
``agents``
    An item of the OpenAI Agents SDK: ``{"item": …}``.
``adk``
    An event of Google's ADK: ``{"event": {"content": …}}``.
``codex``
    A line of a Codex rollout: ``{"type": "response_item", "payload": …}``.
``session``
    An entry of `cpkit.sessions`: ``{"type": "message", "message": …}``.
``langchain-data``, ``langchain-lc``
    LangChain's ``messages_to_dict``, and its ``dumpd``.

The *form* of a call says how its result is written:

``openai``
    The chat API: ``tool_calls`` with a ``function`` or ``custom`` part.
``plain``
    ``tool_calls`` with ``id``, ``name`` and ``args`` (or ``arguments``).
``langchain``
    The same in a message with ``"type": "ai"``.
``cpkit``, ``cubeloop``
    ``tool_call`` blocks with ``args`` (`cpkit.messages`), or with ``arguments``.
``session``
    ``toolCall`` blocks.
``anthropic``
    ``tool_use`` blocks, and ``tool_result`` blocks in a user's message.
``responses``
    Items of OpenAI's responses API: ``function_call`` and others with a ``call_id``.
``pydantic-ai``
    Parts ``tool-call`` of a response, and ``tool-return`` of a request.
``gemini``, ``gemini-camel``
    Parts with ``function_call``, or with ``functionCall``.

A call that the provider runs by itself (``server_tool_use``, ``web_search_call``) needs
no result and is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = [
    "Call",
    "Reading",
    "Result",
    "Unknown",
    "read_message",
    "read_part",
    "unwrap",
]

_CALLERS = (None, "assistant", "model", "ai")
_RESULT_ROLES = ("tool", "toolResult", "tool_result", "function")
_CHAT_TYPES = ("ai", "AIMessageChunk", "tool")  # LangChain's
_ITEM_ARGS = ("arguments", "input", "action", "operation")

# Names of calls and results in other notations, without "-" and "_".
_ENDING = "(call|use|invocation|request|result|return|response|output|message)s?"
_CALLING = re.compile(f"(tool|function){_ENDING}")
# What the provider runs and answers by itself.
_HOSTED = re.compile(".+[_-]tool[_-](use|call|result|return)(_error)?")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a model.

    ``call_id`` is empty where the message has none. ``args`` is the JSON value; text
    that is not JSON stays text.
    """

    call_id: str
    tool_name: str
    args: Any
    form: str
    kind: str = "function_call"
    """The type of an item of the responses API."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call; ``call_id`` and ``tool_name`` may be empty."""

    call_id: str
    tool_name: str
    content: Any
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Unknown:
    """A call or a result in a notation that cpkit does not know."""

    name: str


class Reading(NamedTuple):
    """What a message has of calls and results, in its order.

    ``unknown`` names the parts that look like calls or results and cannot be read.
    """

    wrapper: str
    calls: tuple[Call, ...]
    results: tuple[Result, ...]
    unknown: tuple[str, ...]


def read_message(message: Any) -> Reading:
    """Read the tool calls and results of a message of any form."""
    wrapper, inner = unwrap(message)
    found = list(_found(inner)) if isinstance(inner, dict) else []
    return Reading(
        wrapper,
        tuple(one for one in found if isinstance(one, Call)),
        tuple(one for one in found if isinstance(one, Result)),
        tuple(dict.fromkeys(one.name for one in found if isinstance(one, Unknown))),
    )


def unwrap(message: Any) -> tuple[str, Any]:
    """Return the name of the message's wrapper, or ``""``, and the message in it."""
    match message:
        case {"entry": {"message": dict(inner)}}:
            return "claude", inner
        case {"item": dict(inner)}:
            return "agents", inner
        case {"event": {"content": dict(inner)}}:
            return "adk", inner
        case {"type": "response_item", "payload": dict(inner)}:
            return "codex", inner
        case {"type": "message", "message": dict(inner)}:
            return "session", inner
        case {"type": "assistant" | "user", "message": dict(inner)}:
            return "transcript", inner
        case {"type": str(kind), "data": {"content": _} as inner}:
            return "langchain-data", {"type": kind, **inner}
        case {"lc": int(), "id": [*_, str(name)], "kwargs": dict(inner)}:
            kind = name.removesuffix("Chunk").removesuffix("Message").lower()
            return "langchain-lc", {"type": kind, **inner}

    return "", message


def read_part(part: Any) -> Call | Result | Unknown | None:
    """Read a block, part or item of a message; ``None`` if it is something else."""
    match part:
        case {"type": "tool_call", "id": id_, "name": name, "arguments": args}:
            return _call(id_, name, args, "cubeloop")
        case {"type": "tool_call", "id": id_, "name": name}:
            return _call(id_, name, part.get("args"), "cpkit")
        case {"type": "toolCall", "id": id_, "name": name}:
            return _call(id_, name, part.get("arguments"), "session")
        case {"type": "tool_use", "id": id_, "name": name}:
            return _call(id_, name, part.get("input"), "anthropic")
        case {"type": "tool_result", "tool_use_id": str(id_)}:
            return _result(part, id_, part.get("content"))
        case {"type": str(kind), "call_id": str(id_)} if kind.endswith("_call"):
            args = next((part[name] for name in _ITEM_ARGS if name in part), None)
            name = part.get("name") or kind
            return _call(id_, name, args, "responses", kind)
        case {"type": str(kind), "call_id": str(id_)} if kind.endswith("_output"):
            return _result(part, id_, part.get("output"))
        case {"part_kind": "tool-call", "tool_call_id": id_, "tool_name": name}:
            return _call(id_, name, part.get("args"), "pydantic-ai")
        case {"part_kind": "tool-return", "tool_call_id": str(id_)}:
            return _result(part, id_, part.get("content"))
        case {
            "part_kind": "retry-prompt",
            "tool_name": str(),
            "tool_call_id": str(id_),
        }:
            return _result(part, id_, part.get("content"), is_error=True)
        case {"function_call": {"name": name} as call}:
            return _call(call.get("id"), name, call.get("args"), "gemini")
        case {"functionCall": {"name": name} as call}:
            return _call(call.get("id"), name, call.get("args"), "gemini-camel")
        case {"function_response": {"name": str()} as answer} | {
            "functionResponse": {"name": str()} as answer
        }:
            content = answer.get("response")
            is_error = isinstance(content, dict) and "error" in content
            return _result(answer, answer.get("id"), content, is_error=is_error)

    return _suspect(part)


def _found(message: dict[str, Any]) -> Iterator[Call | Result | Unknown]:
    """Yield what is in a message that stands in no wrapper."""
    role, kind = message.get("role"), message.get("type")
    content = message.get("content", message.get("parts"))
    parts = content if isinstance(content, list) else []
    is_chat = role is None and kind in _CHAT_TYPES

    if role in _RESULT_ROLES or (is_chat and kind == "tool"):
        strange = [one for one in map(read_part, parts) if one is not None]
        yield from strange or [_result_message(message)]
        return

    if role is None and not parts and not is_chat:
        if (item := read_part(message)) is not None:
            yield item

        return

    blocks = [*map(read_part, parts)]
    # Some libraries store the calls both as blocks and in tool_calls.
    ids = {one.call_id for one in blocks if isinstance(one, Call) and one.call_id}
    others = [
        one
        for one in _tool_calls(message)
        if not isinstance(one, Call) or one.call_id not in ids
    ]

    for one in [*blocks, *others, _suspect(message)]:
        if isinstance(one, Call):
            if role in _CALLERS:
                yield replace(one, form="langchain") if is_chat else one
        elif one is not None:
            yield one


def _tool_calls(message: dict[str, Any]) -> Iterator[Call | Unknown]:
    """Yield the calls in ``tool_calls``, with or without a ``function`` part."""
    calls = message.get("tool_calls")

    for call in calls if isinstance(calls, list) else []:
        match call:
            case {"function": {"name": name} as function}:
                yield _call(call.get("id"), name, function.get("arguments"), "openai")
            case {"custom": {"name": name} as custom}:
                yield _call(call.get("id"), name, custom.get("input"), "openai")
            case {"name": name}:
                args = call.get("args", call.get("arguments"))
                yield _call(call.get("id"), name, args, "plain")
            case _:
                yield Unknown("tool_calls")


def _result_message(message: dict[str, Any]) -> Result:
    call_id = message.get("tool_call_id", message.get("toolCallId"))
    return _result(message, call_id, message.get("content"))


def _call(
    call_id: Any, name: Any, args: Any, form: str, kind: str = "function_call"
) -> Call | Unknown:
    if not isinstance(name, str) or not name or not isinstance(call_id, str | None):
        return Unknown(f"{form} without a name or id")

    if isinstance(args, str):
        try:
            args = json.loads(args)
        except (ValueError, RecursionError):
            pass

    return Call(call_id or "", name, args, form, kind)


def _result(
    fields: dict[str, Any], call_id: Any, content: Any, *, is_error: bool = False
) -> Result:
    names = (fields.get(key) for key in ("tool_name", "toolName", "name"))
    return Result(
        call_id if isinstance(call_id, str) else "",
        next((name for name in names if isinstance(name, str)), ""),
        content,
        is_error
        or bool(fields.get("is_error") or fields.get("isError"))
        or fields.get("status") == "error",
    )


def _suspect(part: Any) -> Unknown | None:
    """Return what looks like a call or a result in a notation of another library."""
    if not isinstance(part, dict):
        return None

    for key in ("type", "part_kind", "kind", "role"):
        name = part.get(key)

        if isinstance(name, str) and _is_calling(name) and not _HOSTED.fullmatch(name):
            return Unknown(name)

    for key, value in part.items():
        if key != "tool_calls" and isinstance(value, dict | list) and value:
            if _is_calling(key):
                return Unknown(key)

    return None


@lru_cache(4096)
def _is_calling(name: str) -> bool:
    return _CALLING.fullmatch(re.sub("[_-]", "", name).lower()) is not None
