"""What names an effect, its approval, and the threads that the layer keeps for itself.

A key is the SHA-256 of a canonical JSON array, so it has no separator to forge: two
effects share a key only where scope, tool, kind and chosen values are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from json import JSONEncoder
from os import urandom
from typing import Literal

from cpkit.canonical import canonical_json
from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.errors import PayloadTooLarge, SerializationError
from cpkit.records import JsonValue

__all__ = [
    "APPROVAL",
    "GLOBAL_THREAD",
    "KeyKind",
    "Scope",
    "beats_thread",
    "chosen",
    "effect_key",
    "fresh_call_id",
    "plain_args",
    "request_key",
]

Scope = Literal["thread", "global"]

KeyKind = Literal["arguments", "fields", "resource", "given"]

GLOBAL_THREAD = "cpkit:global"
"""The thread of all calls and requests whose scope is global."""

APPROVAL = "cpkit:approval"
"""The tool name of approval requests; names that start with ``cpkit:`` are ours."""

_ENCODE = JSONEncoder(
    ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True
).encode

_LIKE_A_FLOAT = re.compile(r"[0-9][.e]")


def effect_key(
    scope: Scope, thread_id: str, tool: str, kind: KeyKind, values: JsonValue
) -> str:
    """Return the idempotency key of an effect."""
    where: list[JsonValue] = ["global"] if scope == "global" else ["thread", thread_id]
    return _digest([where, tool, kind, values])


def request_key(key: str, args: Mapping[str, JsonValue]) -> str:
    """Return the key of the approval request of an effect with exactly these args."""
    return _digest(["approval", key, dict(args)])


def chosen(
    args: Mapping[str, JsonValue],
    key_fields: Sequence[str] | None,
    resource: JsonValue,
    idempotency_key: str | None,
) -> tuple[KeyKind, JsonValue]:
    """Return which values name the effect: all arguments unless one says otherwise."""
    if sum(x is not None for x in (key_fields, resource, idempotency_key)) > 1:
        raise ValueError("give at most one of key_fields, resource, idempotency_key")

    if idempotency_key is not None:
        return "given", idempotency_key

    if resource is not None:
        return "resource", plain(resource, "resource")

    if key_fields is None:
        return "arguments", dict(args)

    if isinstance(key_fields, str):
        raise TypeError("key_fields is a list of names, not a str")

    missing = [name for name in key_fields if name not in args]

    if missing or not key_fields:
        raise ValueError(f"key_fields names no argument: {', '.join(missing) or '[]'}")

    return "fields", {name: args[name] for name in key_fields}


def plain_args(args: Mapping[str, JsonValue], limit: int) -> dict[str, JsonValue]:
    """Return a copy of the arguments as JSON has them; raise where it has not.

    ``limit`` is in bytes of JSON.
    """
    if not isinstance(args, Mapping):
        raise SerializationError(
            ("args",), f"args is a JSON object, not {type(args).__name__}"
        )

    body = encode_json(dict(args), ("args",))

    if len(body) > limit:
        raise PayloadTooLarge(("args",), len(body), limit)

    copied: dict[str, JsonValue] = parse_json(body)
    return copied


def plain(value: JsonValue, name: str) -> JsonValue:
    """Return a copy of a value as JSON has it; raise where it has not."""
    copied: JsonValue = parse_json(encode_json(value, (name,)))
    return copied


def beats_thread(key: str) -> str:
    """Return the thread in whose extra the holders of a key show signs of life."""
    return f"cpkit:beats:{key}"


def fresh_call_id() -> str:
    """Return the id of a new attempt, never used before."""
    return f"effect:{urandom(16).hex()}"


def _digest(parts: list[JsonValue]) -> str:
    # The C encoder writes what `canonical_json` does, six times as fast, wherever the
    # order of UTF-16 is that of code points and there is no float to be spelled.
    text = _ENCODE(parts)
    # Python writes floats with a point, or with an exponent and its sign.
    floats = "." in text or "e+" in text or "e-" in text

    if not text.isascii() or (floats and _LIKE_A_FLOAT.search(text)):
        text = canonical_json(parts)

    return sha256(text.encode()).hexdigest()
