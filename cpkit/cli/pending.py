"""``cpkit pending``: list approval requests and calls without an outcome."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, NamedTuple

import typer

from cpkit.cli.calls import short_key
from cpkit.cli.output import age, one_line, print_json, print_table, progress
from cpkit.cli.running import NotFound, print_stderr, run
from cpkit.cli.stores import Json, Store, Url, open_store, store_url
from cpkit.effects import EffectLedger
from cpkit.effects.approvals import ApprovalRequest
from cpkit.protocol import KeepsReceipts, ListsThreads
from cpkit.records import CallRecord, ThreadInfo
from cpkit.tools.paging import gather_limited, thread_pages

__all__ = ["Waiting", "pending", "pending_in"]

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


def pending(url: Url = None, thread: Thread = None, json: Json = False) -> None:
    """List undecided approval requests, and calls without an outcome.

    A call has no outcome while its effect runs, and after a crash until an agent
    resumes the thread. Commands approve and deny take the THREAD and KEY of a request.
    Exits with 0 also if the list is empty.
    """
    found = run(_pending(store_url(url), thread))

    if json:
        print_json({"pending": [_as_json(one) for one in found]})
        return

    if not found:
        print_stderr("nothing is pending")
        return

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
    )


async def pending_in(cp: Store, thread_id: str) -> list[Waiting]:
    """Return what is pending in a thread, oldest first, without its messages."""
    calls = await cp.list_calls(thread_id)
    waiting = [one for one in calls if one.status == "issued" and not one.erased]

    if not waiting:
        return []

    requests = {
        one.record.call.call_id: one
        for one in await EffectLedger(cp).pending(thread_id)
    }
    return [Waiting(one, requests.get(one.call.call_id)) for one in waiting]


async def _pending(url: str, thread: str | None) -> list[Waiting]:
    async with open_store(url, ListsThreads, KeepsReceipts) as cp:
        if thread is not None:
            if await cp.load(thread) is None:
                raise NotFound(
                    f"there is no thread {thread!r}; cpkit threads lists them"
                )

            return await pending_in(cp, thread)

        found: list[Waiting] = []

        with progress("threads") as advance:

            async def collect(info: ThreadInfo) -> None:
                found.extend(await pending_in(cp, info.thread_id))
                advance(1)

            async for page in thread_pages(cp):
                await gather_limited(collect, page)

        return sorted(found, key=_issued_at)


def _issued_at(waiting: Waiting) -> datetime:
    return waiting.record.issued_at


def _args(waiting: Waiting) -> Any:
    if waiting.request is not None:
        return dict(waiting.request.args)

    return dict(waiting.record.call.args)


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
