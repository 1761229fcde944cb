"""What a copy did, and what it could not do."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CopyReport", "Problem"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A thread that could not be exported, or copied as it is, and why."""

    thread_id: str
    reason: str

    def __str__(self) -> str:
        return f"thread {self.thread_id!r}: {self.reason}"


@dataclass(slots=True)
class CopyReport:
    """Counts of threads, and the threads that need another look.

    ``threads`` were read from the source. Of these, ``copied`` are new in the
    destination, ``updated`` replaced an earlier copy, and ``already`` were equal
    before. ``checked`` were compared at the end and are equal. ``messages`` and
    ``calls`` were added.

    ``changed`` names threads of which the destination has an earlier copy. Of those in
    ``conflicts`` it has something else, or a key is taken. Those in ``failures`` could
    not be read or written. ``moved`` names threads that changed in the source while
    the copy ran.
    """

    threads: int = 0
    copied: int = 0
    updated: int = 0
    already: int = 0
    checked: int = 0
    messages: int = 0
    calls: int = 0
    changed: list[str] = field(default_factory=list)
    conflicts: list[Problem] = field(default_factory=list)
    failures: list[Problem] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the destination has everything that the source has now."""
        return not (self.changed or self.conflicts or self.failures or self.moved)
