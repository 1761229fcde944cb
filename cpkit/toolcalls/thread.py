"""Pair the calls of a thread with their results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cpkit.toolcalls.reading import Call, Reading, Result

__all__ = ["OpenCall", "call_spans", "open_calls"]


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call without a result, in the message at a position of the thread."""

    position: int
    call: Call
    wrapper: str


def open_calls(readings: Iterable[tuple[int, Reading]]) -> list[OpenCall]:
    """Return the calls without a result, oldest first.

    A model may repeat an id. Then a result belongs to the newest open call. A result
    without an id belongs to the first open call of the newest message with one, of the
    result's tool if it names one.
    """
    return _paired(readings)[0]


def call_spans(readings: Iterable[tuple[int, Reading]]) -> list[tuple[int, int]]:
    """Return the positions of each call and its result, paired as by `open_calls`."""
    return _paired(readings)[1]


def _paired(
    readings: Iterable[tuple[int, Reading]],
) -> tuple[list[OpenCall], list[tuple[int, int]]]:
    unanswered: list[OpenCall] = []
    spans: list[tuple[int, int]] = []

    for position, reading in readings:
        for result in reading.results:
            answered = _answered(unanswered, result)

            if answered is not None:
                unanswered.remove(answered)
                spans.append((answered.position, position))

        unanswered += (OpenCall(position, it, reading.wrapper) for it in reading.calls)

    return unanswered, spans


def _answered(unanswered: list[OpenCall], result: Result) -> OpenCall | None:
    if result.call_id:
        same = (one for one in unanswered[::-1] if one.call.call_id == result.call_id)
        return next(same, None)

    return next(
        (
            one
            for one in unanswered
            if one.position == unanswered[-1].position
            and result.tool_name in ("", one.call.tool_name)
        ),
        None,
    )
