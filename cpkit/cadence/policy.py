"""When buffered messages are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from cpkit.sessions.toolcalls import calls_in

__all__ = ["Cadence", "is_turn_end"]


def is_turn_end(message: Any) -> bool:
    """Return whether this is an assistant's message without a tool call.

    It reads the message forms that `cpkit.sessions.toolcalls` knows: plain, typed, or
    inside a session's entry.
    """
    plain = message if isinstance(message, dict) else to_jsonable_python(message)

    if not isinstance(plain, dict):
        return False

    if plain.get("type") == "message" and isinstance(plain.get("message"), dict):
        plain = plain["message"]

    return plain.get("role") == "assistant" and not any(calls_in("", plain))


@dataclass(frozen=True)
class Cadence:
    """When a thread's buffered messages are written: at the first rule that applies.

    ``messages``: the buffer has so many; 1 buffers nothing. ``seconds``: the oldest has
    waited for so long. ``ends_turn``: it returns true for a message. Also before every
    claim, on `BufferedCheckpointer.flush` and on close.
    """

    messages: int = 100
    seconds: float | None = None
    ends_turn: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        if type(self.messages) is not int or self.messages < 1:
            raise ValueError(
                f"messages must be an int of at least 1, not {self.messages!r}"
            )

        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be more than 0, not {self.seconds!r}")

    @classmethod
    def per_message(cls) -> Cadence:
        """Buffer nothing."""
        return cls(1)

    @classmethod
    def per_tool_call(cls, *, messages: int = 100) -> Cadence:
        """Write before each claim: what led to an effect is stored before it runs."""
        return cls(messages)

    @classmethod
    def per_turn(
        cls, *, ends_turn: Callable[[Any], bool] = is_turn_end, messages: int = 100
    ) -> Cadence:
        """Write with the message that ends a turn, and before each claim."""
        return cls(messages, ends_turn=ends_turn)

    @classmethod
    def every(cls, messages: int = 100, *, seconds: float | None = None) -> Cadence:
        """Write every so many messages or seconds, and before each claim."""
        return cls(messages, seconds)

    @property
    def may_lose(self) -> str:
        """What a crash can lose, as a sentence."""
        if self.messages == 1:
            return "a crash loses nothing that was acknowledged"

        since = ["the last claim"]
        since += ["the last turn's end"] if self.ends_turn else []
        since += [f"{self.seconds:g} seconds ago"] if self.seconds else []
        lost = "message" if self.messages == 2 else f"{self.messages - 1} messages"
        return (
            f"a crash loses at most the last {lost} of a thread, "
            f"none from before {' or '.join(since)}"
        )
