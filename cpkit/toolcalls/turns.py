"""Whether a message begins a turn of a conversation."""

from __future__ import annotations

from typing import Any

from cpkit.toolcalls.reading import read_message, unwrap

__all__ = ["begins_turn"]

_USERS = ("user", "human", "HumanMessage", "HumanMessageChunk")
_ROLES = (*_USERS, "ai", "tool", "system", "developer", "function", "AIMessageChunk")


def begins_turn(message: Any) -> bool | None:
    """Return whether a user begins a turn with a message; ``None`` if it has no role.

    A user's message that has only results of tools begins none.
    """
    _, inner = unwrap(message)

    match inner:
        case {"kind": "request", "parts": list(parts)}:  # pydantic-ai
            begins = any(_is_prompt(part) for part in parts)
        case {"kind": "response", "parts": list()}:
            begins = False
        case {"role": str(role)}:
            begins = role in _USERS
        case {"type": str(kind)} if kind in _ROLES:
            begins = kind in _USERS
        case _:
            return None

    return begins and not read_message(message).results


def _is_prompt(part: Any) -> bool:
    return isinstance(part, dict) and part.get("part_kind") == "user-prompt"
