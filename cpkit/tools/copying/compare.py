"""Compare the same thread of two stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from json import JSONEncoder
from typing import Any

from cpkit.records import CallRecord, ThreadDump
from cpkit.tools.copying.exports import call_as_json

__all__ = ["are_equal", "find_conflict", "is_same"]

# As text, because ``1 == 1.0 == True``. Sorted, because the order of extra's keys may
# differ between stores.
_text = JSONEncoder(
    ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True
).encode


def is_same(found: ThreadDump, wanted: ThreadDump) -> bool:
    """Return whether two dumps are equal, with all times."""
    return (
        (found.created_at, found.updated_at) == (wanted.created_at, wanted.updated_at)
        and found.first == wanted.first
        and are_equal(found.messages, wanted.messages)
        and _text(dict(found.extra)) == _text(dict(wanted.extra))
        and are_equal(_as_json(found.calls), _as_json(wanted.calls))
    )


def find_conflict(found: ThreadDump, wanted: ThreadDump) -> str | None:
    """Return why a copy of the ``wanted`` thread must not go on from the ``found`` one.

    ``None`` if it may: the found thread is the same, or an earlier state. An earlier
    state may lack messages and calls at the end, and results of calls; its extra may
    have any values. It may have messages that the wanted one has trimmed since.
    """
    if wanted.created_at is None and found.created_at is not None:
        return "the source has deleted it, and the destination has not"

    if (trimmed := wanted.first - found.first) < 0:
        return f"the destination has trimmed {-trimmed} messages that the source has"

    pairs = zip(found.messages[trimmed:], wanted.messages, strict=False)

    for position, (message, expected) in enumerate(pairs, wanted.first):
        if _text(message) != _text(expected):
            return f"message {position} differs in the destination"

    if (more := len(found.messages) - trimmed - len(wanted.messages)) > 0:
        return f"the destination has {more} more messages"

    if keys := sorted(found.extra.keys() - wanted.extra.keys()):
        return f"the destination has the extra key {keys[0]!r}, which the source lacks"

    for record, expected_record in zip(found.calls, wanted.calls, strict=False):
        if reason := _find_call_conflict(record, expected_record):
            return reason

    if more_calls := found.calls[len(wanted.calls) :]:
        call_id = more_calls[0].call.call_id
        return f"the destination has the call {call_id!r}, which the source lacks"

    if found.created_at not in (None, wanted.created_at):
        return "the destination has a thread that was created at another time"

    if found.updated_at and wanted.updated_at and found.updated_at > wanted.updated_at:
        return "the destination has a later change than the source"

    return None


def _find_call_conflict(found: CallRecord, wanted: CallRecord) -> str | None:
    if found.erased and not wanted.erased:
        return "the destination has deleted it, and keeps its keys"

    issued = replace(wanted, status="issued", result=None, resolved_at=None)
    one, other = call_as_json(found), call_as_json(wanted)

    if _text(one) in (_text(other), _text(call_as_json(issued))):
        return None

    names = ", ".join(name for name in one if _text(one[name]) != _text(other[name]))
    return f"call {wanted.call.call_id!r} differs in the destination ({names})"


def _as_json(calls: Sequence[CallRecord]) -> list[Any]:
    return [call_as_json(one) for one in calls]


def are_equal(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Compare one value at a time, so that no text of the whole thread is needed."""
    return len(found) == len(wanted) and all(
        _text(theirs) == _text(ours) for theirs, ours in zip(found, wanted, strict=True)
    )
