"""What a clause works with: an open store, fresh ids, and random numbers."""

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
    ErasesCalls,
    ErasesThreads,
    JsonValue,
    KeepsReceipts,
    ListsThreads,
    MovesThreads,
    ReadsRanges,
    ToolCall,
    TrimsThreads,
    WatchesThreads,
)

__all__ = ["Case", "Store", "raises"]


class Store(
    Checkpointer[Any],
    ListsThreads,
    ReadsRanges[Any],
    KeepsReceipts,
    ErasesThreads,
    TrimsThreads,
    ErasesCalls,
    MovesThreads,
    WatchesThreads,
    Protocol,
):
    """A store with every optional ability; a clause uses only what it needs."""


@dataclass
class Case:
    """One run of one clause.

    ``cp`` is open while the clause runs. A clause that starts its own event loops has
    no ``cp``. ``random`` depends only on the seed and the clause. Ids are always fresh,
    because the store keeps what earlier runs wrote. ``rounds`` scales the slow clauses:
    1 is the default size. ``uses_handles``: the clause relies on handles that share one
    store. Clauses that lose a leader count the writes that were ``acknowledged``, and
    those of them that were ``lost``.
    """

    harness: Harness
    random: Random
    seed: int = 0
    rounds: float = 1.0
    uses_handles: bool = False
    acknowledged: int = 0
    lost: int = 0
    _cp: Store | None = None

    @property
    def cp(self) -> Store:
        assert self._cp is not None, "this clause opens its own handles"
        return self._cp

    def open(self, **options: Any) -> AbstractAsyncContextManager[Store]:
        """Return a new, unopened handle of the store."""
        return self.harness.open(**options)  # type: ignore[return-value]  # see Store

    def has_handles(self) -> bool:
        """Tell whether all handles share one store; the clause may then use several."""
        self.uses_handles = not self.harness.lacks("handles")
        return self.uses_handles

    def id(self, word: str = "thread") -> str:
        """Return an id that was never used before."""
        return f"{word}-{uuid4().hex[:16]}"

    def call(
        self,
        key: str | None = None,
        *,
        call_id: str | None = None,
        tool: str = "pay",
        args: Mapping[str, JsonValue] | None = None,
    ) -> ToolCall:
        """Return a call, with fresh ids for those that are not given."""
        return ToolCall(
            call_id or self.id("call"),
            tool,
            {"amount": 10} if args is None else args,
            key or self.id("key"),
        )

    def times(self, normal: int) -> int:
        """Return how often to repeat: ``normal``, scaled by ``rounds``."""
        return max(1, round(normal * self.rounds))

    def skip(self, reason: str) -> None:
        """End the clause as skipped: it cannot be checked here."""
        raise Skip(reason)


class raises:
    """Expect an error of one of these classes, and keep it as ``error``."""

    def __init__(
        self, expected: type[Exception] | tuple[type[Exception], ...], because: str = ""
    ) -> None:
        self.expected = expected if isinstance(expected, tuple) else (expected,)
        self.because = because
        self.error: Any = None

    def __enter__(self) -> raises:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        about = f" for {self.because}" if self.because else ""

        expected = " or ".join(kind.__name__ for kind in self.expected) + about

        if error is None:
            raise Failure(expected, "no error")

        if isinstance(error, self.expected):
            self.error = error
            return True

        if isinstance(error, Exception):
            raise Failure(expected, f"{type(error).__name__}: {error}") from error

        return False
