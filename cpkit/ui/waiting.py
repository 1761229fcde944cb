"""What waits for a person: approval requests, calls without an outcome, leases."""

from __future__ import annotations

import asyncio
import json as jsonlib
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cpkit.canonical import canonical_json
from cpkit.effects import ApprovalRequest
from cpkit.effects.records import effect_of, failure_of
from cpkit.effects.requests import request_of
from cpkit.errors import CheckpointerError, CorruptThread
from cpkit.protocol import KeepsReceipts, ListsThreads, ReadsRanges
from cpkit.records import CallRecord, ThreadInfo
from cpkit.runs.threads import RUNS, TERM
from cpkit.tools.paging import gather_limited
from cpkit.ui.site import Page, Site, call_data, needs, number, wanted

__all__ = [
    "ask_again",
    "decide",
    "decision",
    "doubt",
    "in_doubt",
    "requests_of",
    "say",
    "total",
    "undecided",
    "waiting",
]

_ORIGIN = "cpkit ui"

_VERDICTS = {"approve": "approved", "deny": "denied", "withdraw": "withdrawn"}
_METHODS = {"approved": "approve", "denied": "deny", "withdrawn": "withdraw"}

_REQUESTS_PER_PAGE = 50
_WHY = 12  # messages beside a request: enough to see why the agent asks
_LEASES = 200

# Threads that one page looks at, so that a large store answers soon.
_THREADS_PER_PAGE = 1_000


async def undecided(site: Site, request: Request) -> list[ApprovalRequest]:
    """Return the undecided requests of all threads; read once for an answer."""
    if site.ledger is None or not isinstance(site.cp, ListsThreads):
        return []

    if not hasattr(request.state, "undecided"):
        request.state.undecided = asyncio.ensure_future(site.ledger.requests())

    found: list[ApprovalRequest] = await request.state.undecided
    return found


async def total(site: Site, request: Request) -> int | None:
    """Return how many requests wait, for the menu; ``None`` if it cannot be read."""
    try:
        return len(await undecided(site, request))
    except CheckpointerError:
        return None


async def requests_of(
    site: Site, request: Request, thread_id: str
) -> list[dict[str, Any]]:
    """Return the undecided requests that a thread has, or that its run waits for."""
    try:
        found = await undecided(site, request)
    except CorruptThread:  # of another thread: this one can be shown all the same
        return []

    return [
        _request_data(one)
        for one in found
        if thread_id in (one.thread_id, one.run_thread)
    ]


async def waiting(site: Site, request: Request) -> Page:
    """Show undecided requests of all threads, oldest first, and who runs threads."""
    limit = number(request, "limit", _REQUESTS_PER_PAGE, 1, 500)
    needs(site, ListsThreads, "list its threads")
    needs(site, KeepsReceipts, "list its calls")
    after = request.query_params.get("after", "")
    listed = await undecided(site, request)
    found = [one for one in listed if _place(one) > after][:limit]
    damaged: list[str] = []
    return Page(
        "waiting.html",
        {
            "requests": [_request_data(one) for one in found],
            "next": _place(found[-1]) if len(found) == limit else None,
            "leases": await _leases(site, damaged),
            "damaged": damaged,
        },
    )


def _place(request: ApprovalRequest) -> str:
    """Return the place of a request in the list, after which the next page begins."""
    return f"{request.requested_at.isoformat()} {request.record.call.call_id}"


async def in_doubt(site: Site, request: Request) -> Page:
    """Show calls without an outcome, oldest first, of a thousand threads.

    ``next`` continues behind these threads. ``damaged`` says which threads have calls
    that cannot be read.
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

    found = [record for calls in await gather_limited(one, page) for record in calls]
    found = [r for r in found if not r.call.tool_name.startswith("cpkit:")]
    found.sort(key=lambda record: record.issued_at)
    return Page(
        "in_doubt.html",
        {
            "calls": [call_data(record) for record in found],
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
    verdict = _VERDICTS.get(form.get("decision", ""))

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
        # The arguments that were shown, whatever was requested meanwhile.
        options: dict[str, Any] = {
            "by": person,
            "reason": form.get("reason", "").strip() or None,
            "origin": _ORIGIN,
            "args": found.args,
        }

        if verdict == "approved":
            options["value"] = _json_of(form.get("value", ""), "the value")

        record = getattr(site.ledger, _METHODS[verdict])

        try:
            await record(found.key, **options)
        except ValueError as exc:
            raise HTTPException(400, f"{exc}; nothing was decided") from exc

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


async def ask_again(site: Site, request: Request) -> Page:
    """Record a new request in place of one that was denied, withdrawn or expired."""
    form: dict[str, str] = request.state.form
    found = await _request(
        site, form.get("id", ""), form.get("request", ""), "nothing was asked"
    )

    if found.record.erased or form.get("shown") != _digest(found):
        raise HTTPException(
            409, "the request is not the one that was shown; nothing was asked"
        )

    try:
        asked = await site.ledger.ask_again(found.key, args=found.args)
    except ValueError as exc:
        raise HTTPException(409, f"{exc}; nothing was asked") from exc

    return Page("decide.html", await _decided(site, asked) | {"choice": None})


async def doubt(site: Site, request: Request) -> Page:
    """Show a call without an outcome, or a final failure, and ask a person about it."""
    record = await _call(site, wanted(request, "id"), wanted(request, "call"))
    return await _doubt(site, record)


async def say(site: Site, request: Request) -> Page:
    """Record what a person says: that a call in doubt happened or not, or a reopening.

    A call in doubt is watched first; this refuses if its run shows a sign of life.
    """
    form: dict[str, str] = request.state.form
    record = await _call(site, form.get("id", ""), form.get("call", ""))
    key, verb = record.call.idempotency_key, form.get("said", "")
    said: dict[str, Any] = {
        "by": request.state.person,
        "reason": form.get("reason", "").strip() or None,
        "origin": _ORIGIN,
    }

    if verb == "landed":
        said["result"] = _json_of(form.get("result", ""), "the result")
    elif verb not in ("not_landed", "reopen"):
        raise HTTPException(400, "the form is not complete; nothing was recorded")

    if verb == "reopen" and not await _may_reopen(site, record):
        raise HTTPException(409, "it is not the effect's last failure any more")

    try:
        await getattr(site.ledger, verb)(key, **said)
    except ValueError as exc:
        raise HTTPException(409, f"{exc}; nothing was recorded") from exc

    record = await _call(site, form["id"], form["call"])
    return await _doubt(site, record, reopened=verb == "reopen")


async def _doubt(site: Site, record: CallRecord, *, reopened: bool = False) -> Page:
    may_reopen = not reopened and await _may_reopen(site, record)
    more = {"may_reopen": may_reopen, "reopened": reopened}
    return Page("doubt.html", call_data(record) | more)


async def _may_reopen(site: Site, record: CallRecord) -> bool:
    """Return whether this is the effect's last failure, and was not reopened."""
    if failure_of(record) is None:
        return False

    newest: CallRecord | None = await site.ledger.find(record.call.idempotency_key)
    return newest is not None and newest.call.call_id == record.call.call_id


async def _call(site: Site, thread_id: str, call_id: str) -> CallRecord:
    needs(site, KeepsReceipts, "list its calls")
    records: list[CallRecord] = await site.cp.list_calls(thread_id or "?")

    for record in records:
        if record.call.call_id == call_id and effect_of(record) is not None:
            return record

    raise HTTPException(404, f"thread {thread_id[:80]!r} has no such effect")


def _json_of(text: str, what: str) -> Any:
    """Return the JSON of a field; ``None`` for an empty one."""
    if not text.strip():
        return None

    try:
        return jsonlib.loads(text)
    except (ValueError, RecursionError) as exc:
        raise HTTPException(
            400, f"{what} is not JSON ({exc}); nothing was decided"
        ) from exc


async def _leases(site: Site, damaged: list[str]) -> list[dict[str, Any]]:
    """Return which process runs which thread, of the first leases by id."""
    if not isinstance(site.cp, ListsThreads) or not isinstance(site.cp, KeepsReceipts):
        return []

    async def one(info: ThreadInfo) -> list[CallRecord]:
        return await _open_calls(site, info.thread_id, damaged)

    try:
        page = await site.cp.list_threads(prefix=f"{RUNS}:", limit=_LEASES)
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
        if record.call.tool_name == TERM
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
        "run_thread": request.run_thread,
        "request": request.record.call.idempotency_key,
        "key": request.key,
        "number": request.number,
        "tool": request.tool,
        "args": dict(request.args),
        "editable": list(request.editable),
        "requested_at": request.requested_at.isoformat(),
        "expires_at": None if expires is None else expires.isoformat(),
        "shown": _digest(request),
    }


async def _decided(site: Site, request: ApprovalRequest) -> dict[str, Any]:
    """Return a request, its decision, and the effect's latest attempt."""
    made = request.decision
    effect: CallRecord | None = None

    if not request.record.erased:  # else the key of its effect is not known
        effect = await site.cp.find_call(request.key)

    run_thread = request.run_thread
    why = None

    if isinstance(site.cp, ReadsRanges):
        with suppress(CorruptThread):  # a person can decide all the same
            why = await site.cp.load_range(run_thread, -_WHY)

    return {
        **_request_data(request),
        "erased": request.record.erased,
        "decision": "undecided" if made is None else made.verdict,
        "by": made and made.by,
        "reason": made and made.reason,
        "origin": made and made.origin,
        "value": made and made.value,
        "decided_at": made and made.at and made.at.isoformat(),
        "effect": None if effect is None else call_data(effect),
        "first": 0 if why is None else why.first,
        "messages": [] if why is None else why.messages,
    }
