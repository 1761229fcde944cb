"""What a message says of itself: its time, its model, its tokens and its cost.

Knows the fields of the session format, OpenAI, Anthropic, LangChain, pydantic-ai, the
ADK and the Claude Agent SDK.
They are read from the message, and from its ``metadata`` and ``response_metadata``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

__all__ = ["Usage", "time_of", "total_of", "usage_of"]

_TIMES = ("timestamp", "created_at", "created", "time")
_MODELS = ("model", "model_name", "modelId")
_USAGES = ("usage", "usage_metadata", "token_usage")
_IN = ("input", "input_tokens", "prompt_tokens", "request_tokens")
_OUT = ("output", "output_tokens", "completion_tokens", "response_tokens")
_COSTS = ("cost", "cost_usd", "total_cost")

# Tokens of the prompt that these formats do not count as input.
_CACHED = (
    "cacheRead",
    "cacheWrite",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
)


_AROUND = ("metadata", "response_metadata")
_ADAPTERS = ("entry", "event")
_KNOWN = {*_TIMES, *_MODELS, *_USAGES, *_COSTS, *_AROUND, *_ADAPTERS, "message"}


@dataclass(frozen=True, slots=True)
class Usage:
    """What is known of a message, or of several; ``time`` is ISO, ``cost`` dollars."""

    time: str | None = None
    model: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None
    cost: float | None = None


_NOTHING = Usage()


def usage_of(message: Any) -> Usage:
    """Return what a message says of itself, or the entry or event around it."""
    # Most messages say nothing of themselves, and a page asks all that it shows.
    if not isinstance(message, dict) or _KNOWN.isdisjoint(message):
        return _NOTHING

    places = [message, *_objects(message, _ADAPTERS)]
    places += _objects(places[-1], ("message",))
    places += _objects(places[-1], _AROUND)
    usages = [one for place in places for one in _objects(place, _USAGES)][:1]
    cached = [_number(one.get(name)) or 0 for one in usages for name in _CACHED]
    tokens_in = _first(usages, _IN, _number)
    return Usage(
        _first(places, _TIMES, _time),
        _first(places, _MODELS, _text) or "",
        None if tokens_in is None else int(tokens_in + sum(cached)),
        None if (out := _first(usages, _OUT, _number)) is None else int(out),
        _first([*usages, *places], _COSTS, _cost),
    )


def time_of(message: Any) -> datetime | None:
    """Return when a message was written, as it says itself, or ``None``."""
    time = usage_of(message).time
    return None if time is None else datetime.fromisoformat(time)


def total_of(usages: Iterable[Usage]) -> Usage:
    """Return the sums of several messages, the models, and the latest time."""
    given = list(usages)
    models = dict.fromkeys(one.model for one in given if one.model)

    def summed(name: str) -> Any:
        found = [getattr(one, name) for one in given]
        known = [value for value in found if value is not None]
        return sum(known) if known else None

    return Usage(
        max((one.time for one in given if one.time), default=None),
        ", ".join(models),
        summed("tokens_in"),
        summed("tokens_out"),
        summed("cost"),
    )


def _objects(place: dict[str, Any], names: Iterable[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        if isinstance(place.get(name), dict):
            yield place[name]


def _first(places: Iterable[dict[str, Any]], names: Iterable[str], read: Any) -> Any:
    """Return the first field of these names that can be read, or ``None``."""
    found = (read(place.get(name)) for place in places for name in names)
    return next((value for value in found if value is not None), None)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and 0 <= value < 1e15 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _cost(value: Any) -> float | None:
    return _number(value.get("total") if isinstance(value, dict) else value)


def _time(value: Any) -> str | None:
    """Return a time as ISO text in UTC; numbers are seconds or milliseconds."""
    try:
        if isinstance(value, str):
            time = datetime.fromisoformat(value)
            time = time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC)
        elif (number := _number(value)) is not None and number >= 1e8:
            time = datetime.fromtimestamp(number / (1000 if number > 1e11 else 1), UTC)
        else:
            return None
    except (ValueError, OverflowError, OSError):
        return None

    return time.isoformat()
