"""A short text for each entry, and the kind that gives its colour."""

from __future__ import annotations

from typing import Any, Literal

from cpkit.sessions.entries import LEAF, STATE, Entry, Message
from cpkit.toolcalls import read_message

__all__ = ["Kind", "describe", "kind_of", "shortened"]

Kind = Literal["user", "assistant", "tool", "summary", "setting", "fold"]

_WIDTH = 72


def shortened(text: str, width: int = _WIDTH) -> str:
    """Return the printable text on one line, cut at the width."""
    # A part of a long text that fills the width even if most of it is spaces.
    words = " ".join(text[: width * 8].split())
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
    return line if len(line) <= width else line[: width - 1] + "…"


def describe(entry: Entry) -> str:
    """Return a description of the entry on one line."""
    return shortened(_words(entry))


def kind_of(entry: Entry) -> Kind:
    """Return the entry's kind, as a reader sees it."""
    kind = entry["type"]

    if kind in ("compaction", "branch_summary"):
        return "summary"

    if kind != "message":
        return "setting"

    if read_message(entry["message"]).results:
        return "tool"

    role = entry["message"].get("role")

    if role == "user":
        return "user"

    return "assistant" if role == "assistant" else "setting"


def _words(entry: Entry) -> str:
    kind = entry["type"]

    if kind == "message":
        return _message_words(entry["message"])

    if kind == "custom" and entry.get("customType") == STATE:
        data = entry.get("data")
        return f"state: {', '.join(data) if isinstance(data, dict) else ''}"

    if kind == "custom" and entry.get("customType") == LEAF:
        return "the leaf moves here"

    says = {
        "model_change": f"model: {entry.get('provider')}/{entry.get('modelId')}",
        "thinking_level_change": f"thinking: {entry.get('thinkingLevel')}",
        "compaction": f"compaction: {entry.get('summary')}",
        "branch_summary": f"left a branch: {entry.get('summary')}",
        "custom": f"custom: {entry.get('customType')}",
        "custom_message": f"{entry.get('customType')}: {_text(entry.get('content'))}",
        "label": f"label: {entry.get('label', 'removed')}",
        "session_info": f"name: {entry.get('name')}",
    }
    return says.get(kind) or str(kind)


def _message_words(message: Message) -> str:
    text = _text(message.get("content"))
    reading = read_message(message)

    for result in reading.results:
        return f"{result.tool_name or 'tool'}: {text or _text(result.content)}"

    tools = ", ".join([*(call.tool_name for call in reading.calls), *reading.unknown])
    return f"{message.get('role')}: {text}{' → ' if tools else ''}{tools}"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content

    blocks = content if isinstance(content, list) else []
    texts = (block.get("text") for block in blocks if isinstance(block, dict))
    return " ".join(text for text in texts if isinstance(text, str))
