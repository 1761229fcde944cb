"""What all views share: the store, the ledger, and how a view answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cpkit.effects import EffectLedger
from cpkit.effects.records import APPROVAL, effect_of
from cpkit.effects.records import state_of as state_of_effect
from cpkit.effects.requests import request_of
from cpkit.protocol import Checkpointer, KeepsReceipts
from cpkit.records import CallRecord
from cpkit.ui.newest import Order

__all__ = [
    "Page",
    "Site",
    "View",
    "call_data",
    "counts_of",
    "needs",
    "number",
    "state_of",
    "wanted",
]


@dataclass(frozen=True)
class Site:
    """One page server over one store."""

    cp: Any  # a Checkpointer[Any] with the optional protocols that `needs` checks
    ledger: Any  # an EffectLedger; None for a store that `needs` refuses then
    title: str
    url: str | None
    read_only: bool
    stopping: asyncio.Event
    """Set when the server stops: streams of events end then."""
    order: Order

    @classmethod
    def over(
        cls,
        cp: Checkpointer[Any],
        title: str,
        url: str | None,
        read_only: bool,
        stopping: asyncio.Event,
    ) -> Site:
        """Return the site of a store."""
        ledger: Any = EffectLedger(cp) if isinstance(cp, KeepsReceipts) else None
        return cls(cp, ledger, title, url, read_only, stopping, Order(cp))


@dataclass(frozen=True)
class Page:
    """A view's answer: the template, and the data that the JSON form has as well."""

    template: str
    data: Mapping[str, Any]
    status: int = 200


View = Callable[[Site, Request], Awaitable[Page]]


def needs(site: Site, ability: type, what: str) -> None:
    """Answer 501 if the store lacks an optional protocol."""
    if not isinstance(site.cp, ability):
        raise HTTPException(501, f"this store cannot {what}")


def wanted(request: Request, name: str) -> str:
    """Return a parameter that the page needs."""
    value = request.query_params.get(name)

    if not value:
        raise HTTPException(400, f"the parameter {name!r} is missing")

    return value


def number(request: Request, name: str, default: int, low: int, high: int) -> int:
    """Return a parameter as an int within its bounds."""
    text = request.query_params.get(name)

    if text is None:
        return default

    try:
        return min(max(int(text[:20]), low), high)
    except ValueError:
        raise HTTPException(400, f"{name}={text[:40]!r} is not a number") from None


def state_of(record: CallRecord) -> str:
    """Return how a call stands, in a word: that of the effects' `state_of`.

    Of a request: "waits", or its decision.
    """
    request = None if record.erased else request_of(record)

    if request is not None:
        return "waits" if request.decision is None else request.decision.verdict

    return state_of_effect(record)


def counts_of(records: Sequence[CallRecord]) -> dict[str, int]:
    """Return how many requests and other calls of these are undecided."""
    open_calls = [one for one in records if one.status == "issued" and not one.erased]
    approvals = sum(one.call.tool_name == APPROVAL for one in open_calls)
    return {"approvals": approvals, "calls": len(open_calls) - approvals}


def call_data(record: CallRecord) -> dict[str, Any]:
    """Return a call as JSON; ``state`` is that of `state_of`."""
    call = record.call
    resolved = record.resolved_at
    return {
        "thread_id": record.thread_id,
        "call_id": call.call_id,
        "tool": call.tool_name,
        "args": dict(call.args),
        "key": call.idempotency_key,
        "status": record.status,
        "state": state_of(record),
        "is_effect": effect_of(record) is not None and not record.erased,
        "attempt": record.attempt,
        "issued_at": record.issued_at.isoformat(),
        "resolved_at": None if resolved is None else resolved.isoformat(),
        "seconds": None
        if resolved is None
        else (resolved - record.issued_at).total_seconds(),
        "result": record.result,
        "erased": record.erased,
    }
