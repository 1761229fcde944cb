"""What the ledger raises; the tree in `cpkit.errors` says what a caller does then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cpkit.errors import CheckpointerError
from cpkit.records import CallRecord

__all__ = [
    "ApprovalExpired",
    "ApprovalWithdrawn",
    "EffectDenied",
    "EffectErased",
    "EffectFailed",
    "EffectTimeout",
    "KeyReused",
    "Superseded",
]


@dataclass(eq=False, repr=False)
class _OfEffect:
    key: str
    tool: str


@dataclass(eq=False, repr=False)
class EffectFailed(_OfEffect, CheckpointerError):
    """The effect ran and failed, and that is its final outcome."""

    error_type: str
    reason: str

    def __str__(self) -> str:
        return f"{self.tool!r} failed with {self.error_type}: {self.reason}"


@dataclass(eq=False, repr=False)
class EffectDenied(_OfEffect, CheckpointerError):
    """A person denied the effect: it runs only after `EffectLedger.ask_again`."""

    reason: str | None = None
    by: str | None = None
    ends_run: ClassVar[bool] = True
    """A run that ends with this error has ended: nothing of it is left to do."""

    def __str__(self) -> str:
        by = "" if self.by is None else f" by {self.by}"
        reason = "" if self.reason is None else f": {self.reason}"
        return f"{self.tool!r} was denied{by}{reason}"


class ApprovalExpired(EffectDenied):
    """The request expired, undecided or unused; see `EffectLedger.ask_again`."""

    def __str__(self) -> str:
        return f"the approval request of {self.tool!r} expired; ask_again() reopens it"


class ApprovalWithdrawn(EffectDenied):
    """The request was withdrawn without a decision; a new run of it asks again."""

    def __str__(self) -> str:
        return f"the approval request of {self.tool!r} was withdrawn"


@dataclass(eq=False, repr=False)
class EffectTimeout(_OfEffect, CheckpointerError):
    """The run waited for ``seconds`` in vain, and did nothing.

    ``holder`` is the attempt that holds the key; ``None`` in a wait for a decision.
    """

    seconds: float
    waiting_for: str
    holder: CallRecord | None = None

    @property
    def ends_run(self) -> bool:
        """Whether a decision wakes the run: not if the notifier failed, the cause."""
        return self.holder is None and self.__cause__ is None

    def __str__(self) -> str:
        return f"{self.tool!r}: waited {self.seconds:g} s for {self.waiting_for}"


@dataclass(eq=False, repr=False)
class EffectErased(_OfEffect, CheckpointerError):
    """The effect, or its approval, is recorded, but its content was erased."""

    status: str
    what: str = "effect"

    def __str__(self) -> str:
        return (
            f"{self.tool!r}: the content of the {self.what} ({self.status}) was "
            "erased, by a deletion or a policy; the effect is not run again"
        )


class KeyReused(_OfEffect, CheckpointerError):
    """An idempotency key given by the caller is recorded with other arguments."""

    def __str__(self) -> str:
        return f"{self.tool!r}: this idempotency_key has other arguments; use another"


@dataclass(eq=False, repr=False)
class Superseded(CheckpointerError):
    """Another process recorded an outcome for the attempt first.

    ``record`` is the call that holds the key, or the attempt as it is stored now.
    """

    key: str
    record: CallRecord

    def __str__(self) -> str:
        call = self.record.call
        return (
            f"{call.tool_name!r}: another process recorded an outcome for this attempt "
            f"first; attempt {self.record.attempt} of the key is {self.record.status}"
        )
