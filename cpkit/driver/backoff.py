"""Exponential backoff with jitter, for every retry and every polling loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(frozen=True)
class Backoff:
    """Pauses between retries: an upper bound that doubles, and full jitter below it.

    The bound grows from ``first`` to ``longest`` seconds. Each pause is drawn at random
    between 0 and the bound, so that callers that failed together do not retry together
    (AWS Architecture Blog, "Exponential Backoff And Jitter"). ``chance`` returns the
    random numbers, from 0 to 1.
    """

    first: float = 0.02
    longest: float = 1.0
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.longest:
            raise ValueError(
                "Backoff needs 0 < first <= longest, not "
                f"first={self.first!r}, longest={self.longest!r}"
            )

    def pauses(self, longest: float | None = None) -> Iterator[float]:
        """Yield an endless series of pauses, in seconds.

        ``longest`` lowers the upper bound for this series.
        """
        limit = self.longest if longest is None else min(longest, self.longest)
        bound = min(self.first, limit)

        while True:
            yield bound * self.chance()
            bound = min(2 * bound, limit)
