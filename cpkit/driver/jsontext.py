"""Values to JSON text and back, without loss, or an error with the path.

A value is accepted only if its text parses back to an equal value. So a later load can
return everything that is stored.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json, to_json

from cpkit.errors import SerializationError
from cpkit.records import JsonValue

__all__ = ["MAX_DEPTH", "encode_json", "parse_json", "plain_key"]

MAX_DEPTH = 200
"""Levels of nesting that pydantic_core's parser follows (jiter's recursion limit)."""


def parse_json(text: bytes | str) -> Any:
    """Parse JSON text; raise ``ValueError`` for anything else, NaN included."""
    return from_json(text, allow_inf_nan=False)


def encode_json(value: object, path: tuple[str | int, ...]) -> bytes:
    """Return the JSON text of a value, in UTF-8.

    Tuples become arrays. Subclasses of JSON types are stored as their base value.
    Raises ``SerializationError`` with the path to the first part that JSON cannot hold:
    NaN and infinities, lone surrogates, keys that are not strings, other types, nesting
    deeper than ``MAX_DEPTH``, and integers longer than Python converts (4,300 digits).
    """
    # pydantic_core converts types that JSON lacks (bytes, sets, dates, integer keys).
    # The comparison detects that at C speed. Only a value that differs is walked in
    # Python.
    try:
        body = to_json(value)

        if parse_json(body) == value:
            return body
    except (ValueError, TypeError, RecursionError):
        pass  # the walk below finds the path, or copies subclasses to plain values

    plain = _plain(value, path, 0)

    try:
        body = to_json(plain)

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
        text = str.__str__(value)

        if not text.isascii():
            _check_surrogates(text, path)

        return text

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

    text = str.__str__(key)
    _check_surrogates(text, (*path, text))
    return text


def _check_surrogates(text: str, path: tuple[str | int, ...]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SerializationError(path, "has a lone surrogate") from None
