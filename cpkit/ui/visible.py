"""Stored text, made safe to look at.

Everything in a store is untrusted. Jinja escapes HTML. This module shows the characters
that a browser would hide, or that change the order of the text around them.
"""

from __future__ import annotations

import json
import re
import unicodedata
from datetime import datetime
from typing import Any

from cpkit.tools.formats import age, utc_time

__all__ = ["LONGEST", "ago", "around", "cut", "fields", "pretty", "utc", "visible"]

LONGEST = 4_000
"""Characters of one text in a conversation; the message's own page shows all."""

_ONE_LINE = 100

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Replace control characters and marks of direction by visible signs."""
    return _HIDDEN.sub(_sign, text) if _HIDDEN.search(text) else text


def _sign(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)

    if code < 0x20:
        return chr(0x2400 + code)

    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"

    name = unicodedata.name(character, "")
    return f"⟨{name.lower() or f'U+{code:04X}'}⟩"


def cut(text: str, length: int = LONGEST) -> str:
    """Return the start of the text, with an ellipsis if more follows."""
    return text if len(text) <= length else text[: length - 1] + "…"


def around(text: str, at: int) -> str:
    """Return the words around a place in the text, on one line."""
    start, stop = max(0, at - 40), at + 100
    words = " ".join(text[start:stop].split())
    return f"{'…' if start else ''}{words}{'…' if stop < len(text) else ''}"


def pretty(value: Any) -> str:
    """Return a JSON value as indented text."""
    return json.dumps(value, ensure_ascii=False, indent=2)


def fields(value: Any) -> list[tuple[str, str, bool]]:
    """Return the names and values of an object; of another value, nothing.

    A text that is long, or that JSON would escape, is itself (``True``); others are
    JSON, so that a number and its text look different.
    """
    if not isinstance(value, dict):
        return []

    found = []

    for name, one in value.items():
        text = pretty(one)
        is_text = isinstance(one, str) and (len(one) > _ONE_LINE or text != f'"{one}"')
        found.append((name, one if is_text else text, is_text))

    return found


def utc(time: str | None) -> str:
    """Return an ISO time as a person reads it, in UTC to the second."""
    return "–" if time is None else utc_time(datetime.fromisoformat(time))


def ago(time: str | None) -> str:
    """Return how long ago an ISO time was, in the largest unit that fits."""
    return "–" if time is None else age(datetime.fromisoformat(time))
