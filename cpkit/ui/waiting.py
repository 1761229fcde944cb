"""What waits for a person: approval requests, calls without an outcome, leases."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cpkit.canonical import canonical_json
from cpkit.effects import ApprovalRequest
from cpkit.effects.attempts import read_doubt
from cpkit.effects.records import APPROVAL
from cpkit.effects.requests import request_of
from cpkit.errors import CorruptThread
from cpkit.protocol import KeepsReceipts, ListsThreads
from cpkit.records import CallRecord, ThreadInfo
from cpkit.tools.paging import gather_limited
from cpkit.ui.site import Page, Site, call_data, needs, number, wanted

__all__ = ["counts_of", "decide", "decision", "in_doubt", "waiting"]

_LEASE = "cpkit:lease"
_ORIGIN = "cpkit ui"

_REQUESTS_PER_PAGE = 50
_LEASES = 200

# Threads that one page looks at, so that a large store answers soon.
_THREADS_PER_PAGE = 1_000


async def counts_of(site: Site, thread_id: str) -> dict[str, int] | None:
    """Return how many requests and other calls of a thread are undecided.

    ``None`` if calls of the thread are damaged.
    """
    damaged: list[str] = []
    open_calls = await _open_calls(site, thread_id, damaged)

    if damaged:
        return None

    approvals = sum(record.call.tool_name == APPROVAL for record in open_calls)
    return {"approvals": approvals, "calls": len(open_calls) - approvals}


async def waiting(site: Site, request: Request) -> Page:
    """Show undecided requests of all threads, oldest first, and who runs threads."""
    limit = number(request, "limit", _REQUESTS_PER_PAGE, 1, 500)
    found = await site.ledger.requests(
        after=request.query_params.get("after", ""), limit=limit
    )
    damaged: list[str] = []
    return Page(
        "waiting.html",
        {
            "requests": [_request_data(one) for one in found],
            "next": found[-1].cursor if len(found) == limit else None,
            "leases": await _leases(site, damaged),
            "damaged": damaged,
        },
    )


async def in_doubt(site: Site, request: Request) -> Page:
    """Show calls without an outcome, oldest first, of a thousand threads.

    ``verify`` is the last unclear answer of the tool's ``verify``, and when it was
    given. ``next`` continues behind these threads. ``damaged`` says which threads have
    calls that cannot be read.
    """
    needs(site, ListsThreads, "list its threads")
    needs(site, KeepsReceipts, "list its calls")
    limit = number(request, "limit", _THREADS_PER_PAGE, 1, 10_000)
    page: list[ThreadInfo] = await site.cp.list_threads(
        after=request.query_params.get("after") or None, limit=limit
    )

    damaged: list[str] = []

    async def one(info: ThreadInfo) -> list[CallRecord]:
        return await _open_calls(site, info.thread_id, damaged)

    async def with_doubt(record: CallRecord) -> dict[str, Any]:
        try:
            doubt = await read_doubt(site.cp, record)
        except CorruptThread as exc:
            damaged.append(str(exc))
            doubt = None

        return {**call_data(record), "verify": doubt and doubt._asdict()}

    found = [record for calls in await gather_limited(one, page) for record in calls]
    found = [r for r in found if not r.call.tool_name.startswith("cpkit:")]
    found.sort(key=lambda record: record.issued_at)
    return Page(
        "in_doubt.html",
        {
            "calls": await gather_limited(with_doubt, found),
            "damaged": sorted(damaged),
            "looked_at": len(page),
            "next": page[-1].thread_id if len(page) == limit else None,
        },
    )


async def decision(site: Site, request: Request) -> Page:
    """Show one request with its exact arguments, and how it was decided.

    ``choose`` is the decision that the person came for, so that its button comes first.
    """
    found = await _request(
        site, wanted(request, "id"), wanted(request, "request"), "there is nothing here"
    )
    data = await _decided(site, found)
    return Page("decide.html", data | {"choice": request.query_params.get("choose")})


async def decide(site: Site, request: Request) -> Page:
    """Record a decision about the request that the form showed.

    The form names the request and has a digest of what was shown. If another person
    decided first, their decision stays, and the page shows it.
    """
    form: dict[str, str] = request.state.form
    thread_id, own_key = form.get("id", ""), form.get("request", "")
    verdict = {"approve": "approved", "deny": "denied"}.get(form.get("decision", ""))

    if verdict is None or not thread_id or not own_key:
        raise HTTPException(400, "the form is not complete; nothing was decided")

    found = await _request(site, thread_id, own_key, "nothing was decided")

    if found.record.erased or form.get("shown") != _digest(found):
        raise HTTPException(
            409, "the request is not the one that was shown; nothing was decided"
        )

    person: str = request.state.person
    was_open = found.decision is None

    if was_open:
        record = site.ledger.approve if verdict == "approved" else site.ledger.deny
        # The arguments that were shown, whatever was requested meanwhile.
        await record(
            thread_id,
            found.key,
            by=person,
            reason=form.get("reason", "").strip() or None,
            origin=_ORIGIN,
            args=found.args,
        )

    found = await _request(site, thread_id, own_key, "nothing was decided")
    data = await _decided(site, found)
    is_mine = (
        was_open
        and (data["decision"], data["by"]) == (verdict, person)
        and data["origin"] == _ORIGIN
    )
    return Page(
        "decide.html",
        data | {"choice": None, "tried": verdict, "is_mine": is_mine},
        200 if is_mine else 409,
    )


async def _leases(site: Site, damaged: list[str]) -> list[dict[str, Any]]:
    """Return which process runs which thread, of the first leases by id."""
    if not isinstance(site.cp, ListsThreads) or not isinstance(site.cp, KeepsReceipts):
        return []

    async def one(info: ThreadInfo) -> list[CallRecord]:
        return await _open_calls(site, info.thread_id, damaged)

    try:
        page = await site.cp.list_threads(prefix=_LEASE, limit=_LEASES)
    except CorruptThread as exc:  # a person can decide all the same
        damaged.append(str(exc))
        return []

    return [
        {
            "thread_id": record.call.args.get("thread_id"),
            "holder": record.call.args.get("holder"),
            "term": record.attempt,
            "since": record.issued_at.isoformat(),
        }
        for calls in await gather_limited(one, page)
        for record in calls
        if record.call.tool_name == _LEASE
    ]


async def _open_calls(
    site: Site, thread_id: str, damaged: list[str]
) -> list[CallRecord]:
    """Return the readable calls without an outcome; add to ``damaged`` what is not."""
    records: Sequence[CallRecord]

    try:
        records = await site.cp.list_calls(thread_id)
    except CorruptThread as exc:
        damaged.append(str(exc))
        records = exc.calls

    return [one for one in records if one.status == "issued" and not one.erased]


async def _request(
    site: Site, thread_id: str, own_key: str, consequence: str
) -> ApprovalRequest:
    """Return a request by its own key, decided or not."""
    needs(site, KeepsReceipts, "list its calls")
    records: Sequence[CallRecord] = await site.cp.list_calls(thread_id)

    for record in reversed(records):
        if record.call.idempotency_key == own_key:
            found = request_of(record)

            if found is not None:
                return found

    raise HTTPException(
        404, f"thread {thread_id[:80]!r} has no such request: {consequence}"
    )


def _digest(request: ApprovalRequest) -> str:
    """Return what a decision is bound to: the record, the tool and the arguments."""
    call = request.record.call
    shown: list[Any] = [
        call.call_id,
        request.tool,
        dict(request.args),
        request.requested_at.isoformat(),
    ]
    return sha256(canonical_json(shown).encode()).hexdigest()


def _request_data(request: ApprovalRequest) -> dict[str, Any]:
    expires = request.expires_at
    return {
        "thread_id": request.thread_id,
        "run_thread": request.run_thread or request.thread_id,
        "request": request.record.call.idempotency_key,
        "key": request.key,
        "number": request.number,
        "tool": request.tool,
        "args": dict(request.args),
        "requested_at": request.requested_at.isoformat(),
        "expires_at": None if expires is None else expires.isoformat(),
        "shown": _digest(request),
    }


async def _decided(site: Site, request: ApprovalRequest) -> dict[str, Any]:
    """Return a request, its decision, and the effect's latest attempt."""
    made = request.decision
    effect: CallRecord | None = await site.cp.find_call(request.key)
    return {
        **_request_data(request),
        "erased": request.record.erased,
        "decision": "undecided" if made is None else made.verdict,
        "by": made and made.by,
        "reason": made and made.reason,
        "origin": made and made.origin,
        "decided_at": made and made.at and made.at.isoformat(),
        "effect": None if effect is None else call_data(effect),
    }
