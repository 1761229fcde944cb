"""What an import read, wrote and left, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Report", "Status", "ThreadReport"]

Status = Literal["new", "grown", "there", "left"]


@dataclass(frozen=True)
class ThreadReport:
    """One conversation of the source.

    ``status``: the thread is ``new``; it had the beginning and has ``grown``; it had
    everything and is ``there``; or it is ``left`` for the ``reason``.
    """

    name: str
    thread_id: str | None
    status: Status
    read: int = 0
    written: int = 0
    reason: str | None = None


@dataclass
class Report:
    """The outcome, thread by thread.

    ``left`` names by reason what was not brought over, whole conversations and single
    things in others. Sizes are in messages: items, entries or checkpoints, by source.
    """

    source: str
    kind: str
    dry_run: bool
    threads: list[ThreadReport] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)

    def counts(self, *statuses: Status) -> int:
        """Return how many conversations had one of these outcomes."""
        return sum(thread.status in statuses for thread in self.threads)

    @property
    def read(self) -> int:
        """How many messages were read, of all conversations."""
        return sum(thread.read for thread in self.threads)

    @property
    def written(self) -> int:
        """How many messages were written, or would be."""
        return sum(thread.written for thread in self.threads)

    @property
    def ok(self) -> bool:
        """Whether the store now has every conversation of the source."""
        return self.counts("left") == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return {
            "source": self.source,
            "kind": self.kind,
            "dry_run": self.dry_run,
            "read": {"threads": len(self.threads), "messages": self.read},
            "written": {
                "threads": self.counts("new", "grown"),
                "messages": self.written,
            },
            "there": {"threads": self.counts("there")},
            "left": {
                "threads": self.counts("left"),
                "reasons": {reason: len(names) for reason, names in self.left.items()},
            },
            "threads": [
                {
                    "name": thread.name,
                    "thread_id": thread.thread_id,
                    "status": thread.status,
                    "read": thread.read,
                    "written": thread.written,
                    "reason": thread.reason,
                }
                for thread in self.threads
            ],
        }
