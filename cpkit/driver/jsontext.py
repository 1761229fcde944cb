"""Values to JSON text and back, without loss, or an error with the path.

A value is accepted only if its text parses back to an equal value. So a later load can
return everything that is stored.

The text is UTF-8, with one addition: a surrogate in a Python string stands in it as an
escape, ``\\ud83d``, because UTF-8 cannot hold surrogates. No other character is written
as such an escape. A text with one is parsed by Python, every other by pydantic_core.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from pydantic_core import from_json, to_json

from cpkit.errors import SerializationError
from cpkit.records import JsonValue

__all__ = ["ESCAPE", "MAX_DEPTH", "encode_json", "parse_json", "plain_key"]

MAX_DEPTH = 200
"""Levels of nesting that pydantic_core's parser follows (jiter's recursion limit)."""

ESCAPE: dict[type, Any] = {bytes: b"\\ud", str: "\\ud"}
"""What a stored text with a surrogate contains, by the type of the text."""

_SURROGATES = re.compile("[\ud800-\udfff]")
_ESCAPES = re.compile(r"\\(?:u(d[89a-f][0-9a-f]{2})|.)")


def parse_json(text: bytes | str) -> Any:
    """Parse stored JSON text; raise ``ValueError`` for anything else, NaN included."""
    if ESCAPE[type(text)] not in text:
        return from_json(text, allow_inf_nan=False)

    raw = text.decode() if isinstance(text, bytes) else text
    return json.loads(_ESCAPES.sub(_surrogate, raw), parse_constant=_refuse_constant)


def _surrogate(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] is None else chr(int(escape[1], 16))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def encode_json(value: object, path: tuple[str | int, ...]) -> bytes:
    """Return the JSON text of a value, in UTF-8.

    Tuples become arrays. Subclasses of JSON types are stored as their base value.
    Raises ``SerializationError`` with the path to the first part that JSON cannot hold:
    NaN and infinities, keys that are not strings, other types, nesting deeper than
    ``MAX_DEPTH``, and integers longer than Python converts (4,300 digits).
    """
    # pydantic_core converts types that JSON lacks (bytes, sets, dates, integer keys).
    # The comparison detects that at C speed. Only a value that differs is walked in
    # Python.
    try:
        body = to_json(value)

        if from_json(body, allow_inf_nan=False) == value:
            return body
    except (ValueError, TypeError, RecursionError):
        pass  # the walk below finds the path, or copies subclasses to plain values

    plain = _plain(value, path, 0)

    try:
        body = _to_text(plain)

        if parse_json(body) == plain:
            return body
    except ValueError as exc:
        raise SerializationError(path, f"does not survive JSON: {exc}") from exc

    raise SerializationError(path, "does not survive JSON")


def _to_text(plain: JsonValue) -> bytes:
    """Return the JSON text of plain values; surrogates are written as escapes."""
    try:
        return to_json(plain)
    except ValueError:
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
        return _SURROGATES.sub(lambda one: f"\\u{ord(one[0]):x}", text).encode()


def _plain(value: object, path: tuple[str | int, ...], depth: int) -> JsonValue:
    """Copy a value into exact JSON types, or raise with the path to another type."""
    if value is None or isinstance(value, bool):
        return value

    if isinstance(value, str):
        return str.__str__(value)

    if isinstance(value, int):
        try:
            int.__repr__(value)
        except ValueError as exc:
            raise SerializationError(path, str(exc)) from None

        return int(value)

    if isinstance(value, float):
        number = float(value)

        if number - number != 0:
            raise SerializationError(path, f"{number!r} is not a JSON number")

        return number

    if not isinstance(value, (dict, list, tuple)):
        raise SerializationError(path, f"JSON has no {type(value).__name__}")

    if depth == MAX_DEPTH:
        raise SerializationError(path, f"nested deeper than {MAX_DEPTH} levels")

    if isinstance(value, dict):
        return {
            plain_key(key, path): _plain(inner, (*path, key), depth + 1)
            for key, inner in value.items()
        }

    return [_plain(inner, (*path, i), depth + 1) for i, inner in enumerate(value)]


def plain_key(key: object, path: tuple[str | int, ...]) -> str:
    """Return an object's key as a plain string; refuse any other type.

    The ``json`` module writes ``1`` as ``"1"``, which makes two keys equal.
    """
    if not isinstance(key, str):
        step = key if isinstance(key, int) else repr(key)
        raise SerializationError(
            (*path, step), f"keys are strings, not {type(key).__name__}"
        )

    return str.__str__(key)
