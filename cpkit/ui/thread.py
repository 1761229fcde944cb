"""One thread: its conversation, its turns and calls on a time line, and its extra."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cpkit.effects.records import effect_of
from cpkit.effects.requests import request_of
from cpkit.errors import CorruptThread
from cpkit.protocol import KeepsReceipts, ListsThreads, ReadsRanges
from cpkit.records import CallRecord, ThreadInfo
from cpkit.toolcalls import open_calls, read_message, total_of, usage_of
from cpkit.tools.formats import thread_json
from cpkit.tools.paging import find_thread
from cpkit.ui.blocks import is_entry
from cpkit.ui.site import Page, Site, call_data, needs, number, wanted
from cpkit.ui.timeline import on_a_line, turns_of, usage_data
from cpkit.ui.waiting import requests_of

__all__ = ["calls", "extra", "message", "thread"]

_PER_PAGE = 40
_CALLS_PER_PAGE = 200
_COUNTED = 2_000  # messages whose turns, tokens and cost are summed


async def thread(site: Site, request: Request) -> Page:
    """Show some messages of a thread: the last ones, or those from ``start`` on."""
    thread_id = wanted(request, "id")
    limit = number(request, "limit", _PER_PAGE, 1, 500)
    needs(site, ReadsRanges, "read a part of a thread")
    start = number(request, "start", -limit, 0, 2**53)
    stop = start + limit if start >= 0 else None
    info, requests, data = await asyncio.gather(
        _info(site, thread_id),
        requests_of(site, request, thread_id),
        site.cp.load_range(thread_id, start, stop),
    )
    messages: list[Any] = [] if data is None else data.messages
    asked, start = start, 0 if data is None else data.first
    # The messages before this page were trimmed.
    is_first = start > asked if asked >= 0 else len(messages) < limit
    version = max(info.version, start + len(messages))
    return Page(
        "thread.html",
        {
            **thread_json(info),
            "version": version,
            "start": start,
            "stop": start + len(messages),
            "limit": limit,
            "earlier": max(0, start - limit) if start and not is_first else None,
            "trimmed": start if is_first else 0,
            "later": start + limit if start + len(messages) < version else None,
            "is_session": any(map(is_entry, messages)),
            "messages": messages,
            "requests": requests,
            "ledger": await _ledger(site, thread_id, messages),
            "usage": usage_data(total_of(map(usage_of, messages))),
        },
    )


async def _ledger(site: Site, thread_id: str, messages: list[Any]) -> dict[str, Any]:
    """Return what the ledger has of the calls that have no result on the page.

    ``calls`` has the newest attempt by the call's id, and ``verdicts`` the decision, by
    the tool's name, of requests that no attempt has followed.
    """
    readings = ((at, read_message(one)) for at, one in enumerate(messages))
    ids = {one.call.call_id for one in open_calls(readings)}
    calls: dict[str, Any] = {}
    verdicts: dict[str, str] = {}

    if not ids or not isinstance(site.cp, KeepsReceipts):
        return {"calls": calls, "verdicts": verdicts}

    with suppress(CorruptThread):  # the messages can be shown all the same
        records: Sequence[CallRecord] = await site.cp.list_calls(thread_id)
        effects = [(effect_of(one), one) for one in records if not one.erased]
        ran = {effect.key for effect, _ in effects if effect is not None}

        for effect, record in effects:
            if effect is not None and effect.tool_call_id in ids:
                calls[effect.tool_call_id] = call_data(record)

            request = request_of(record)

            if request is not None and request.decision and request.key not in ran:
                verdicts[request.tool] = request.decision.verdict

    return {"calls": calls, "verdicts": verdicts}


async def message(site: Site, request: Request) -> Page:
    """Show one message whole, as JSON."""
    thread_id = wanted(request, "id")
    at = number(request, "at", 0, 0, 2**53)
    needs(site, ReadsRanges, "read a part of a thread")
    found = await site.cp.read(thread_id, at, at + 1)

    if not found:
        raise HTTPException(404, f"thread {thread_id[:80]!r} has no message {at}")

    return Page("message.html", {"thread_id": thread_id, "at": at, "message": found[0]})


async def calls(site: Site, request: Request) -> Page:
    """Show turns and calls on a time line, and what the thread has used.

    Calls are in the order of claims. Turns, and the sums of ``usage``, are those of
    the newest messages, from position ``first`` on.
    """
    thread_id = wanted(request, "id")
    needs(site, KeepsReceipts, "list its calls")
    records: Sequence[CallRecord] = await site.cp.list_calls(thread_id)
    last = max(0, len(records) - _CALLS_PER_PAGE)
    start = number(request, "start", last, 0, len(records))
    page = records[start : start + _CALLS_PER_PAGE]
    data = None

    if isinstance(site.cp, ReadsRanges):
        with suppress(CorruptThread):  # the calls can be shown all the same
            data = await site.cp.load_range(thread_id, -_COUNTED)

    first = 0 if data is None else data.first
    messages: list[Any] = [] if data is None else data.messages
    usages = [usage_of(message) for message in messages]
    # The other pages are about older calls.
    found = turns_of(messages, usages, first) if start == last else []
    turns, on_line = on_a_line(found, page)
    return Page(
        "calls.html",
        {
            "thread_id": thread_id,
            "is_session": await _is_session(site, thread_id),
            "count": len(records),
            "start": start,
            "earlier": max(0, start - _CALLS_PER_PAGE) if start else None,
            "later": start + len(page) if start + len(page) < len(records) else None,
            "first": first,
            "version": first + len(messages),
            "usage": usage_data(total_of(usages)),
            "turns": turns,
            "calls": on_line,
        },
    )


async def extra(site: Site, request: Request) -> Page:
    """Show the thread's extra."""
    thread_id = wanted(request, "id")
    needs(site, ReadsRanges, "read a part of a thread")
    data = await site.cp.load_range(thread_id, 0, 0)

    if data is None:
        raise _missing(thread_id)

    return Page(
        "extra.html",
        {
            "thread_id": thread_id,
            "is_session": await _is_session(site, thread_id),
            "version": data.version,
            "extra": data.extra,
        },
    )


async def _is_session(site: Site, thread_id: str) -> bool:
    """Return whether the thread begins with the header of a session."""
    if not isinstance(site.cp, ReadsRanges):
        return False

    first = await site.cp.read(thread_id, 0, 1)
    header = first[0] if first else None
    return (
        isinstance(header, dict)
        and header.get("type") == "session"
        and isinstance(header.get("version"), int)
    )


async def _info(site: Site, thread_id: str) -> ThreadInfo:
    needs(site, ListsThreads, "list its threads")
    info = await find_thread(site.cp, thread_id)

    if info is None:
        raise _missing(thread_id)

    return info


def _missing(thread_id: str) -> HTTPException:
    return HTTPException(404, f"there is no thread {thread_id[:80]!r}")
