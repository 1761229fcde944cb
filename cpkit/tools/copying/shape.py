"""A thread in hashes, so that two of them are compared without holding both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from json import JSONEncoder
from typing import Any

from cpkit.records import CallRecord, CheckpointData

__all__ = ["Calls", "Shape", "calls_flaw", "content_flaw", "shape_of", "unlike_call"]

Calls = Mapping[str, CallRecord]
"""A thread's calls by id, in the order of claims."""

# Sorted, because a store may keep an object's keys in another order; `1` and `1.0` are
# told apart, because a message is to come back as it was.
_ENCODE = JSONEncoder(
    ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True
).encode


@dataclass(frozen=True, slots=True)
class Shape:
    """Hashes of messages and extra; ``sizes`` are the messages' characters of JSON."""

    messages: list[bytes]
    sizes: list[int]
    extra: dict[str, bytes]

    @property
    def version(self) -> int:
        return len(self.messages)


def shape_of(data: CheckpointData[Any] | None) -> Shape:
    """Return the shape of what a load gave; of a missing thread, an empty one."""
    shape = Shape([], [], {})

    if data is None:
        return shape

    for message in data.messages:
        text = _ENCODE(message)
        shape.messages.append(_digest(text))
        shape.sizes.append(len(text))

    shape.extra.update((k, _digest(_ENCODE(v))) for k, v in data.extra.items())
    return shape


def content_flaw(wanted: Shape, found: Shape, *, may_replace: bool) -> str | None:
    """Return what stands in the way of making ``found`` into ``wanted``.

    Messages may be missing at the end and extra keys anywhere; with ``may_replace``
    values of extra may differ too.
    """
    pairs = zip(wanted.messages, found.messages, strict=False)

    for position, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            return f"message {position} is another one in the destination"

    if found.version > wanted.version:
        more = found.version - wanted.version
        return f"the destination has {more} messages more"

    for key in sorted(found.extra):
        if key not in wanted.extra:
            return (
                f"the destination has the extra key {key!r}, which the source has not"
            )

        if found.extra[key] != wanted.extra[key] and not may_replace:
            return (
                f"extra key {key!r} has another value in the destination "
                "(--overwrite-extra takes the source's)"
            )

    return None


def calls_flaw(wanted: Iterable[CallRecord], there: Calls) -> str | None:
    """Return how the destination's calls can never become those that are wanted.

    There may be fewer, and some issued still.
    """
    ours = {one.call.call_id: one for one in wanted if not one.erased}

    for call_id, found in there.items():
        if found.erased:
            return "it was deleted in the destination, which keeps its keys"

        if call_id not in ours:
            return f"call {call_id!r} is in the destination alone"

        reason = unlike_call(ours[call_id], found)

        if reason is not None:
            return reason

    return None


def unlike_call(wanted: CallRecord, found: CallRecord) -> str | None:
    """Return how a call of the destination differs, but for an outcome to come."""
    where = f"call {wanted.call.call_id!r}"

    if _identity(wanted) != _identity(found):
        return f"{where} is another one in the destination"

    if wanted.attempt != found.attempt:
        return (
            f"{where} is attempt {wanted.attempt}, in the destination {found.attempt}"
        )

    if found.status == "issued":
        return None

    if wanted.status != found.status:
        return f"{where} is {wanted.status}, in the destination {found.status}"

    if _ENCODE(wanted.result) != _ENCODE(found.result):
        return f"{where} has another result in the destination"

    return None


def _identity(record: CallRecord) -> tuple[str, str, str]:
    call = record.call
    return call.idempotency_key, call.tool_name, _ENCODE(dict(call.args))


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
