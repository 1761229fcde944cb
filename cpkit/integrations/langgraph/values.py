"""Channel values: stored once for each version, and growing lists by their new items.

Often a list starts with the items of the version before it, for instance messages.
Then only its *tail* is stored: the first ``keep`` items are those of an earlier record.
Items are compared by content, so an item that was changed in place is stored again.

Stored data is a list: the name of the serializer's format, a text, and how the text is
made of the bytes. ``"latin-1"`` has one character for each byte; most states are mostly
ASCII text, and this costs little time. Else the text is base64, with ``"zlib"`` if the
bytes are compressed. Small texts, numbers, bools and ``None`` are stored as JSON,
unless the serializer encrypts.
"""

from __future__ import annotations

import binascii
import math
import zlib
from base64 import b64encode
from dataclasses import dataclass
from typing import Any

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel

from cpkit.records import JsonValue

__all__ = [
    "EMPTY",
    "Known",
    "Typed",
    "Value",
    "from_json",
    "fingerprints_of",
    "is_plain",
    "load",
    "tail_start",
    "to_json",
]

Typed = tuple[str, bytes]
"""The output of a LangGraph serializer: the name of a format, and the bytes."""

EMPTY: Typed = ("empty", b"")
"""The value of a channel that has a version and no value, as in LangGraph's savers."""

# The options of LangGraph's serializer: equal fingerprints mean equal stored items.
_PACKING = (
    ormsgpack.OPT_NON_STR_KEYS
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_UUID
    | ormsgpack.OPT_REPLACE_SURROGATES
)
# Smaller values gain little.
_COMPRESSED_FROM = 512

# Larger texts are not stored as JSON.
_PLAIN_UP_TO = 512

# Bytes that take one or two bytes in JSON. Others below 128 take six, and those from
# 128 on take two.
_CHEAP = bytes(range(32, 127)) + b"\n\r\t"
_HIGH = bytes(range(128, 256))

_SERDE = JsonPlusSerializer(pickle_fallback=False, allowed_msgpack_modules=None)


@dataclass(slots=True, eq=False)
class Value:
    """A channel's value at one version, as a record of the thread has it.

    With a ``base``, ``data`` is a tail that follows the base's first ``keep`` items.
    """

    record_id: str
    data: list[Any]
    base: Value | None = None
    keep: int = 0

    @property
    def is_empty(self) -> bool:
        return bool(self.data[0] == EMPTY[0])

    def load(self, serde: SerializerProtocol) -> Any:
        """Build and return the value, which shares no object with another result."""
        tails = []
        value = self

        while value.base is not None:
            tails.append(value)
            value = value.base

        result = serde.loads_typed(from_json(value.data))

        for tail in reversed(tails):
            del result[tail.keep :]
            result += serde.loads_typed(from_json(tail.data))

        return result


@dataclass(slots=True)
class Known:
    """A list that a record stores: the fingerprints of its items, or its ``value``.

    The fingerprints of a list that was read are computed when another list may build on
    it.
    """

    record_id: str
    fingerprints: list[bytes | str] | None = None
    value: Value | None = None

    def load(self, serde: SerializerProtocol) -> list[bytes | str] | None:
        """Return the fingerprints; ``None`` if the value is not such a list."""
        if self.value is not None:
            self.fingerprints = fingerprints_of(self.value.load(serde))
            self.value = None

        return self.fingerprints


def fingerprints_of(value: Any) -> list[bytes | str] | None:
    """Return a fingerprint of each item, which is equal only for equal items.

    It is bytes, or the item itself if that is a ``str``.

    Return ``None`` for a value that is always stored completely: a value that is not a
    list, an empty list, and a list with an item that cannot be packed. A list of
    numbers is one too, because fingerprints would cost more than storing them.
    """
    if type(value) is not list or not value or isinstance(value[0], int | float):
        return None

    try:
        return [item if type(item) is str else _fingerprint(item) for item in value]
    except Exception:
        # The code of a value may raise any type. The serializer reports the error.
        return None


def tail_start(known: list[bytes | str], fingerprints: list[bytes | str]) -> int:
    """Return how many items the known list shares, or 0 to store all items."""
    keep = len(known)

    if fingerprints[:keep] != known:
        pairs = enumerate(zip(known, fingerprints, strict=False))
        shorter = len(fingerprints)
        keep = next((n for n, (before, now) in pairs if before != now), shorter)

    # A tail that is most of the list would save little and make the chain longer.
    kept = sum(map(len, fingerprints[:keep]))
    return keep if 2 * kept >= sum(map(len, fingerprints)) else 0


def load(value: Any, serde: SerializerProtocol) -> Any:
    """Build and return a channel's value: a `Value`, or JSON."""
    return value.load(serde) if type(value) is Value else value


def is_plain(value: Any) -> bool:
    """Return whether the value can be stored as JSON in place of LangGraph's bytes."""
    kind = type(value)

    if kind is str:
        return len(value) < _PLAIN_UP_TO and (value.isascii() or _is_utf8(value))

    if kind is int:
        return bool(-(2**63) <= value < 2**63)

    return kind is bool or value is None or (kind is float and math.isfinite(value))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False

    return True


def to_json(typed: Typed) -> list[JsonValue]:
    """Return the stored form of a serialized value."""
    name, data = typed

    if _is_mostly_ascii(data):
        return [name, data.decode("latin-1"), "latin-1"]

    if len(data) >= _COMPRESSED_FROM:
        packed = zlib.compress(data, 1)

        if len(packed) < 0.9 * len(data):
            return [name, b64encode(packed).decode(), "zlib"]

    return [name, b64encode(data).decode()]


def from_json(data: list[Any]) -> Typed:
    """Return the serialized value of a stored form.

    Raises ``ValueError`` for data that this version does not know.
    """
    name, text, *packing = data

    if packing == ["latin-1"]:
        return name, text.encode("latin-1")

    raw = binascii.a2b_base64(text, strict_mode=True)

    if packing == ["zlib"]:
        return name, zlib.decompress(raw)

    if packing:
        raise ValueError(f"unknown packing {packing!r}")

    return name, raw


def _is_mostly_ascii(data: bytes) -> bool:
    """Return whether a character for each byte takes less than base64 does."""
    others = data.translate(None, _CHEAP)

    if 15 * len(others) <= len(data):
        return True

    controls = len(others.translate(None, _HIGH))
    return 3 * (len(others) + 4 * controls) <= len(data)


def _fingerprint(item: Any) -> bytes:
    if isinstance(item, BaseModel):
        # The fields of a model, several times faster than its dump.
        kind = type(item)
        item = (
            kind.__module__,
            kind.__qualname__,
            item.__dict__,
            item.__pydantic_extra__,
            item.__pydantic_private__,
        )
        return b"m" + ormsgpack.packb(item, _pack, _PACKING)

    return b"v" + ormsgpack.packb(item, _pack, _PACKING)


def _pack(item: Any) -> ormsgpack.Ext:
    name, data = _SERDE.dumps_typed(item)
    return ormsgpack.Ext(0, ormsgpack.packb((name, data)))
