"""Exponential backoff with jitter, for every retry and every polling loop."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["backoff_pauses"]


def backoff_pauses(first: float = 0.02, longest: float = 1.0) -> Iterator[float]:
    """Yield an endless series of pauses between retries, in seconds.

    Their upper bound doubles from ``first`` to ``longest``. Each pause is drawn at
    random between 0 and the bound, so that callers that failed together do not retry
    together (AWS Architecture Blog, "Exponential Backoff And Jitter").
    """
    bound = min(first, longest)

    while True:
        yield bound * random.random()
        bound = min(2 * bound, longest)
