"""What a checkpointer takes and gives back, as frozen dataclasses.

JSON is typed for reading: ``Any``, as of ``json.loads``. ``JsonValue`` is what a method
takes as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from pydantic import JsonValue

__all__ = [
    "CallRecord",
    "CallStatus",
    "CheckpointData",
    "Durability",
    "JsonValue",
    "Survives",
    "ThreadDump",
    "ThreadInfo",
    "ToolCall",
]

MessageT = TypeVar("MessageT")

CallStatus = Literal["issued", "completed", "failed"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One attempt at a side effect.

    ``call_id`` names this attempt within its thread and is used once.
    ``idempotency_key`` names the effect, across all threads of the store: of all the
    calls with one key at most one is issued or completed at any time. ``args`` is a
    JSON object; ``tool_name`` obeys the rules of ids.
    """

    call_id: str
    tool_name: str
    args: Mapping[str, Any]
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call as the store has it.

    ``attempt`` counts 1, 2, … per idempotency key and is a fencing token: a later
    claim of the key always has a higher one. Times are timezone-aware UTC, by the
    store's clock where it has one. ``result`` is ``None`` until ``resolved_at`` is set.

    An ``erased`` record is what ``delete_thread`` leaves: ids, tool, status, attempt
    and times, with empty args and no result, so that a paid call stays paid.
    """

    thread_id: str
    call: ToolCall
    status: CallStatus
    attempt: int
    issued_at: datetime
    result: Any
    resolved_at: datetime | None
    erased: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointData(Generic[MessageT]):
    """One consistent snapshot of a thread, the caller's to keep and to change.

    ``pending`` holds the issued calls, in the order in which they were claimed.
    ``version`` is how many messages were appended, and what ``expected_version``
    compares. ``first`` is the position of ``messages[0]``; after ``load`` it is 0, or
    where the thread was trimmed: ``version == first + len(messages)``.
    """

    messages: list[MessageT]
    extra: dict[str, Any]
    pending: list[CallRecord]
    version: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class ThreadInfo:
    """A thread without its payloads.

    ``updated_at`` moves with every change but a trim, and never goes back. It may stand
    still while the store's clock is behind it, because the clock was set back.
    """

    thread_id: str
    version: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class ThreadDump:
    """A whole thread as it is stored, to be restored exactly in another store.

    ``messages`` are JSON values, whatever ``message_type`` the handle has. ``calls``
    has every attempt on record in the order of claims. ``created_at`` and
    ``updated_at`` are ``None`` where nothing but erased calls is left of the thread.
    ``first`` is the position of ``messages[0]``, as in `CheckpointData`.
    """

    thread_id: str
    messages: Sequence[Any]
    extra: Mapping[str, Any]
    calls: Sequence[CallRecord]
    created_at: datetime | None
    updated_at: datetime | None
    first: int = 0


class Survives(StrEnum):
    """What an acknowledged write outlives."""

    NONE = "none"
    """Nothing that ends the process which holds the data."""
    PROCESS = "process"
    """``kill -9`` of the agent, and of the server if there is one."""
    MACHINE = "machine"
    """A power loss as well."""


@dataclass(frozen=True, slots=True)
class Durability:
    """What an acknowledgement is worth.

    ``settings`` are the facts that the level rests on, for instance
    ``{"synchronous": "FULL"}``. ``advice`` has sentences for people: what can still be
    lost, and which setting changes that; empty where there is nothing to change.
    """

    survives: Survives
    settings: Mapping[str, str] = field(default_factory=dict)
    advice: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.survives, Survives):
            raise TypeError(f"survives is a Survives, not {self.survives!r}")

        if not isinstance(self.settings, Mapping):
            raise TypeError(
                'settings are a mapping, for instance {"fsync": "on"}, not '
                f"{self.settings!r}; sentences are advice"
            )

        if isinstance(self.advice, str):
            raise TypeError(f"advice is a list of sentences, not {self.advice!r}")

    @property
    def words(self) -> str:
        """The settings and the advice as one line."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return "; ".join([settings, *self.advice] if settings else self.advice)

    def __str__(self) -> str:
        return f"{self.survives}: {self.words}"
