"""Which threads a person searches for: by id, text, tool, state and age."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cpkit.effects.records import REOPEN
from cpkit.errors import BackendUnavailable, CorruptThread
from cpkit.protocol import KeepsReceipts, ReadsRanges, SearchesThreads
from cpkit.records import CallRecord, ThreadInfo
from cpkit.tools.formats import thread_json
from cpkit.ui.blocks import Block, rows_of
from cpkit.ui.site import Site, counts_of, state_of
from cpkit.ui.visible import around

__all__ = ["AGES", "LOOKED_AT", "STATES", "Search", "look_at", "places_of"]

LOOKED_AT = 1_000
"""The threads, those that changed last, whose calls and messages a search reads."""

_FOUND = 500  # threads that the store finds: as many as a page can show
_SECONDS = 5.0  # for the store to find them

MESSAGES = 40
"""The newest messages of each: those on the first page of its conversation."""

AGES = {
    "hour": timedelta(hours=1),
    "day": timedelta(days=1),
    "week": timedelta(weeks=1),
    "month": timedelta(days=30),
}

STATES = {
    "waits": "Wait for a decision",
    "failed": "A tool failed",
    "doubt": "Call without an outcome",
}


@dataclass(frozen=True)
class Search:
    """What a person searches for; the empty one finds every thread."""

    text: str = ""
    tool: str = ""
    state: str = ""
    age: str = ""

    @classmethod
    def of(cls, request: Request) -> Search:
        """Return the search of an address."""
        given = request.query_params
        found = cls(
            given.get("q", "").strip()[:1_000],
            given.get("tool", "").strip(),
            given.get("state", ""),
            given.get("age", ""),
        )

        for name, known in (("state", STATES), ("age", AGES)):
            if (value := getattr(found, name)) and value not in known:
                raise HTTPException(
                    400, f"{name}={value[:40]!r} is not one of {', '.join(known)}"
                )

        return found

    def __bool__(self) -> bool:
        return bool(self.text or self.tool or self.state or self.age)

    def is_recent(self, info: ThreadInfo) -> bool:
        """Return whether the thread changed within the age."""
        age = AGES.get(self.age)
        return age is None or datetime.now(UTC) - info.updated_at <= age

    def has_id(self, info: ThreadInfo) -> bool:
        """Return whether the id has the text."""
        return self.text.casefold() in info.thread_id.casefold()


async def places_of(site: Site, search: Search, prefix: str) -> dict[str, int] | None:
    """Return the threads where the store finds the text, and the newest message.

    ``None`` if it cannot search, or not in time.
    """
    if not search.text or not isinstance(site.cp, SearchesThreads):
        return None

    try:
        found = await site.cp.search_threads(
            search.text, prefix=prefix, limit=_FOUND, timeout=_SECONDS
        )
    except BackendUnavailable as exc:
        if not exc.rejected:
            raise

        return None

    return dict(found)


async def look_at(
    site: Site, info: ThreadInfo, search: Search, places: Mapping[str, int] | None
) -> dict[str, Any] | None:
    """Return a thread's line in the list, or ``None`` if the search excludes it.

    Without ``places`` the newest messages are searched.
    """
    is_read = places is None and not search.has_id(info)
    match = None

    if places is not None and not search.has_id(info):
        match = await _match_at(site, info, search, places.get(info.thread_id))

        if match is None:
            return None

    calls = await _calls_of(site, info.thread_id)
    waits = None if calls is None else counts_of(calls)
    failed = _last_failure(calls or [])

    if is_read or search.tool or search.state == "failed":
        messages, start = await _messages(site, info, -MESSAGES)
        rows = rows_of(messages, start) if search.tool or search.state else []
        blocks = [(row.position, block) for row in rows for block in row.blocks]
        failed = failed or _failed_result(blocks)

        if is_read:
            match = _match(search.text.casefold(), messages, start)

            if match is None:
                return None

        if search.tool and not _has_tool(search.tool.casefold(), calls or [], blocks):
            return None

    is_found = {
        "waits": waits is not None and waits["approvals"] > 0,
        "doubt": waits is not None and waits["calls"] > 0,
        "failed": failed is not None,
    }

    # A request may be recorded in another thread than the one that waits.
    if search.state in ("doubt", "failed") and not is_found[search.state]:
        return None

    return {**thread_json(info), "waits": waits, "failed": failed, "match": match}


async def _calls_of(site: Site, thread_id: str) -> Sequence[CallRecord] | None:
    """Return the calls of a thread; ``None`` if calls of it are damaged."""
    if not isinstance(site.cp, KeepsReceipts):
        return None

    try:
        return await site.cp.list_calls(thread_id)
    except CorruptThread:
        return None


async def _match_at(
    site: Site, info: ThreadInfo, search: Search, position: int | None
) -> dict[str, Any] | None:
    """Return the text of the message where the store has found it."""
    if position is None:
        return None

    messages, _ = await _messages(site, info, position, position + 1)

    if not messages:  # deleted meanwhile
        return None

    # It may be a number, or a name in the JSON.
    text = search.text.casefold()
    whole = [json.dumps(one, ensure_ascii=False) for one in messages]
    return _match(text, messages, position) or _match(text, whole, position)


async def _messages(
    site: Site, info: ThreadInfo, start: int, stop: int | None = None
) -> tuple[list[Any], int]:
    """Return messages, and the position of the first; of a damaged thread, none."""
    if not isinstance(site.cp, ReadsRanges):
        return [], 0

    try:
        data = await site.cp.load_range(info.thread_id, start, stop)
    except CorruptThread:
        return [], 0

    return ([], 0) if data is None else (data.messages, data.first)


def _last_failure(calls: Sequence[CallRecord]) -> dict[str, Any] | None:
    """Return the effect that failed last, and that no later attempt repaired."""
    reopened = {
        one.call.args.get("key") for one in calls if one.call.tool_name == REOPEN
    }
    # In the order of claims, so the last attempt of each key.
    newest = {one.call.idempotency_key: (at, one) for at, one in enumerate(calls)}
    failed = [
        (record.resolved_at, at, record.call.tool_name)
        for key, (at, record) in newest.items()
        if state_of(record) in ("failed", "failure", "released") and key not in reopened
        if record.resolved_at and not record.call.tool_name.startswith("cpkit:")
    ]

    if not failed:
        return None

    time, at, tool = max(failed)
    return {"tool": tool, "time": time.isoformat(), "call": at, "message": None}


def _failed_result(blocks: list[tuple[int, Block]]) -> dict[str, Any] | None:
    """Return the last result in messages that is an error."""
    for position, block in reversed(blocks):
        result = block.result if block.kind == "call" else block

        if result is not None and result.kind == "result" and result.is_error:
            return {
                "tool": block.name or result.name,
                "time": None,
                "call": None,
                "message": position,
            }

    return None


def _has_tool(
    name: str, calls: Sequence[CallRecord], blocks: list[tuple[int, Block]]
) -> bool:
    names = [block.name for _, block in blocks if block.kind in ("call", "result")]
    # Of a request, the tool is among the arguments.
    names += [str(one.call.args.get("tool", one.call.tool_name)) for one in calls]
    names += [one.call.tool_name for one in calls]
    return any(name in one.casefold() for one in names)


def _match(text: str, messages: list[Any], start: int) -> dict[str, Any] | None:
    """Return where the newest message with the text has it."""
    for at in reversed(range(len(messages))):
        for one in _strings(messages[at]):
            found = one.casefold().find(text)

            if found >= 0:
                return {"message": start + at, "text": around(one, found)}

    return None


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value."""
    todo: list[Any] = [value]

    while todo:
        one = todo.pop()

        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            todo += reversed(one.values())
        elif isinstance(one, list):
            todo += reversed(one)
