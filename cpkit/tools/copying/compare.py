"""Compare the same thread of two stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from json import JSONEncoder
from typing import Any

from cpkit.records import CallRecord, ThreadDump
from cpkit.tools.copying.exports import call_as_json

__all__ = ["find_conflict", "is_same"]

# As text, because ``1 == 1.0 == True``. Sorted, because the order of extra's keys may
# differ between stores.
_text = JSONEncoder(
    ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True
).encode


def is_same(found: ThreadDump, wanted: ThreadDump) -> bool:
    """Return whether two dumps are equal, with all times."""
    return (
        (found.created_at, found.updated_at) == (wanted.created_at, wanted.updated_at)
        and _are_equal(found.messages, wanted.messages)
        and _text(dict(found.extra)) == _text(dict(wanted.extra))
        and _are_equal(_as_json(found.calls), _as_json(wanted.calls))
    )


def find_conflict(found: ThreadDump, wanted: ThreadDump) -> str | None:
    """Return why the destination's thread is not an earlier state of the source's.

    ``None`` if it is one, or is the same: messages and calls are missing at the end
    only, calls are still issued, and values of extra may differ.
    """
    if wanted.created_at is None and found.created_at is not None:
        return "the source has deleted it, and the destination has not"

    for position, pair in enumerate(zip(found.messages, wanted.messages, strict=False)):
        if not _are_equal(*([one] for one in pair)):
            return f"message {position} differs in the destination"

    if (more := len(found.messages) - len(wanted.messages)) > 0:
        return f"the destination has {more} more messages"

    for key in sorted(found.extra.keys() - wanted.extra.keys()):
        return f"the destination has the extra key {key!r}, which the source lacks"

    for theirs, ours in zip(found.calls, wanted.calls, strict=False):
        if (reason := _find_call_conflict(theirs, ours)) is not None:
            return reason

    for theirs in found.calls[len(wanted.calls) :]:
        call_id = theirs.call.call_id
        return f"the destination has the call {call_id!r}, which the source lacks"

    if found.created_at not in (None, wanted.created_at):
        return "the destination has a thread that was created at another time"

    if found.updated_at and wanted.updated_at and found.updated_at > wanted.updated_at:
        return "the destination has a later change than the source"

    return None


def _find_call_conflict(theirs: CallRecord, ours: CallRecord) -> str | None:
    if theirs.erased and not ours.erased:
        return "the destination has deleted it, and keeps its keys"

    found, wanted = call_as_json(theirs), call_as_json(ours)
    issued = replace(ours, status="issued", result=None, resolved_at=None)

    if _text(found) in (_text(wanted), _text(call_as_json(issued))):
        return None

    names = [name for name in found if _text(found[name]) != _text(wanted[name])]
    return f"call {ours.call.call_id!r} differs in the destination ({', '.join(names)})"


def _as_json(calls: Sequence[CallRecord]) -> list[Any]:
    return [call_as_json(one) for one in calls]


def _are_equal(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Compare one value at a time, so that no text of the whole thread is needed."""
    return len(found) == len(wanted) and all(
        _text(theirs) == _text(ours) for theirs, ours in zip(found, wanted, strict=True)
    )
