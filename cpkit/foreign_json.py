"""JSON text that other programs write or read; stores keep text of their own."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

from cpkit.driver.jsontext import refuse_constant

__all__ = ["encode_text", "parse_foreign_json"]

_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_foreign_json(text: bytes | str) -> Any:
    """Parse JSON text of another program; raise ``ValueError`` for anything else.

    Two escapes of one character are that character. A lone surrogate is kept. The mark
    of `cpkit.driver.jsontext` has no meaning.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        # It refuses lone surrogates, and everything that is not JSON.
        try:
            return json.loads(text, parse_constant=refuse_constant)
        except RecursionError as exc:
            raise ValueError(str(exc)) from exc


def encode_text(text: str) -> bytes:
    """Return JSON text in UTF-8; surrogates in it are written as escapes."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub(lambda one: f"\\u{ord(one[0]):x}", text).encode()
