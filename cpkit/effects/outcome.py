"""What a run sets out to do, and how it ends.

Nobody changes these; they are not frozen because each run, a replay too, makes two, and
freezing costs a microsecond each.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpkit.effects import envelope
from cpkit.effects.effect import Effect, Verify
from cpkit.effects.keys import KeyKind
from cpkit.records import CallRecord, JsonValue

__all__ = ["Outcome", "Plan", "Settled"]


@dataclass(slots=True)
class Plan:
    """What is to be done once, and how long to wait for what.

    Times are in seconds, ``None`` without end; ``stale_after`` ``None`` is never.
    """

    effect: Effect
    kind: KeyKind
    verify: Verify | None
    timeout: float | None
    approval_timeout: float | None
    stale_after: float | None
    heartbeat: float
    release_failures: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a handler came to: an envelope, and the exception where it raised one."""

    result: dict[str, JsonValue]
    success: bool = True
    raised: Exception | None = None


@dataclass(slots=True)
class Settled:
    """How a run ended: the record that stands, and what is this caller's alone.

    ``raised`` is the exception of the caller's own handler; ``in_hand`` is the result
    of a caller whose record was erased or forgotten while its handler ran.
    """

    record: CallRecord | None
    replayed: bool
    raised: Exception | None = None
    in_hand: Outcome | None = None

    def value(self) -> JsonValue:
        """Return the effect's result, or raise its failure."""
        if self.raised is not None:
            raise self.raised

        if self.in_hand is not None:
            return self.in_hand.result["value"]

        assert self.record is not None
        return envelope.replayed(self.record)

    def failure(self) -> str | None:
        """Return the type of the error that it ended with, if it failed."""
        if self.raised is not None:
            return envelope.type_name(self.raised)

        return None if self.record is None else envelope.failure(self.record)
