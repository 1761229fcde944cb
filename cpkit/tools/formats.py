"""Facts of a store as people and programs read them, in a terminal and on the page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from math import log10
from typing import Any

from cpkit.records import ThreadInfo

__all__ = ["age", "counted", "dollars", "duration", "size", "thread_json", "utc_time"]

_UNITS = ("kB", "MB", "GB", "TB")


def thread_json(info: ThreadInfo) -> dict[str, Any]:
    """Return one thread of a list as JSON."""
    return {
        "thread_id": info.thread_id,
        "version": info.version,
        "created_at": info.created_at.isoformat(),
        "updated_at": info.updated_at.isoformat(),
    }


def utc_time(time: datetime) -> str:
    """Format a time in UTC, to the second."""
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(time: datetime) -> str:
    """Return how long ago a time was, in the largest unit that fits."""
    return _span(datetime.now(UTC) - time)


def duration(seconds: float) -> str:
    """Return a duration in the largest unit that fits."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f} ms"

    return _span(timedelta(seconds=seconds))


def _span(time: timedelta) -> str:
    seconds = max(0, int(time.total_seconds()))

    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"

    return f"{seconds} s"


def counted(count: int, noun: str) -> str:
    """Return the number with the noun, which is plural unless the number is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size(count: float) -> str:
    """Format a number of bytes in the largest unit that fits."""
    if count < 1000:
        return f"{count:.0f} bytes"

    power = min(len(_UNITS), int(log10(count) / 3))
    return f"{count / 1000**power:.1f} {_UNITS[power - 1]}"


def dollars(amount: float) -> str:
    """Format a cost; a small one has as many digits as a person needs to compare."""
    return f"${amount:.4f}" if 0 < amount < 1 else f"${amount:,.2f}"
