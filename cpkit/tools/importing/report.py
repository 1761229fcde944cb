"""What an import read and wrote, and what it left for which reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Report", "Status", "ThreadReport"]

Status = Literal["new", "grown", "there", "left"]


@dataclass(frozen=True)
class ThreadReport:
    """One conversation of the source.

    ``status``: the thread is ``new``; it had the first messages and has ``grown``; it
    had all of them and is ``there``; or it is ``left`` for the ``reason``.
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

    ``left`` has the names of what was not imported, by reason: whole conversations and
    single parts of others. Sizes count messages, items, entries or checkpoints, as the
    source has them.
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
        """The number of messages that were read."""
        return sum(thread.read for thread in self.threads)

    @property
    def written(self) -> int:
        """The number of messages that were written, or would be."""
        return sum(thread.written for thread in self.threads)

    @property
    def ok(self) -> bool:
        """Whether the store now has every conversation of the source."""
        return self.counts("left") == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
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
