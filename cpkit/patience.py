"""Waiting for others, in processes that share no clock.

`Backoff` says how long to wait between two looks, `Silence` for how long somebody has
shown no sign of life, and `asked_again` repeats a question whose answer was lost. All
time is that of the running loop's own monotonic clock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from cpkit.errors import BackendUnavailable

__all__ = ["Backoff", "Silence", "asked_again"]

T = TypeVar("T")

_NOTHING_SEEN = object()


@dataclass(frozen=True)
class Backoff:
    """Pauses that double from ``first`` to ``longest`` seconds, with full jitter.

    Each pause is drawn between nothing and its ceiling, so that those who began to
    wait together do not come back together (AWS Architecture Blog, "Exponential
    Backoff And Jitter"). ``chance`` draws from 0 to 1.
    """

    first: float = 0.02
    longest: float = 1.0
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.longest:
            raise ValueError("a backoff needs 0 < first <= longest")

    def pauses(self, longest: float | None = None) -> Iterator[float]:
        """Yield pauses without end, none above ``longest`` where that is given."""
        limit = self.longest if longest is None else min(longest, self.longest)
        ceiling = min(self.first, limit)

        while True:
            yield ceiling * self.chance()
            ceiling = min(2 * ceiling, limit)


class Silence:
    """For how long somebody has shown no new sign of life.

    Only the observer's own clock counts, and of the time between two looks at most a
    quarter of ``stale_after``: an observer that was paused, or whose clock jumped,
    looks three more times before it calls anybody silent.
    """

    def __init__(self, stale_after: float) -> None:
        self.stale_after = stale_after
        self.stirred = False
        """Whether there was a new sign since the first look."""
        self._sign: object = _NOTHING_SEEN
        self._answered = 0.0
        self._silent = 0.0

    @property
    def longest_pause(self) -> float:
        """Seconds between two looks beyond which the rest would not count."""
        return self.stale_after / 4

    async def lasts(self, look: Callable[[], Awaitable[object]]) -> bool:
        """Look for the sign; say whether it has been the same for so long.

        What surely passed without a new sign is the time from the answer to one look
        until the next was asked for.
        """
        clock = asyncio.get_running_loop().time
        asked = clock()
        sign = await look()

        if sign != self._sign:
            self.stirred = self._sign is not _NOTHING_SEEN
            self._sign = sign
            self._silent = 0.0
        else:
            self._silent += min(asked - self._answered, self.longest_pause)

        self._answered = clock()
        return self._silent >= self.stale_after

    def forgive(self) -> None:
        """Count the silence from now on."""
        self._sign = _NOTHING_SEEN


async def asked_again(
    operation: Callable[[], Awaitable[T]],
    backoff: Backoff,
    patience: float,
    *,
    insist: bool = False,
) -> T:
    """Repeat an operation while the store leaves open whether it was applied.

    The operation must be safe to repeat, as the call methods are with the same ids.
    One that certainly did not run is repeated only with ``insist``, or after an earlier
    try that may have. After ``patience`` seconds ``BackendUnavailable`` is raised,
    with ``maybe_applied`` where any of the tries may have been applied.
    """
    deadline: float | None = None
    unclear: BackendUnavailable | None = None
    pauses: Iterator[float] | None = None

    while True:
        try:
            return await operation()
        except BackendUnavailable as exc:
            now = asyncio.get_running_loop().time()
            deadline = now + patience if deadline is None else deadline
            pauses = pauses or backoff.pauses()
            pause = next(pauses)

            if exc.maybe_applied:
                unclear = exc

            if unclear is None and not insist:
                raise

            if now + pause > deadline:
                error = unclear or exc
                raise error from error.__cause__

        await asyncio.sleep(pause)
