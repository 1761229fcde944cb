"""An effect as callbacks see it, and what they answer."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cpkit.records import JsonValue

__all__ = [
    "Effect",
    "Handler",
    "Landed",
    "NoEffect",
    "NotLanded",
    "Notifier",
    "Policy",
    "Verdict",
    "Verify",
    "called",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effect:
    """One side effect: what a handler, policy, notifier or ``verify`` is called with.

    ``key`` names the effect in the whole store; pass it downstream as the idempotency
    key where the other side takes one. ``attempt`` counts 1, 2, … and is a fencing
    token: a later claim of the key always has a higher one. ``thread_id`` is the
    thread that has the record, which is ``cpkit:global`` for a global scope.

    Before the claim (for policy and notifier) ``call_id`` is empty and ``attempt`` 0.
    ``tool_call_id`` is the model's own id of its request, for correlation only.
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
    """The answer of ``verify``: the effect happened, and this came of it."""

    result: JsonValue = None


@dataclass(frozen=True, slots=True)
class NotLanded:
    """The answer of ``verify``: the effect did not happen, and will not any more."""


class NoEffect(Exception):
    """Raised by a handler to say that nothing happened and it may be tried again."""


Verdict = Landed | NotLanded | None
"""What ``verify`` answers; ``None`` where it cannot tell."""

Handler = Callable[[Effect], Awaitable[JsonValue] | JsonValue]
Policy = Callable[[Effect], Awaitable[bool] | bool]
Notifier = Callable[[Effect], Awaitable[object] | object]
Verify = Callable[[Effect], Awaitable[Verdict] | Verdict]


async def called(callback: Callable[..., Any], *args: object) -> Any:
    """Call a callback that may be sync or async.

    A sync one runs in the event loop's thread and must not block.
    """
    answer = callback(*args)
    return await answer if inspect.isawaitable(answer) else answer
