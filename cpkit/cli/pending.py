"""``cpkit pending``: list approval requests and calls without an outcome."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import typer

from cpkit.cli.calls import short_key, shown_args
from cpkit.cli.output import one_line, print_json, print_table, progress
from cpkit.cli.running import Exit, print_stderr, run
from cpkit.cli.stores import (
    Internal,
    Json,
    Store,
    Url,
    no_thread,
    open_store,
    store_url,
)
from cpkit.effects import ApprovalRequest
from cpkit.effects.once import ONCE_THREADS
from cpkit.effects.requests import request_of
from cpkit.errors import CorruptThread
from cpkit.protocol import KeepsReceipts, ListsThreads
from cpkit.records import CallRecord, ThreadInfo
from cpkit.tools.formats import age
from cpkit.tools.paging import find_thread, gather_limited, thread_pages

__all__ = [
    "Waiting",
    "all_pending",
    "all_requests",
    "is_for_people",
    "pending",
    "pending_in",
]

Thread = Annotated[
    str | None,
    typer.Argument(
        help="List only this thread.", metavar="[THREAD]", show_default="all threads"
    ),
]


class Waiting(NamedTuple):
    """An undecided approval request, or a call without an outcome."""

    record: CallRecord
    request: ApprovalRequest | None

    @property
    def key(self) -> str:
        """The key that `approve` and `deny` take, or the key of the call."""
        call = self.record.call
        return call.idempotency_key if self.request is None else self.request.key


def pending(
    url: Url = None,
    thread: Thread = None,
    internal: Internal = False,
    json: Json = False,
) -> None:
    """List undecided approval requests, and calls without an outcome.

    A call has no outcome while its effect runs, and after a crash until an agent
    recovers the thread. Commands approve and deny take the KEY of a request.
    Leases, and other calls of cpkit's own threads, are listed with --internal.
    Exits with 0 also if the list is empty, and with 1 if a thread is damaged: it is
    named, and the list has the other threads.
    """
    found, damaged = run(_pending(store_url(url), thread, internal))

    if json:
        print_json({"pending": [_as_json(one) for one in found]})
    elif found:
        _print(found)
    elif not damaged:
        print_stderr("nothing is pending")

    for problem in damaged:
        print_stderr(f"not listed: {problem}")

    raise typer.Exit(Exit.NO if damaged else Exit.DONE)


def _print(found: list[Waiting]) -> None:
    print_table(
        ["thread", "key", "what", "tool", "for", "args"],
        [
            (
                one.record.thread_id,
                short_key(one.key),
                "call" if one.request is None else "approval",
                one.record.call.tool_name if one.request is None else one.request.tool,
                age(one.record.issued_at),
                one_line(_args(one), 80),
            )
            for one in found
        ],
        whole="thread key",
    )


async def pending_in(cp: Store, thread_id: str) -> list[Waiting]:
    """Return what is pending in a thread, oldest first, without its messages."""
    return waiting_of(await cp.list_calls(thread_id))


def waiting_of(calls: Sequence[CallRecord]) -> list[Waiting]:
    """Return those of a thread's calls that are pending."""
    waiting = [one for one in calls if one.status == "issued" and not one.erased]
    return [Waiting(one, request_of(one)) for one in waiting]


def is_for_people(waiting: Waiting) -> bool:
    """Return whether a person has to know of it: not of leases and other internals."""
    call = waiting.record.call
    request = waiting.request

    if call.tool_name.startswith("cpkit:"):
        return request is not None and request.decision is None

    thread_id = waiting.record.thread_id
    return not thread_id.startswith("cpkit:") or thread_id.startswith(ONCE_THREADS)


async def _pending(
    url: str, thread: str | None, internal: bool
) -> tuple[list[Waiting], list[str]]:
    """Return what is pending, oldest first, and what is wrong with damaged threads."""
    async with open_store(url, ListsThreads, KeepsReceipts) as cp:
        if thread is not None:
            if await find_thread(cp, thread) is None:
                raise no_thread(url, thread)

            try:
                return await pending_in(cp, thread), []
            except CorruptThread as exc:
                return [], [str(exc)]

        return await all_pending(cp, internal)


async def all_pending(
    cp: Store, internal: bool = False
) -> tuple[list[Waiting], list[str]]:
    """Return what is pending in all threads, and what is wrong with damaged ones."""
    found: list[Waiting] = []
    damaged: list[str] = []

    with progress("threads") as advance:

        async def collect(info: ThreadInfo) -> None:
            try:
                waiting = await pending_in(cp, info.thread_id)
            except CorruptThread as exc:
                damaged.append(str(exc))
                waiting = []

            found.extend(one for one in waiting if internal or is_for_people(one))
            advance(1)

        for prefix in ("",) if internal else ("", ONCE_THREADS):
            async for page in thread_pages(cp, prefix=prefix, internal=internal):
                await gather_limited(collect, page)

    return sorted(found, key=_issued_at), sorted(damaged)


async def all_requests(cp: Store) -> list[ApprovalRequest]:
    """Return all approval requests, decided ones too, but those of damaged threads."""
    found: list[ApprovalRequest] = []

    async def collect(info: ThreadInfo) -> None:
        with suppress(CorruptThread):
            calls = await cp.list_calls(info.thread_id)
            requests = [request_of(one) for one in calls if not one.erased]
            found.extend(one for one in requests if one is not None)

    for prefix in ("", ONCE_THREADS):
        async for page in thread_pages(cp, prefix=prefix, internal=False):
            await gather_limited(collect, page)

    return found


def _issued_at(waiting: Waiting) -> datetime:
    return waiting.record.issued_at


def _args(waiting: Waiting) -> Any:
    if waiting.request is not None:
        return dict(waiting.request.args)

    return shown_args(waiting.record)


def _as_json(waiting: Waiting) -> dict[str, Any]:
    record = waiting.record
    request = waiting.request
    return {
        "kind": "call" if request is None else "approval",
        "thread_id": record.thread_id,
        "key": waiting.key,
        "tool": record.call.tool_name if request is None else request.tool,
        "args": _args(waiting),
        "call_id": record.call.call_id,
        "attempt": record.attempt,
        "issued_at": record.issued_at.isoformat(),
    }
