"""Recorded conversations, and a world that replays them.

A recording plays the model, the person and the tools: each gives its recorded answer.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from agent import Message, call_key, calls_of

from cpkit import JsonValue

from .airline import Books, Entry

__all__ = [
    "BadRecording",
    "Conversation",
    "RecordedWorld",
    "choose",
    "is_read_only",
    "price_of",
    "read",
]

# Any other tool counts as one that changes something, which is safe for new tools.
_READ_ONLY = ("get_", "search_", "list_", "calculate", "think")

# Dollars for a character, with four characters a token: 2.50 for a million tokens of
# input, 10 for a million tokens of output.
_READING = 2.50 / 4_000_000
_WRITING = 10.0 / 4_000_000


class BadRecording(Exception):
    """A file does not contain a conversation that the demo can play."""


@dataclass(frozen=True)
class Conversation:
    """A recorded conversation and the thread that it is played into."""

    name: str
    thread_id: str
    messages: list[Message]

    @cached_property
    def answers(self) -> dict[str, str]:
        """The answer to each call, by key."""
        return {
            call_key(self.thread_id, at, i): self.messages[at + 1 + i]["content"]
            for at, i, _ in self._calls()
        }

    @cached_property
    def changes(self) -> dict[str, Entry]:
        """The entries that the airline's books must have afterwards, by key."""
        entries = {}

        for at, i, call in self._calls():
            tool = call["function"]["name"]
            key = call_key(self.thread_id, at, i)

            if not is_read_only(tool):
                args = json.loads(call["function"]["arguments"])
                entries[key] = Entry(key, tool, args, self.answers[key])

        return entries

    def _calls(self) -> Iterator[tuple[int, int, Message]]:
        for at, message in enumerate(self.messages):
            for i, call in enumerate(calls_of(message)):
                yield at, i, call


class RecordedWorld:
    """The world of one conversation, with the airline's books shared by all.

    ``pace`` is the duration of a model's reply, in seconds.
    """

    def __init__(self, conversation: Conversation, books: Books, pace: float) -> None:
        self._conversation = conversation
        self._books = books
        self._pace = pace

    async def think(self, messages: list[Message]) -> tuple[Message, float] | None:
        message = await self.listen(messages)

        if message is None:
            return None

        await asyncio.sleep(self._pace)
        return message, price_of(messages, message)

    async def listen(self, messages: list[Message]) -> Message | None:
        script = self._conversation.messages
        return script[len(messages)] if len(messages) < len(script) else None

    def is_read_only(self, tool: str) -> bool:
        return is_read_only(tool)

    async def use(self, tool: str, args: dict[str, JsonValue], key: str) -> str:
        answer = self._conversation.answers[key]

        if not is_read_only(tool):
            entry = Entry(key, tool, args, answer)
            await asyncio.to_thread(self._books.write, entry)

        return answer

    async def look_up(self, key: str) -> str | None:
        return await asyncio.to_thread(self._books.answer_to, key)


def is_read_only(tool: str) -> bool:
    return tool.startswith(_READ_ONLY)


def price_of(messages: list[Message], reply: Message) -> float:
    """Return the price of a model's reply, in dollars."""
    read = sum(len(message["content"] or "") for message in messages)
    return read * _READING + len(json.dumps(reply)) * _WRITING


def read(path: Path, run: str) -> list[Conversation]:
    """Read conversations, one JSON object a line, for the threads of a run.

    Raises ``OSError``, and `BadRecording` for a line that is not a conversation.
    """
    found = []

    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found.append(_conversation(json.loads(line), run))
            except (ValueError, TypeError, LookupError, AttributeError) as exc:
                raise BadRecording(
                    f"{path}, line {number}: not a recorded conversation "
                    f"({type(exc).__name__}: {exc})"
                ) from exc

    twice = [name for name, n in Counter(c.name for c in found).items() if n > 1]

    if twice:
        raise BadRecording(f"{path}: two conversations have the name {twice[0]!r}")

    return found


def choose(conversations: list[Conversation], count: int) -> list[Conversation]:
    """Return the conversations with the most bookings; raise if none has one."""
    ranked = sorted(conversations, key=lambda c: len(c.changes), reverse=True)

    if not ranked or not ranked[0].changes:
        raise BadRecording(
            "no conversation has a call that changes something; the demo needs one"
        )

    return ranked[:count]


def _conversation(row: Any, run: str) -> Conversation:
    name, messages = row["thread_id"], row["messages"]

    if not isinstance(name, str) or not isinstance(messages, list):
        raise TypeError("thread_id must be a string, and messages a list")

    roles = "".join(message["role"][0] for message in messages)
    expected = "".join(
        message["role"][0] + "t" * len(calls_of(message))
        for message in messages
        if message["role"] != "tool"
    )

    if roles != expected:
        raise ValueError("the answers of a message's calls must follow it directly")

    conversation = Conversation(name, f"{run}/{name}", messages)
    # Computes both properties now, which raise for a call without name or arguments.
    assert len(conversation.changes) <= len(conversation.answers)
    return conversation
