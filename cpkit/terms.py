"""The terms of a thread's lease as they are stored; used by `cpkit.lease`.

A lease has a thread of its own. A term is a call in it whose key is the lease's key:
the claim starts the term, and a failed result ends it. The holder's heartbeat is in the
thread's extra, and so is the mark of a run that died: it stays until a later run of the
thread has ended well, so that a worker knows which threads need a run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from uuid import uuid4

from cpkit.driver.backoff import Backoff
from cpkit.driver.ids import MAX_ID_BYTES
from cpkit.errors import UnknownCall
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, CheckpointData, JsonValue, ToolCall
from cpkit.waiting import retry_unclear

__all__ = [
    "LEASES",
    "LeaseState",
    "LeaseWait",
    "Terms",
    "WaitHook",
    "holder_of",
    "stale_after_of",
    "state_of",
]

log = logging.getLogger("cpkit.lease")  # as the module that people use

LEASES = "cpkit:lease"
"""Prefix of lease thread ids; also the tool name of a term."""


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What the lease's thread shows: the current term, its heartbeat, a dead run.

    ``died`` is the thread whose run died; ``None`` if no run died since the last run
    that ended well.
    """

    term: CallRecord | None
    heartbeat: JsonValue
    died: str | None

    @property
    def thread_id(self) -> str | None:
        """The thread that the lease is for, if a term or a mark names it."""
        named = None if self.term is None else self.term.call.args.get("thread_id")
        return named if isinstance(named, str) else self.died

    def same_term_and_heartbeat(self, other: LeaseState) -> bool:
        """Tell whether the lease was neither renewed nor ended between the two."""
        return (self.term, self.heartbeat) == (other.term, other.heartbeat)


@dataclass(frozen=True, slots=True)
class LeaseWait:
    """What a runner waits for: another runner's term, and when it is taken over.

    ``token`` is the number of that term. It is taken over after ``stale_after`` seconds
    without a heartbeat of its holder.
    """

    thread_id: str
    holder: str
    token: int
    stale_after: float

    def __str__(self) -> str:
        return (
            f"waiting for the lease of thread {self.thread_id!r}: {self.holder} has "
            f"it (term {self.token}); if it is dead, this runner takes over after "
            f"{self.stale_after:g} s without a heartbeat"
        )


WaitHook = Callable[[LeaseWait], object]
"""Called when a runner begins to wait; it must not block."""


class Terms:
    """Starts, looks at and ends the terms of one thread's lease."""

    def __init__(
        self, cp: Checkpointer[Any], thread_id: str, backoff: Backoff, patience: float
    ) -> None:
        self.thread_id = thread_id
        self.lease_thread = _lease_thread_id(thread_id)
        self._cp = cp
        self._backoff = backoff
        self._patience = patience

    def new_call(self, holder: str, stale_after: float) -> ToolCall:
        """Return the call of a new term."""
        return ToolCall(
            f"lease:{uuid4().hex}",
            LEASES,
            {
                "thread_id": self.thread_id,
                "holder": holder,
                "stale_after": stale_after,
            },
            sha256(f"cpkit:lease:{self.thread_id}".encode()).hexdigest(),
        )

    async def claim(self, call: ToolCall) -> CallRecord:
        """Try to start a term; return the record of the current term.

        If the claim was applied, the record is this call's, perhaps already ended by
        another runner.
        """
        while True:
            # ``None`` says that the call was recorded now. Issued again, it returns its
            # record, which has the token.
            if (record := await self._issue(call)) is not None:
                return record

    async def _issue(self, call: ToolCall) -> CallRecord | None:
        return await retry_unclear(
            lambda: self._cp.record_issued(self.lease_thread, call),
            self._backoff,
            self._patience,
        )

    async def look(self) -> LeaseState:
        """Read the current state, without a claim."""
        return state_of(await self._cp.load(self.lease_thread))

    async def renew(self, call: ToolCall, count: int) -> None:
        """Write a heartbeat.

        All terms share one extra key, so that extra does not grow. A lost term may
        still write it, at most once. The successor's next renewal overwrites that.
        """
        await self._cp.save_extra(self.lease_thread, {"renewed": [call.call_id, count]})

    async def take_over(self, call_id: str) -> None:
        """End the term of a runner that died; leave the mark that its run died.

        The mark comes first: if this process dies too, another one sees the mark.
        """
        await self.mark_died()
        await self.end(call_id, "taken over: its holder fell silent")
        log.warning("took over the lease of %r", self.thread_id)

    async def mark_died(self) -> None:
        """Mark that a run of the thread did not end well."""
        await self._cp.save_extra(self.lease_thread, {"died": self.thread_id})

    async def clear_died(self) -> None:
        """Remove the mark: a run of the thread ended well."""
        await self._cp.save_extra(self.lease_thread, {"died": None})

    async def end(self, call_id: str, reason: str) -> None:
        """End a term; a term that another runner ended stays as it is."""
        try:
            await retry_unclear(
                lambda: self._cp.record_result(
                    self.lease_thread, call_id, {"released": reason}, success=False
                ),
                self._backoff,
                self._patience,
            )
        except UnknownCall:
            log.debug("no term %r of %r is on record", call_id, self.thread_id)


def state_of(data: CheckpointData[Any] | None) -> LeaseState:
    """Return the state that a lease's thread shows."""
    if data is None:
        return LeaseState(None, None, None)

    terms = [one for one in data.pending if one.call.tool_name == LEASES]
    died = data.extra.get("died")
    return LeaseState(
        terms[-1] if terms else None,
        data.extra.get("renewed"),
        died if isinstance(died, str) else None,
    )


def holder_of(record: CallRecord) -> str:
    """Return the name of a term's holder."""
    return str(record.call.args.get("holder", "another"))


def stale_after_of(record: CallRecord, default: float) -> float:
    """Return the ``stale_after`` that the term's holder recorded."""
    recorded = record.call.args.get("stale_after")

    # Another program can have written anything. With 0, every lease would be stale.
    if isinstance(recorded, (int, float)) and 0 < recorded <= sys.float_info.max:
        return float(recorded)

    return default


def _lease_thread_id(thread_id: str) -> str:
    """Return the id of the lease's own thread, different for every thread."""
    name = f"{LEASES}:{thread_id}"

    if len(name.encode()) <= MAX_ID_BYTES:
        return name

    return f"{LEASES}-of:{sha256(thread_id.encode()).hexdigest()}"
