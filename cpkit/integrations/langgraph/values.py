"""Channel values: stored once a version, and growing lists by what was added.

A list that begins like the one before it (the usual thing for messages) is stored as
its *tail*: "the value of that earlier record, up to ``keep`` items, and then these".
Whether it begins alike is decided by content, so an item that was changed in place is
seen and stored again.
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
    "prints_of",
    "tail_start",
    "to_json",
]

Typed = tuple[str, bytes]
"""What a serializer of LangGraph makes: the name of a format, and bytes in it."""

EMPTY: Typed = ("empty", b"")
"""A channel that has a version and no value, written as LangGraph's savers do."""

# As LangGraph's serializer packs, so that equal prints mean an equal record.
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
    """A channel's value at one version, as it stands in a record of the thread.

    With a ``base``, ``typed`` is a list that follows its first ``keep`` items.
    """

    record_id: str
    typed: Typed
    base: Value | None = None
    keep: int = 0

    def load(self, serde: SerializerProtocol) -> Any:
        """Return the value, built anew."""
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
    """A list that is in the store, in that record, and the prints of its items."""

    record_id: str
    prints: list[bytes]


def prints_of(value: Any) -> list[bytes] | None:
    """Return bytes for each item of a list that tell its content from any other.

    ``None`` for what is always stored whole: what is no list, an empty one, a list of
    numbers (one print each would cost more than writing them), and what cannot be
    packed.
    """
    if type(value) is not list or not value or isinstance(value[0], int | float):
        return None

    try:
        return [_print(item) for item in value]
    except Exception:
        # Whatever a value's own code raises: it is for the serializer to say.
        return None


def tail_start(known: Known | None, prints: list[bytes] | None) -> int:
    """Return how many items of a list to take from the known one; 0: store it whole."""
    if known is None or prints is None:
        return 0

    keep = 0

    for before, now in zip(known.prints, prints, strict=False):
        if before != now:
            break

        keep += 1

    # A tail that is most of the list would only make the chain longer.
    kept = sum(map(len, prints[:keep]))
    return keep if 2 * kept >= sum(map(len, prints)) else 0


def to_json(typed: Typed) -> list[JsonValue]:
    return [typed[0], b64encode(typed[1]).decode()]


def from_json(name: str, data: str) -> Typed:
    return name, b64decode(data, validate=True)


def _print(item: Any) -> bytes:
    if isinstance(item, BaseModel):
        # What a model's dump is made of, several times faster than the dump.
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
