"""What a copy did, and what it could not do."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CopyReport", "Problem"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A thread that is not in the destination as it is in the source, and why."""

    thread_id: str
    reason: str

    def __str__(self) -> str:
        return f"thread {self.thread_id!r}: {self.reason}"


@dataclass(slots=True)
class CopyReport:
    """Counts of what was written, what was there already, and what was left.

    ``checked`` threads were compared with the destination to the last hash and are the
    same. ``conflicts`` were found to hold something else there and are left alone;
    ``failures`` could not be written or read. ``moved`` names threads that changed in
    the source while the copy ran, ``notes`` what a store cannot be told.
    """

    threads: int = 0
    checked: int = 0
    already: int = 0
    copied: int = 0
    messages: int = 0
    extra: int = 0
    calls: int = 0
    erased_calls: int = 0
    conflicts: list[Problem] = field(default_factory=list)
    failures: list[Problem] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all that the source has now is in the destination, verified."""
        return not (self.conflicts or self.failures or self.moved)
