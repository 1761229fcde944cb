"""Channel values as JSON, and the new items of lists that grow.

A stored value is an *entry*: text, numbers, bools and ``None`` are JSON as they are,
unless the serializer encrypts. Any other value is a list: the packing, the name of the
serializer's format, and a text. A text of the packing ``latin-1`` has one character for
each byte, because most states are mostly ASCII text and this costs little time. Other
bytes are ``base64``. ``plain`` is the text itself.

A text of more than ``INLINE`` characters is in records of its own, the *blobs*; the
entry has the list of their ids.

Often a list starts with the items of the version before, for instance messages. Then
only its *tail* is stored, and a fourth item says how many items of the earlier list
come first. Items are compared by content, so an item that was changed in place is
stored again.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import urandom
from typing import Any

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel
from pydantic_core import SchemaValidator, core_schema

__all__ = [
    "Prints",
    "Value",
    "blobs_of",
    "is_plain",
    "length_of",
    "loaded",
    "packed",
    "prints_of",
    "same_items",
    "value_of",
]

Prints = list[bytes | str]
"""A fingerprint of each item of a list: bytes, or the item itself if it is a text."""

INLINE = 4096

# A message has at most 16 MiB. A text of this length leaves room for the rest of the
# record, even if each of its characters takes six bytes. It is a multiple of four.
_LARGEST = 2 * 1024 * 1024

# Bytes that take one or two bytes in JSON. Others below 128 take six, and those from
# 128 on take two.
_CHEAP = bytes(range(32, 127)) + b"\n\r\t"
_HIGH = bytes(range(128, 256))

# Several times faster than the standard library.
_BASE64 = SchemaValidator(core_schema.bytes_schema(), {"val_json_bytes": "base64"})

# What a small value costs beside its text, in characters.
_SMALL = 200

_PLAIN_TYPES = (str, int, bool, type(None))

# The options of LangGraph's serializer: equal fingerprints mean equal stored items.
_PACKING = (
    ormsgpack.OPT_NON_STR_KEYS
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_UUID
    | ormsgpack.OPT_REPLACE_SURROGATES
)

_SERDE = JsonPlusSerializer(pickle_fallback=False, allowed_msgpack_modules=None)


@dataclass(slots=True, eq=False)
class Value:
    """A channel's value that is not plain JSON, at one version.

    With a ``base``, it is a tail that follows the base's first ``keep`` items.
    """

    packing: str
    kind: str
    texts: Sequence[str]
    base: Value | None = None
    keep: int = 0
    prints: Prints | None = None

    def load(self, serde: SerializerProtocol) -> Any:
        """Build and return the value, which shares no object with another result."""
        tails = []
        value = self

        while value.base is not None:
            tails.append(value)
            value = value.base

        result = value._load(serde)

        for tail in reversed(tails):
            del result[tail.keep :]
            result += tail._load(serde)

        return result

    def _load(self, serde: SerializerProtocol) -> Any:
        # Each text is decoded alone, so that no second copy of a large one is held.
        match self.packing:
            case "plain":
                return "".join(self.texts)
            case "latin-1":
                parts = [text.encode("latin-1") for text in self.texts]
            case "base64":  # a text that another one follows has whole groups of four
                parts = [_BASE64.validate_json(f'"{text}"') for text in self.texts]
            case _:
                raise ValueError(f"unknown packing {self.packing!r:.40}")

        data = b"".join(parts)
        del parts
        return serde.loads_typed((self.kind, data))


def value_of(entry: Any, blobs: Mapping[str, str], before: object = None) -> Any:
    """Return the value of an entry: a `Value`, or JSON as it is.

    ``blobs`` has texts by id, and ``before`` is the value that a tail follows.
    """
    if type(entry) is not list:
        return entry

    packing, kind, text, *keep = entry

    if type(text) is str:
        texts = [text]
    elif missing := [one for one in text if one not in blobs]:
        raise ValueError(f"the blob {missing[0]!r:.40} is missing")
    else:
        texts = [blobs[one] for one in text]

    if not keep:
        return Value(packing, kind, texts)

    if type(before) is not Value:
        raise ValueError("the list that a tail follows is missing")

    return Value(packing, kind, texts, before, *keep)


def loaded(value: Any, serde: SerializerProtocol) -> Any:
    """Return the value that a `Value` describes; JSON is the value itself."""
    return value.load(serde) if type(value) is Value else value


def is_plain(value: Any) -> bool:
    """Return whether JSON keeps the value as it is."""
    kind = type(value)
    return kind in _PLAIN_TYPES or (kind is float and math.isfinite(value))


def packed(data: bytes) -> tuple[str, str]:
    """Return the packing and the text of a serialized value."""
    if _is_text(data):
        return "latin-1", data.decode("latin-1")

    return "base64", b64encode(data).decode()


def blobs_of(text: str) -> list[dict[str, Any]]:
    """Return the records of a long text, with new ids."""
    parts = [text[at : at + _LARGEST] for at in range(0, len(text), _LARGEST)]
    return [{"type": "blob", "id": urandom(12).hex(), "text": one} for one in parts]


def length_of(value: Any) -> int:
    """Return about how many characters a reader of the value needs."""
    if type(value) is not Value:
        return _SMALL + (len(value) if type(value) is str else 0)

    length = 0
    part: Value | None = value

    while part is not None:
        length += sum(map(len, part.texts))
        part = part.base

    return length


def prints_of(value: Any) -> Prints | None:
    """Return a fingerprint of each item, which is equal only for equal items.

    Return ``None`` for a value that is always stored completely: anything but a list,
    an empty list, one with an item that cannot be packed, and one of numbers, for which
    fingerprints cost more than storing them.
    """
    if type(value) is not list or not value or isinstance(value[0], int | float):
        return None

    try:
        return [item if type(item) is str else _print(item) for item in value]
    except Exception:
        # The code of a value may raise any type. The serializer reports the error.
        return None


def same_items(known: Prints, prints: Prints) -> int:
    """Return how many items the known list shares, or 0 to store all items."""
    keep = len(known)

    if prints[:keep] != known:
        pairs = enumerate(zip(known, prints, strict=False))
        shorter = len(prints)
        keep = next((n for n, (before, now) in pairs if before != now), shorter)

    # A tail that is most of the list would save little.
    kept = sum(map(len, prints[:keep]))
    return keep if 2 * kept >= sum(map(len, prints)) else 0


def _is_text(data: bytes) -> bool:
    """Return whether a character for each byte takes less than base64 does."""
    sample = data[:: len(data) // 4096 + 1]
    others = sample.translate(None, _CHEAP)
    escapes = others.translate(None, _HIGH)
    return 3 * (len(others) + 4 * len(escapes)) <= len(sample)


def _print(item: Any) -> bytes:
    if isinstance(item, BaseModel):
        # The fields of a model, several times faster than its dump.
        kind, more = type(item), (item.__pydantic_extra__, item.__pydantic_private__)
        item = kind.__module__, kind.__qualname__, item.__dict__, *more
        return b"m" + ormsgpack.packb(item, _pack, _PACKING)

    return b"v" + ormsgpack.packb(item, _pack, _PACKING)


def _pack(item: Any) -> ormsgpack.Ext:
    name, data = _SERDE.dumps_typed(item)
    return ormsgpack.Ext(0, ormsgpack.packb((name, data)))
