"""Values to JSON text and back, without loss, or an error with the path.

A value is accepted only if its text parses back to an equal value. So a later load can
return everything that is stored.

Text with surrogates
    UTF-8 cannot hold them, so they are stored as escapes: ``\\ud83d``. pydantic_core
    does not parse a surrogate that stands alone, and Python does. But both would join a
    high one and a low one behind it to one character. So a string with such a pair
    begins with U+DFFF, and has an underscore behind each high surrogate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from pydantic_core import from_json, to_json

from cpkit.errors import SerializationError
from cpkit.records import JsonValue

__all__ = [
    "MAX_DEPTH",
    "encode_json",
    "has_surrogates",
    "like_patterns",
    "parse_json",
    "plain_key",
    "refuse_constant",
]

MAX_DEPTH = 200
"""Levels of nesting that pydantic_core's parser follows (jiter's recursion limit)."""

_MAX_NEEDLE = 1_000  # SQLite takes patterns of 50,000 bytes

_MARK = "\udfff"
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_HIGH = re.compile("[\ud800-\udbff]")
_WILD = re.compile(r"[\\%_]")
_ESCAPED = r"\\\g<0>"
_SPLIT_HIGH = re.compile("([\ud800-\udbff])_")


def parse_json(text: bytes | str) -> Any:
    """Parse stored JSON text; raise ``ValueError`` for anything else, NaN included."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        if not has_surrogates(text):
            raise

    return _with_texts(json.loads(text, parse_constant=refuse_constant), _unmarked)


def has_surrogates(text: bytes | str) -> bool:
    """Tell whether stored JSON text may have a surrogate in it."""
    return text.find(b"\\ud" if isinstance(text, bytes) else "\\ud") >= 0  # type: ignore[arg-type]  # of the same type


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _marked(text: str) -> str:
    """Return a string with a mark where JSON would join surrogates."""
    is_ambiguous = text.startswith(_MARK) or _PAIR.search(text)
    return _MARK + _HIGH.sub(r"\g<0>_", text) if is_ambiguous else text


def _unmarked(text: str) -> str:
    return _SPLIT_HIGH.sub(r"\1", text[1:]) if text.startswith(_MARK) else text


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with each string in it changed."""
    if isinstance(value, str):
        return change(value)

    if isinstance(value, dict):
        return {change(k): _with_texts(one, change) for k, one in value.items()}

    return [_with_texts(one, change) for one in value] if type(value) is list else value


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
        try:
            body = to_json(plain)
        except ValueError:  # surrogates, which become escapes
            text = json.dumps(_with_texts(plain, _marked), separators=(",", ":"))
            body = text.encode()

        if parse_json(body) == plain:
            return body
    except ValueError as exc:
        raise SerializationError(path, f"does not survive JSON: {exc}") from exc

    raise SerializationError(path, "does not survive JSON")


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


def like_patterns(text: str) -> list[str]:
    """Return what stored JSON with this text in a string is ``LIKE``, in any case.

    All engines take upper and lower case of ASCII for alike, and some only of ASCII.
    """
    if not 0 < len(text) <= _MAX_NEEDLE:
        raise ValueError(f"text must have 1 to {_MAX_NEEDLE} characters")

    cases = text.lower(), text.upper(), text.title(), text.capitalize()
    forms = dict.fromkeys([text] if text.isascii() else [text, *cases])
    stored = [encode_json(one, ())[1:-1].decode() for one in forms]
    return [f"%{_WILD.sub(_ESCAPED, one)}%" for one in stored]
