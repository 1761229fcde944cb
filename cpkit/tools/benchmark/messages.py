"""Messages like those of a customer-service agent: 1 KB each, and reproducible."""

from __future__ import annotations

import random
from functools import lru_cache

from cpkit.records import JsonValue

__all__ = ["Message", "message", "messages"]

Message = dict[str, JsonValue]

SIZE = 1000
"""Bytes of JSON, within ten percent."""

_WORDS = """
    I can help you with that reservation booking flight from to on the of and your is
    please confirm whether you would like proceed cancellation refund original payment
    method within five seven business days passenger cabin economy baggage allowance
    insurance certificate gift card credit ending in would cost total one-way round-trip
    departing arriving direct stop delayed by hours apologize inconvenience policy does
    not allow changes after basic however upgrade to be charged difference naïve café
""".split()
_TOOLS = (
    "get_reservation_details",
    "search_direct_flight",
    "update_reservation_flights",
    "calculate",
)


@lru_cache(maxsize=1)
def _texts() -> list[str]:
    """Return texts for messages: prose with a few letters beyond ASCII."""
    chance = random.Random(1)
    return [" ".join(chance.choices(_WORDS, k=200)) for _ in range(251)]


@lru_cache(maxsize=1)
def _tables() -> list[str]:
    """Return tool answers: JSON inside a JSON string, with quotes to escape."""
    chance = random.Random(2)
    return [
        ", ".join(
            f'"{chance.choice(_WORDS)}": {chance.choice(("true", "null", "142.5"))}'
            for _ in range(80)
        )
        for _ in range(241)
    ]


def message(number: int) -> Message:
    """Return a message by number: an assistant's, or the tool's answer to it."""
    call_id = f"call_{number // 2:012x}"
    tool = _TOOLS[number // 2 % len(_TOOLS)]

    if number % 2:
        table = _tables()[number % 241]
        content = f'{{"reservation_id": "{number:06X}", {table}'[: SIZE - 240] + "}"
        return {
            "role": "tool",
            "tool_call_id": call_id,
            "name": tool,
            "content": content,
        }

    arguments = f'{{"reservation_id": "{number:06X}", "cabin": "economy", "stops": 0}}'
    return {
        "role": "assistant",
        "content": _texts()[number % 251][: SIZE - 270],
        "tool_calls": [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": tool, "arguments": arguments},
            }
        ],
    }


def messages(start: int, count: int) -> list[Message]:
    """Return ``count`` messages, beginning with number ``start``."""
    return [message(number) for number in range(start, start + count)]
