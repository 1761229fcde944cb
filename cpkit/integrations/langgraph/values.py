"""Channel values: stored once for each version, and growing lists by their new items.

Often a list starts with the items of the version before it, for instance messages.
Then only its *tail* is stored: the first ``keep`` items are those of an earlier record.
Items are compared by content, so an item that was changed in place is stored again.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
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
_SERDE = JsonPlusSerializer(pickle_fallback=False, allowed_msgpack_modules=None)


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A channel's value at one version, as a record of the thread has it.

    With a ``base``, ``typed`` is a tail that follows the base's first ``keep`` items.
    """

    record_id: str
    typed: Typed
    base: Value | None = None
    keep: int = 0

    def load(self, serde: SerializerProtocol) -> Any:
        """Build and return the value, which shares no object with another result."""
        tails = []
        value = self

        while value.base is not None:
            tails.append(value)
            value = value.base

        result = serde.loads_typed(value.typed)

        for tail in reversed(tails):
            del result[tail.keep :]
            result += serde.loads_typed(tail.typed)

        return result


@dataclass(frozen=True, slots=True)
class Known:
    """The fingerprints of a list's items, and the record that stores the list."""

    record_id: str
    fingerprints: list[bytes]


def fingerprints_of(value: Any) -> list[bytes] | None:
    """Return a fingerprint of each item: bytes that are equal only for equal items.

    Return ``None`` for a value that is always stored completely: a value that is not a
    list, an empty list, and a list with an item that cannot be packed. A list of
    numbers is one too, because fingerprints would cost more than storing them.
    """
    if type(value) is not list or not value or isinstance(value[0], int | float):
        return None

    try:
        return [_fingerprint(item) for item in value]
    except Exception:
        # The code of a value may raise any type. The serializer reports the error.
        return None


def tail_start(known: Known | None, fingerprints: list[bytes] | None) -> int:
    """Return how many items the known list shares, or 0 to store all items."""
    if known is None or fingerprints is None:
        return 0

    keep = 0

    for before, now in zip(known.fingerprints, fingerprints, strict=False):
        if before != now:
            break

        keep += 1

    # A tail that is most of the list would save little and make the chain longer.
    kept = sum(map(len, fingerprints[:keep]))
    return keep if 2 * kept >= sum(map(len, fingerprints)) else 0


def to_json(typed: Typed) -> list[JsonValue]:
    return [typed[0], b64encode(typed[1]).decode()]


def from_json(name: str, data: str) -> Typed:
    return name, b64decode(data, validate=True)


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
