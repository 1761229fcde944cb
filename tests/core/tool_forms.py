"""One call of ``pay(amount=7)``, and its result, in every form that cpkit reads."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["ASK", "FORMS", "UNKNOWN"]

ASK: dict[str, Any] = {"role": "user", "content": "pay"}
ARGS: dict[str, Any] = {"amount": 7}
TEXT = json.dumps(ARGS)

Messages = list[dict[str, Any]]


def said(**fields: Any) -> Messages:
    return [ASK, {"role": "assistant", "content": "", **fields}]


def told(**fields: Any) -> Messages:
    return [{"role": "tool", "content": "paid", **fields}]


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": "a", **fields}


TOOL_USE = {"type": "tool_use", "id": "a", "name": "pay", "input": ARGS}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "paid"}
CALL_ITEM = item("function_call", name="pay", arguments=TEXT)
OUTPUT_ITEM = item("function_call_output", output="paid")
AI = {
    "type": "ai",
    "content": "",
    "tool_calls": [{"name": "pay", "args": ARGS, "id": "a", "type": "tool_call"}],
    "invalid_tool_calls": [],
}
TOOL = {"type": "tool", "content": "paid", "tool_call_id": "a", "status": "success"}
GEMINI_CALL = {"name": "pay", "args": ARGS}
GEMINI_ANSWER = {"name": "pay", "response": {"result": "paid"}}


def adk(role: str, part: dict[str, Any]) -> dict[str, Any]:
    content = {"role": role, "parts": [part]}
    return {"event": {"id": "e", "author": "agent", "content": content}}


def dumped(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    path = ["langchain", "schema", "messages", name]
    return {"lc": 1, "type": "constructor", "id": path, "kwargs": fields}


# By name: the messages up to the call, and the messages of its result.
FORMS: dict[str, tuple[Messages, Messages]] = {
    "openai chat": (
        said(
            tool_calls=[
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "pay", "arguments": TEXT},
                }
            ]
        ),
        told(tool_call_id="a"),
    ),
    "openai chat, custom tool": (
        said(tool_calls=[{"id": "a", "custom": {"name": "pay", "input": TEXT}}]),
        told(tool_call_id="a"),
    ),
    "the tutorial": (
        said(tool_calls=[{"id": "a", "name": "pay", "args": ARGS}]),
        told(tool_call_id="a"),
    ),
    "the tutorial, results without an id": (
        said(tool_calls=[{"id": "a", "name": "pay", "args": ARGS}]),
        told(),
    ),
    "tool_calls with arguments": (
        said(tool_calls=[{"id": "a", "name": "pay", "arguments": TEXT}]),
        told(tool_call_id="a"),
    ),
    "ollama": (
        said(tool_calls=[{"function": {"name": "pay", "arguments": ARGS}}]),
        told(tool_name="pay"),
    ),
    "cpkit.messages": (
        said(content=[{"type": "tool_call", "id": "a", "name": "pay", "args": ARGS}]),
        told(tool_call_id="a", tool_name="pay"),
    ),
    "cubeloop": (
        said(
            content=[{"type": "tool_call", "id": "a", "name": "pay", "arguments": ARGS}]
        ),
        [{"role": "tool_result", "tool_call_id": "a", "content": [{"text": "paid"}]}],
    ),
    "session": (
        said(
            content=[{"type": "toolCall", "id": "a", "name": "pay", "arguments": ARGS}]
        ),
        [{"role": "toolResult", "toolCallId": "a", "content": [{"text": "paid"}]}],
    ),
    "anthropic": (
        said(content=[TOOL_USE]),
        [{"role": "user", "content": [TOOL_RESULT]}],
    ),
    "claude agent sdk": (
        [
            {"entry": {"type": "user", "uuid": "1", "message": ASK}},
            {"entry": {"type": "assistant", "message": said(content=[TOOL_USE])[1]}},
        ],
        [{"entry": {"type": "user", "message": {"content": [TOOL_RESULT]}}}],
    ),
    "claude transcript": (
        [
            {"type": "user", "uuid": "1", "message": ASK},
            {"type": "assistant", "message": said(content=[TOOL_USE])[1]},
        ],
        [{"type": "user", "message": {"role": "user", "content": [TOOL_RESULT]}}],
    ),
    "openai responses": ([ASK, CALL_ITEM], [OUTPUT_ITEM]),
    "openai responses, custom tool": (
        [ASK, item("custom_tool_call", name="pay", input=TEXT)],
        [item("custom_tool_call_output", output="paid")],
    ),
    "openai agents sdk": (
        [{"item": ASK, "by": "x"}, {"item": CALL_ITEM, "by": "x"}],
        [{"item": OUTPUT_ITEM, "by": "x"}],
    ),
    "codex rollout": (
        [
            {"type": "session_meta", "payload": {"id": "s"}},
            {"type": "response_item", "payload": CALL_ITEM},
            {"type": "event_msg", "payload": {"type": "token_count"}},
        ],
        [{"type": "response_item", "payload": OUTPUT_ITEM}],
    ),
    "pydantic-ai": (
        [
            {
                "kind": "response",
                "parts": [
                    {"part_kind": "text", "content": ""},
                    {
                        "part_kind": "tool-call",
                        "tool_name": "pay",
                        "args": TEXT,
                        "tool_call_id": "a",
                    },
                ],
            }
        ],
        [
            {
                "kind": "request",
                "parts": [
                    {
                        "part_kind": "tool-return",
                        "tool_name": "pay",
                        "content": "paid",
                        "tool_call_id": "a",
                    }
                ],
            }
        ],
    ),
    "langchain": ([AI], [TOOL]),
    "langchain messages_to_dict": (
        [{"type": "ai", "data": AI}],
        [{"type": "tool", "data": TOOL}],
    ),
    "langchain dumpd": ([dumped("AIMessage", AI)], [dumped("ToolMessage", TOOL)]),
    "google adk": (
        [adk("model", {"function_call": {"id": "a", **GEMINI_CALL}})],
        [adk("user", {"function_response": {"id": "a", **GEMINI_ANSWER}})],
    ),
    "gemini": (
        [{"role": "model", "parts": [{"function_call": GEMINI_CALL}]}],
        [{"role": "user", "parts": [{"function_response": GEMINI_ANSWER}]}],
    ),
    "gemini's json": (
        [{"role": "model", "parts": [{"functionCall": {"id": "a", **GEMINI_CALL}}]}],
        [{"role": "user", "parts": [{"functionResponse": GEMINI_ANSWER}]}],
    ),
}

# Calls and results of libraries that cpkit does not know, and how they are named.
UNKNOWN: dict[str, dict[str, Any]] = {
    "toolUse": said(content=[{"toolUse": {"toolUseId": "a", "name": "pay"}}])[1],
    "toolResult": {"role": "user", "content": [{"toolResult": {"toolUseId": "a"}}]},
    "tool-call": said(content=[{"type": "tool-call", "toolCallId": "a"}])[1],
    "tool-result": told(content=[{"type": "tool-result", "toolCallId": "a"}])[0],
    "function_call": said(function_call={"name": "pay", "arguments": TEXT})[1],
    "toolInvocations": said(toolInvocations=[{"toolName": "pay"}])[1],
    "tool_calls": said(tool_calls=[{"id": "a"}])[1],
    "anthropic without a name or id": said(content=[{**TOOL_USE, "id": 7}])[1],
}
