"""A stored message as blocks that a page can show.

Knows the forms of `cpkit.messages`, the session format, OpenAI's chat and responses
APIs, Anthropic's API and pydantic-ai. Anything else is shown as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from cpkit.sessions.pictures.describe import describe
from cpkit.ui.usage import Usage, usage_of
from cpkit.ui.visible import pretty

__all__ = ["Block", "Row", "is_entry", "rows_of"]

BlockKind = Literal[
    "text", "system", "reasoning", "call", "result", "image", "json", "note"
]

_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_MOST = 100  # blocks of a message; the message's own page has all
_LARGEST_IMAGE = 4_000_000  # characters of base64 in a page


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a message.

    ``text`` is Markdown for "text" and "system", a ``data:`` URL or a description for
    "image", and plain text otherwise. ``call_id`` joins a "call" and its "result".
    ``args`` of a call are its arguments, and ``result`` is the block that answers it,
    if it is on the same page. ``position`` is that of a result's message.
    """

    kind: BlockKind
    text: str
    name: str = ""
    call_id: str = ""
    is_error: bool = False
    args: Any = None
    result: Block | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A message of a thread: where it stands, its role, and its blocks."""

    position: int
    role: str
    blocks: list[Block]
    entry_id: str | None = None
    """The id of a session's entry, which has a state of its own."""
    usage: Usage = Usage()
    has_more: bool = False
    """Whether the message has more blocks than these."""


def rows_of(messages: list[Any], start: int) -> list[Row]:
    """Return the rows of messages; ``start`` is the position of the first.

    A result moves into the call that it answers, if that call stands before it. A
    message that has nothing else has no row.
    """
    rows = [_row(message, at) for at, message in enumerate(messages, start)]
    calls: dict[str, tuple[int, int]] = {}

    for at, row in enumerate(rows):
        for index, block in enumerate(row.blocks):
            if block.kind == "call" and block.call_id:
                calls[block.call_id] = (at, index)

        kept: list[Block] = []

        for block in row.blocks:
            place = calls.pop(block.call_id, None) if block.kind == "result" else None

            if place is None:
                kept.append(block)
                continue

            call_row, index = place
            call = rows[call_row].blocks[index]
            result = replace(block, position=row.position)
            rows[call_row].blocks[index] = replace(call, result=result)

        if len(kept) < len(row.blocks):
            rows[at] = replace(row, blocks=kept)

    return [row for row in rows if row.blocks or row.has_more]


def _row(message: Any, position: int) -> Row:
    if not isinstance(message, dict):
        return Row(position, "", [Block("json", pretty(message))])

    if is_entry(message):
        return _entry_row(message, position)

    role = message.get("role") or message.get("kind") or message.get("type")
    found = _blocks(message)
    blocks = list(islice(found, _MOST)) or [Block("json", pretty(message))]
    has_more = next(found, None) is not None

    if role in ("system", "developer"):
        blocks = [
            replace(one, kind="system") if one.kind == "text" else one for one in blocks
        ]

    return Row(
        position,
        role if isinstance(role, str) else "",
        blocks,
        usage=usage_of(message),
        has_more=has_more,
    )


def is_entry(message: Any) -> bool:
    """Return whether this is an entry of a session, or its header."""
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        return False

    if message["type"] == "message" and not isinstance(message.get("message"), dict):
        return False

    return "parentId" in message or (
        message["type"] == "session" and isinstance(message.get("version"), int)
    )


def _entry_row(entry: dict[str, Any], position: int) -> Row:
    entry_id = entry.get("id")

    if entry["type"] == "session":
        note = f"session, started in {entry.get('cwd') or 'an unnamed folder'}"
        return Row(position, "session", [Block("note", note)], usage=usage_of(entry))

    if entry["type"] == "message":
        row = _row(entry["message"], position)
    else:
        text = entry.get("summary")
        blocks = [Block("note", describe(entry))]

        if isinstance(text, str):
            blocks = [Block("note", entry["type"]), Block("text", text)]
        elif entry["type"] == "custom":
            blocks.append(Block("json", pretty(entry.get("data"))))

        row = Row(position, entry["type"], blocks)

    return replace(
        row,
        entry_id=entry_id if isinstance(entry_id, str) else None,
        usage=usage_of(entry),
    )


def _blocks(message: dict[str, Any]) -> Iterator[Block]:
    call_id = message.get("toolCallId") or message.get("tool_call_id")

    if isinstance(call_id, str) and message.get("role") in ("tool", "toolResult"):
        name = message.get("toolName") or message.get("tool_name") or ""
        yield _result(message.get("content"), call_id, name, message)
        return

    # A message of pydantic-ai has parts, and an item of the responses API is a part.
    content = message.get("content", message.get("parts"))

    if isinstance(content, str):
        if content:
            yield Block("text", content)
    elif isinstance(content, list):
        for part in content:
            yield from _part(part)
    elif "content" not in message and "role" not in message:
        yield from _part(message)

    for field_name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(field_name), str):
            yield Block("reasoning", message[field_name])

    tool_calls = message.get("tool_calls")

    for call in tool_calls if isinstance(tool_calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None

        if isinstance(function, dict):
            yield _call(call.get("id"), function.get("name"), function.get("arguments"))

    if isinstance(message.get("errorMessage"), str):
        yield Block("note", message["errorMessage"], is_error=True)


def _part(part: Any) -> Iterator[Block]:
    if isinstance(part, str):
        yield Block("text", part)
        return

    if not isinstance(part, dict):
        yield Block("json", pretty(part))
        return

    kind = part.get("type") or part.get("part_kind")

    match kind:
        case "text" | "input_text" | "output_text" | "refusal" | "summary_text":
            yield Block("text", _text(part.get("text", part.get("content"))))
        case "system-prompt":
            yield Block("system", _text(part.get("content")))
        case "user-prompt" | "retry-prompt":
            content = part.get("content")

            for inner in content if isinstance(content, list) else [content]:
                yield from _part(inner)
        case "reasoning" | "thinking":
            text = part.get("text") or part.get("thinking") or part.get("content")
            yield Block("reasoning", _text(text or part.get("summary")))
        case "toolCall" | "tool_call" | "tool_use" | "tool-call" | "function_call":
            call_id = part.get("call_id") or part.get("tool_call_id") or part.get("id")
            given = (part[key] for key in ("args", "arguments", "input") if key in part)
            name = part.get("name") or part.get("tool_name")
            yield _call(call_id, name, next(given, {}))
        case "tool_result" | "tool-return" | "function_call_output":
            call_id = (
                part.get("call_id")
                or part.get("tool_call_id")
                or part.get("tool_use_id")
            )
            content = part.get("content", part.get("output"))
            yield _result(content, _text(call_id), part.get("tool_name"), part)
        case "image" | "image_url" | "input_image":
            yield _image(part)
        case _:
            yield Block("json", pretty(part))


def _call(call_id: Any, name: Any, args: Any) -> Block:
    if isinstance(args, str):
        try:
            args = json.loads(args)
        except (ValueError, RecursionError):
            return Block("call", args, _text(name), _text(call_id))

    return Block("call", pretty(args), _text(name), _text(call_id), args=args)


def _result(content: Any, call_id: str, name: Any, message: dict[str, Any]) -> Block:
    parts = content if isinstance(content, list) else [content]
    texts = [
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else _text(part)
        for part in parts
    ]
    text = "\n".join(texts)
    is_error = bool(
        message.get("isError")
        or message.get("is_error")
        or message.get("status") == "error"
        # Chat formats have no field for this; tools say it so.
        or text[:40].lstrip().casefold().startswith(("error:", '{"error":'))
    )
    return Block("result", text, _text(name), call_id, is_error)


def _image(part: dict[str, Any]) -> Block:
    """Return an image with a ``data:`` URL; another URL is named and not loaded."""
    source = part.get("source")
    fields = {**part, **source} if isinstance(source, dict) else part
    url = fields.get("image_url") or fields.get("url")
    url = url.get("url") if isinstance(url, dict) else url
    media_type = fields.get("media_type") or fields.get("mimeType")
    data = fields.get("data")

    if media_type in _IMAGES and isinstance(data, str):
        url = f"data:{media_type};base64,{data}"

    if not isinstance(url, str):
        return Block("image", f"an image of type {media_type}")

    is_shown = (
        len(url) <= _LARGEST_IMAGE
        and url.startswith(tuple(f"data:{one};base64," for one in _IMAGES))
        and all(c.isalnum() or c in "+/=" for c in url.partition(",")[2])
    )
    return Block("image", url if is_shown else f"an image at {url[:200]}")


def _text(value: Any) -> str:
    if value is None:
        return ""

    return value if isinstance(value, str) else pretty(value)
