"""What a clause works with: an open store, fresh ids, and its share of chance."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol
from uuid import uuid4

from conformance.failure import Failure, Skip
from conformance.harness import Harness
from cpkit import (
    Checkpointer,
    ErasesThreads,
    JsonValue,
    KeepsReceipts,
    ListsThreads,
    ReadsRanges,
    ToolCall,
)

__all__ = ["Case", "Store", "raises"]


class Store(
    Checkpointer[Any],
    ListsThreads,
    ReadsRanges[Any],
    KeepsReceipts,
    ErasesThreads,
    Protocol,
):
    """A store with every optional ability; a clause uses those that it needs."""


@dataclass
class Case:
    """One run of one clause.

    ``cp`` is open for the time of the clause (not in clauses that run their own event
    loops). ``random`` depends on the seed and the clause alone; ids are fresh always,
    because the store remembers earlier runs. ``rounds`` scales the slow sweeps: 1 is
    the default size.
    """

    harness: Harness
    random: Random
    seed: int = 0
    rounds: float = 1.0
    _cp: Store | None = None

    @property
    def cp(self) -> Store:
        assert self._cp is not None, "this clause opens its own handles"
        return self._cp

    def open(self, **options: Any) -> AbstractAsyncContextManager[Store]:
        """Return one more unopened handle of the store."""
        return self.harness.open(**options)  # type: ignore[return-value]  # see Store

    def id(self, word: str = "thread") -> str:
        """Return an id that no store has seen."""
        return f"{word}-{uuid4().hex[:16]}"

    def call(
        self,
        key: str | None = None,
        *,
        call_id: str | None = None,
        tool: str = "pay",
        args: Mapping[str, JsonValue] | None = None,
    ) -> ToolCall:
        """Return a call with fresh ids where none are given."""
        return ToolCall(
            call_id or self.id("call"),
            tool,
            {"amount": 10} if args is None else args,
            key or self.id("key"),
        )

    def times(self, normal: int) -> int:
        """Return how often to repeat, ``normal`` being the default."""
        return max(1, round(normal * self.rounds))

    def skip(self, reason: str) -> None:
        """Give up the clause: it cannot be asked here."""
        raise Skip(reason)


class raises:
    """Expect an error of exactly this class or a subclass, and keep it as ``error``."""

    def __init__(self, expected: type[Exception], because: str = "") -> None:
        self.expected = expected
        self.because = because
        self.error: Any = None

    def __enter__(self) -> raises:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        about = f" for {self.because}" if self.because else ""

        expected = f"{self.expected.__name__}{about}"

        if error is None:
            raise Failure(expected, "no error")

        if isinstance(error, self.expected):
            self.error = error
            return True

        if isinstance(error, Exception):
            raise Failure(expected, f"{type(error).__name__}: {error}") from error

        return False
