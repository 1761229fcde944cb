"""The history of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["History"]


@dataclass
class History:
    """What happened in the run of a seed.

    ``done`` counts charges, or terms of a lease.
    """

    seed: int
    violations: list[str]
    lines: list[str]
    done: int

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}", *self.lines, *self.violations])
