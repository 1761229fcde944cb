"""A thread on a line of time: its turns, calls, waits for people, and attempts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from heapq import merge
from typing import Any

from cpkit.effects.records import APPROVAL
from cpkit.records import CallRecord
from cpkit.sessions.pictures.describe import shortened
from cpkit.toolcalls.usage import Usage, total_of
from cpkit.ui.blocks import rows_of
from cpkit.ui.site import call_data

__all__ = ["in_order", "on_a_line", "turns_of", "usage_data"]

_TURNS = 100
_PEOPLE = ("user", "human", "request")


def turns_of(
    messages: Sequence[Any], usages: Sequence[Usage], first: int
) -> list[dict[str, Any]]:
    """Return the newest turns: a message of a person, and what follows it.

    ``usages`` are those of the messages; ``first`` is the position of the first.
    """
    starts = [
        (at, text)
        for at, message in enumerate(messages)
        if (text := _said(message)) is not None
    ]
    stops = [at for at, _ in starts[1:]] + [len(messages)]
    found = []

    for (at, text), stop in list(zip(starts, stops, strict=False))[-_TURNS:]:
        usage = total_of(usages[at:stop])
        begin = usages[at].time
        seconds = None

        if begin is not None and usage.time is not None:
            length = datetime.fromisoformat(usage.time) - datetime.fromisoformat(begin)
            seconds = length.total_seconds()

        found.append(
            {
                "message": first + at,
                "text": text,
                "messages": stop - at,
                "begin": begin,
                "seconds": seconds,
                **usage_data(usage),
            }
        )

    return found


def _said(message: Any) -> str | None:
    """Return what a person says in a message, shortened; ``None`` for another one."""
    inner = message.get("message", message) if isinstance(message, dict) else None

    # Before the blocks are made, because that takes the time of showing the message.
    if not isinstance(inner, dict) or not any(
        inner.get(name) in _PEOPLE for name in ("role", "kind", "type")
    ):
        return None

    for row in rows_of([message], 0):
        for block in row.blocks:
            if block.kind in ("text", "image"):
                return shortened(block.text if block.kind == "text" else "an image")

    return None


def usage_data(usage: Usage) -> dict[str, Any]:
    """Return a usage as JSON."""
    return {
        "time": usage.time,
        "model": usage.model,
        "tokens_in": usage.tokens_in,
        "tokens_out": usage.tokens_out,
        "cost": usage.cost,
    }


def on_a_line(
    turns: list[dict[str, Any]], records: Sequence[CallRecord]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return turns and calls, each with its place on a line from 0 to 100.

    A turn without a time has no place. ``takeover`` of a call says that an earlier
    attempt of the same key stands before it.
    """
    now = datetime.now(UTC)
    spans: list[tuple[dict[str, Any], datetime, float]] = []

    for turn in turns:
        if turn["begin"] is not None and (turn["seconds"] or 0) >= 0:
            begin = datetime.fromisoformat(turn["begin"])
            spans.append((turn, begin, turn["seconds"] or 0))

    calls = []

    for record in records:
        end = record.resolved_at or now
        call = {
            **call_data(record),
            "is_approval": record.call.tool_name == APPROVAL,
            "is_internal": record.call.tool_name.startswith("cpkit:"),
            "takeover": record.attempt > 1,
        }
        calls.append(call)
        length = (end - record.issued_at).total_seconds()
        spans.append((call, record.issued_at, length))

    first = min((begin for _, begin, _ in spans), default=now)
    ends = [(begin - first).total_seconds() + length for _, begin, length in spans]
    whole = max([*ends, 1e-6])

    for one, begin, length in spans:
        left = min(100 * (begin - first).total_seconds() / whole, 99)
        one["left"] = round(left, 2)
        one["width"] = round(min(max(100 * length / whole, 1), 100 - left), 2)

    return turns, calls


def in_order(
    turns: list[dict[str, Any]], calls: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return turns and calls by time; each kind keeps its own order."""
    return list(
        merge(turns, calls, key=lambda one: one.get("issued_at") or one["begin"] or "")
    )
