"""What a check raises when its clause fails, or cannot be checked here."""

from __future__ import annotations

__all__ = ["Failure", "Skip"]


class Failure(AssertionError):
    """The store does not keep the clause.

    A plain ``assert`` is enough for most checks: `conformance.explain` makes a
    `Failure` of it. Raise this class if the compared expression does not say enough.
    ``where`` is what led to the failure: a script, a stack, a source line.
    """

    def __init__(self, expected: str, seen: str, where: str = "") -> None:
        super().__init__(expected, seen, where)
        self.expected = expected
        self.seen = seen
        self.where = where

    def __str__(self) -> str:
        where = f"\nwhere:\n{self.where}" if self.where else ""
        return f"expected {self.expected}, seen {self.seen}{where}"


class Skip(Exception):
    """A clause cannot be checked here; the message says why."""
