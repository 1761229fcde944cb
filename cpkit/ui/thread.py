"""One thread: its conversation, its calls on a time line, and its extra."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cpkit.effects.records import APPROVAL
from cpkit.protocol import KeepsReceipts, ListsThreads, ReadsRanges
from cpkit.records import CallRecord, ThreadInfo
from cpkit.tools.formats import thread_json
from cpkit.tools.paging import find_thread
from cpkit.ui.blocks import is_entry
from cpkit.ui.site import Page, Site, call_data, needs, number, wanted

__all__ = ["calls", "extra", "message", "thread"]

_PER_PAGE = 40
_CALLS_PER_PAGE = 200


async def thread(site: Site, request: Request) -> Page:
    """Show some messages of a thread: the last ones, or those from ``start`` on."""
    thread_id = wanted(request, "id")
    limit = number(request, "limit", _PER_PAGE, 1, 500)
    needs(site, ReadsRanges, "read a part of a thread")
    info = await _info(site, thread_id)
    last = max(0, info.version - limit)
    start = number(request, "start", last, 0, info.version)
    # Without the parameter, the page has what was appended since the list was read.
    stop = start + limit if "start" in request.query_params else None
    messages = (await site.cp.read(thread_id, start, stop))[:500]
    version = max(info.version, start + len(messages))
    return Page(
        "thread.html",
        {
            **thread_json(info),
            "version": version,
            "start": start,
            "stop": start + len(messages),
            "limit": limit,
            "earlier": max(0, start - limit) if start else None,
            "later": start + limit if start + len(messages) < version else None,
            "is_session": any(map(is_entry, messages)),
            "messages": messages,
        },
    )


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
    """Show the thread's calls in the order of claims, on a time line."""
    thread_id = wanted(request, "id")
    needs(site, KeepsReceipts, "list its calls")
    records: Sequence[CallRecord] = await site.cp.list_calls(thread_id)
    last = max(0, len(records) - _CALLS_PER_PAGE)
    start = number(request, "start", last, 0, len(records))
    page = records[start : start + _CALLS_PER_PAGE]
    return Page(
        "calls.html",
        {
            "thread_id": thread_id,
            "is_session": await _is_session(site, thread_id),
            "count": len(records),
            "start": start,
            "earlier": max(0, start - _CALLS_PER_PAGE) if start else None,
            "later": start + len(page) if start + len(page) < len(records) else None,
            "calls": _on_a_line(page),
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


def _on_a_line(records: Sequence[CallRecord]) -> list[dict[str, Any]]:
    """Return the calls, each with its place on a line from 0 to 100.

    ``takeover`` says that an earlier attempt of the same key stands before it.
    """
    if not records:
        return []

    now = datetime.now(records[0].issued_at.tzinfo)
    ends = [record.resolved_at or now for record in records]
    first = min(record.issued_at for record in records)
    length = max((max(ends) - first).total_seconds(), 1e-6)
    found = []

    for record, end in zip(records, ends, strict=True):
        left = 100 * (record.issued_at - first).total_seconds() / length
        width = 100 * (end - record.issued_at).total_seconds() / length
        data = call_data(record)
        found.append(
            {
                **data,
                "is_approval": record.call.tool_name == APPROVAL,
                "is_internal": record.call.tool_name.startswith("cpkit:"),
                "takeover": record.attempt > 1,
                "left": round(min(left, 99), 2),
                "width": round(min(max(width, 1), 100 - min(left, 99)), 2),
            }
        )

    return found
