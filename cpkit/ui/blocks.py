"""A stored message as blocks that a page can show.

Knows the text of `cpkit.messages`, the session format, OpenAI's chat and responses
APIs, Anthropic's API and pydantic-ai, and every tool call that `cpkit.toolcalls` reads.
Anything else is shown as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from cpkit.sessions.pictures.describe import describe
from cpkit.toolcalls import Call, Result, read_message, read_part, unwrap
from cpkit.toolcalls.usage import Usage, usage_of
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
    calls: dict[object, tuple[int, int]] = {}

    for at, row in enumerate(rows):
        for index, block in enumerate(row.blocks):
            if block.kind == "call":
                calls[block.call_id or (at, index)] = (at, index)

        kept: list[Block] = []

        for block in row.blocks:
            place = _answered(rows, calls, block) if block.kind == "result" else None

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


def _answered(
    rows: list[Row], calls: dict[object, tuple[int, int]], result: Block
) -> tuple[int, int] | None:
    """Take out the call of a result: by its id, or else the next of the newest row."""
    if result.call_id:
        return calls.pop(result.call_id, None)

    newest = max(calls.values(), default=(0, 0))[0]

    for key, (at, index) in calls.items():
        if at == newest and result.name in ("", rows[at].blocks[index].name):
            return calls.pop(key)

    return None


def _row(message: Any, position: int) -> Row:
    if not isinstance(message, dict):
        return Row(position, "", [Block("json", pretty(message))])

    if is_entry(message):
        return _entry_row(message, position)

    _, message = unwrap(message)
    role = message.get("role") or message.get("kind") or message.get("type")
    found = _blocks(message)
    blocks = list(islice(found, _MOST)) or [_empty(message)]
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
    reading = read_message(message)
    # A message of pydantic-ai has parts, and an item of the responses API is a part.
    content = message.get("content", message.get("parts"))
    parts = content if isinstance(content, list) else [message]
    in_parts = [one for one in map(read_part, parts) if isinstance(one, Call | Result)]

    if reading.results and not in_parts:
        yield from map(_result, reading.results)
        return

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

    shown = {one.call_id for one in in_parts if one.call_id}

    for call in reading.calls:
        if call.call_id not in shown if call.call_id else call not in in_parts:
            yield _call(call)

    for name in reading.unknown:
        yield Block("note", f"a tool call or result in an unknown form: {name}")

    if isinstance(message.get("errorMessage"), str):
        yield Block("note", message["errorMessage"], is_error=True)


def _part(part: Any) -> Iterator[Block]:
    if isinstance(part, str):
        yield Block("text", part)
        return

    if not isinstance(part, dict):
        yield Block("json", pretty(part))
        return

    match read_part(part):
        case Call() as call:
            yield _call(call)
            return
        case Result() as result:
            yield _result(result)
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
        case "image" | "image_url" | "input_image":
            yield _image(part)
        case _:
            yield Block("json", pretty(part))


def _call(call: Call) -> Block:
    if isinstance(call.args, str):
        return Block("call", call.args, call.tool_name, call.call_id)

    args = call.args or {}
    return Block("call", pretty(args), call.tool_name, call.call_id, args=args)


def _result(result: Result) -> Block:
    content = result.content
    parts = content if isinstance(content, list) else [content]
    texts = [
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else _text(part)
        for part in parts
    ]
    text = "\n".join(texts)
    # Chat formats have no field for an error; tools say it so.
    begin = text[:40].lstrip().casefold()
    is_error = result.is_error or begin.startswith(("error:", '{"error":'))
    return Block("result", text, result.tool_name, result.call_id, is_error)


def _empty(message: dict[str, Any]) -> Block:
    """Return what stands for a message without a block."""
    if message.get("role") is not None and not message.get("content", message):
        return Block("note", "no text")

    return Block("json", pretty(message))


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
