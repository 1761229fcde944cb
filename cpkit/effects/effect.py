"""What an effect is, which callbacks there are, and what they answer."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cpkit.records import CallRecord, JsonValue

__all__ = [
    "Effect",
    "Handler",
    "Landed",
    "NoEffect",
    "NotLanded",
    "Notifier",
    "Policy",
    "SupersededHook",
    "Verdict",
    "Verify",
    "call_callback",
]


@dataclass(frozen=True, slots=True)
class Effect:
    """One side effect: what a handler, policy, notifier or ``verify`` is called with.

    ``key`` names the effect in the whole store. Pass it downstream as the idempotency
    key where the other side takes one. ``attempt`` counts 1, 2, … and is a fencing
    token: a later claim of the key always has a higher one. ``thread_id`` is the
    thread that has the record, which is ``cpkit:global`` for a global scope.

    A policy and a notifier are called before the claim: ``call_id`` is empty then, and
    ``attempt`` is 0. ``tool_call_id`` is the model's id of its request. It is kept for
    correlation only.
    """

    key: str
    thread_id: str
    tool: str
    args: Mapping[str, JsonValue]
    call_id: str = ""
    attempt: int = 0
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """The answer of ``verify``: the effect happened, and this is its result."""

    result: JsonValue = None


@dataclass(frozen=True, slots=True)
class NotLanded:
    """The answer of ``verify``: the effect did not happen, and will not any more."""


class NoEffect(Exception):
    """Raised by a handler: nothing happened, and the effect may be tried again."""


Verdict = Landed | NotLanded | None
"""What ``verify`` answers; ``None`` if it cannot know."""

Handler = Callable[[Effect], Awaitable[JsonValue] | JsonValue]
Policy = Callable[[Effect], Awaitable[bool] | bool]
Notifier = Callable[[Effect], Awaitable[object] | object]
Verify = Callable[[Effect], Awaitable[Verdict] | Verdict]
SupersededHook = Callable[[Effect, CallRecord], Awaitable[object] | object]


async def call_callback(callback: Callable[..., Any], *args: object) -> Any:
    """Call a callback that may be sync or async, and return its answer.

    A sync callback runs in the event loop's thread and must not block.
    """
    answer = callback(*args)
    return await answer if inspect.isawaitable(answer) else answer
