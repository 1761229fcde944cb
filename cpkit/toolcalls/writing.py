"""Write results for the calls of a thread, in the form and wrapper of each call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from cpkit.toolcalls.thread import OpenCall

__all__ = ["Answer", "can_answer", "result_messages"]

Message = dict[str, Any]

# Of the other items of the responses API the output is not a text. A shell's call has
# this output in Codex.
_OUTPUTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "local_shell_call": "function_call_output",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The result to write for an open call."""

    open_call: OpenCall
    text: str
    is_error: bool

    @property
    def call_id(self) -> str:
        return self.open_call.call.call_id

    @property
    def tool_name(self) -> str:
        return self.open_call.call.tool_name


def can_answer(one: OpenCall) -> bool:
    """Return whether `result_messages` can write a result for this call."""
    if one.call.form == "responses" and one.call.kind not in _OUTPUTS:
        return False

    return one.call.form in _WRITERS and one.wrapper in _WRAPPERS


def result_messages(
    answers: Sequence[Answer], messages: Sequence[Any]
) -> tuple[list[Message], Message]:
    """Return the messages to append to a thread, and a change of its extra.

    ``messages`` are those of the thread. Results of one form stand together.
    """
    appended: list[Message] = []
    extra: Message = {}
    forms = [(one.open_call.wrapper, one.open_call.call.form) for one in answers]

    for wrapper, form in dict.fromkeys(forms):
        same = [
            one
            for one, its in zip(answers, forms, strict=True)
            if its == (wrapper, form)
        ]
        wrap = _WRAPPERS[wrapper]
        appended += wrap(_WRITERS[form](same), same, messages)

        if wrapper == "adk":
            extra["updated"] = appended[-1]["event"]["timestamp"]

    return appended, extra


# Forms


def _chat(answers: list[Answer]) -> list[Message]:
    return [{"role": "tool", **_named(one), "content": one.text} for one in answers]


def _cpkit(answers: list[Answer]) -> list[Message]:
    return [
        {
            "role": "tool",
            "tool_call_id": one.call_id,
            "tool_name": one.tool_name,
            "content": one.text,
            "is_error": one.is_error,
        }
        for one in answers
    ]


def _cubeloop(answers: list[Answer]) -> list[Message]:
    return [
        {
            **message,
            "role": "tool_result",
            "content": [{"type": "text", "text": message["content"]}],
            "timestamp": time.time(),
        }
        for message in _cpkit(answers)
    ]


def _session(answers: list[Answer]) -> list[Message]:
    return [
        {
            "role": "toolResult",
            "toolCallId": one.call_id,
            "toolName": one.tool_name,
            "content": [{"type": "text", "text": one.text}],
            "isError": one.is_error,
            "timestamp": time.time_ns() // 1_000_000,
        }
        for one in answers
    ]


def _langchain(answers: list[Answer]) -> list[Message]:
    return [
        {
            "type": "tool",
            "content": one.text,
            "tool_call_id": one.call_id,
            "name": one.tool_name,
            "status": "error" if one.is_error else "success",
        }
        for one in answers
    ]


def _anthropic(answers: list[Answer]) -> list[Message]:
    return [{"role": "user", "content": [_block(one) for one in answers]}]


def _responses(answers: list[Answer]) -> list[Message]:
    return [
        {
            "type": _OUTPUTS[one.open_call.call.kind],
            "call_id": one.call_id,
            "output": one.text,
        }
        for one in answers
    ]


def _pydantic_ai(answers: list[Answer]) -> list[Message]:
    parts = [
        {
            "part_kind": "tool-return",
            "tool_name": one.tool_name,
            "content": one.text,
            "tool_call_id": one.call_id,
            "timestamp": datetime.now(UTC).isoformat(),
        }
        for one in answers
    ]
    return [{"kind": "request", "parts": parts}]


def _gemini(answers: list[Answer], key: str = "function_response") -> list[Message]:
    parts = []

    for one in answers:
        response = {"error" if one.is_error else "result": one.text}
        named = {"id": one.call_id} if one.call_id else {}
        answer = {**named, "name": one.tool_name, "response": response}
        parts.append({key: answer})

    return [{"role": "user", "parts": parts}]


def _gemini_camel(answers: list[Answer]) -> list[Message]:
    return _gemini(answers, "functionResponse")


def _named(one: Answer) -> Message:
    """Return how a result names its call: by its id, or else by its tool."""
    if one.call_id:
        return {"tool_call_id": one.call_id}

    return {"tool_name": one.tool_name}


def _block(one: Answer) -> Message:
    return {
        "type": "tool_result",
        "tool_use_id": one.call_id,
        "content": one.text,
        "is_error": one.is_error,
    }


_WRITERS: dict[str, Callable[[list[Answer]], list[Message]]] = {
    "openai": _chat,
    "plain": _chat,
    "langchain": _langchain,
    "cpkit": _cpkit,
    "cubeloop": _cubeloop,
    "session": _session,
    "anthropic": _anthropic,
    "responses": _responses,
    "pydantic-ai": _pydantic_ai,
    "gemini": _gemini,
    "gemini-camel": _gemini_camel,
}


# Wrappers

Wrap = Callable[[list[Message], list[Answer], Sequence[Any]], list[Message]]


def _plain(inner: list[Message], _: list[Answer], __: Sequence[Any]) -> list[Message]:
    return inner


def _item(inner: list[Message], _: list[Answer], __: Sequence[Any]) -> list[Message]:
    return [{"item": one, "by": uuid4().hex[:16]} for one in inner]


def _rollout(inner: list[Message], _: list[Answer], __: Sequence[Any]) -> list[Message]:
    return [
        {"timestamp": _stamp(), "type": "response_item", "payload": one}
        for one in inner
    ]


def _data(inner: list[Message], _: list[Answer], __: Sequence[Any]) -> list[Message]:
    return [{"type": "tool", "data": one} for one in inner]


def _dumped(inner: list[Message], _: list[Answer], __: Sequence[Any]) -> list[Message]:
    path = ["langchain", "schema", "messages", "ToolMessage"]
    return [
        {"lc": 1, "type": "constructor", "id": path, "kwargs": one} for one in inner
    ]


def _event(
    inner: list[Message], answers: list[Answer], messages: Sequence[Any]
) -> list[Message]:
    called = messages[answers[0].open_call.position]["event"]
    return [
        {
            "event": {
                "id": str(uuid4()),
                "invocation_id": called.get("invocation_id", ""),
                "author": called.get("author", "user"),
                "timestamp": time.time(),
                "content": one,
                "actions": {},
            }
        }
        for one in inner
    ]


def _transcript(
    inner: list[Message], answers: list[Answer], messages: Sequence[Any]
) -> list[Message]:
    """Return entries with a result each, each a child of the entry before it."""
    found = [one.get("entry", one) for one in messages if isinstance(one, dict)]
    # Notes at the end, as Claude Code writes them, have no uuid.
    before = next((one for one in reversed(found) if "uuid" in one), found[-1])
    kept = ("sessionId", "cwd", "version", "isSidechain", "userType")
    entries: list[Message] = []

    for one in answers:
        before = {
            **{name: before[name] for name in kept if name in before},
            "type": "user",
            "uuid": str(uuid4()),
            "parentUuid": before.get("uuid"),
            "timestamp": _stamp(),
            "message": {"role": "user", "content": [_block(one)]},
        }
        entries.append(before)

    return entries


def _claude(
    inner: list[Message], answers: list[Answer], messages: Sequence[Any]
) -> list[Message]:
    entries = _transcript(inner, answers, messages)
    records: list[Message] = [
        {"entry": entry, "by": uuid4().hex[:16]} for entry in entries
    ]

    if "summary" in messages[-1]:
        # The result of a tool changes nothing in a session's summary.
        records[-1]["summary"] = messages[-1]["summary"]

    return records


def _stamp() -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return now.replace("+00:00", "Z")


_WRAPPERS: dict[str, Wrap] = {
    "": _plain,
    "agents": _item,
    "codex": _rollout,
    "adk": _event,
    "claude": _claude,
    "transcript": _transcript,
    "langchain-data": _data,
    "langchain-lc": _dumped,
}
