"""``cpkit pending``: what waits, over all threads."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import typer

from cpkit.cli.calls import short_key
from cpkit.cli.output import age, one_line, print_json, print_table, progress
from cpkit.cli.running import No, run, say
from cpkit.cli.stores import Json, Store, Url, opened, store_url
from cpkit.effects import EffectLedger
from cpkit.effects.approvals import ApprovalRequest
from cpkit.protocol import KeepsReceipts, ListsThreads
from cpkit.records import CallRecord

__all__ = ["Waiting", "pending", "pending_in"]

Thread = Annotated[
    str | None,
    typer.Argument(
        help="Only this thread.", metavar="[THREAD]", show_default="all of them"
    ),
]

_PAGE = 500
# Threads at a time, which hides a server's round trips.
_AT_ONCE = 8


class Waiting(NamedTuple):
    """An undecided approval request, or a call that has no outcome yet."""

    record: CallRecord
    request: ApprovalRequest | None

    @property
    def key(self) -> str:
        """What `approve` and `deny` take; of a call, its own key."""
        call = self.record.call
        return call.idempotency_key if self.request is None else self.request.key


def pending(url: Url = None, thread: Thread = None, json: Json = False) -> None:
    """List what waits for a decision or an outcome.

    Undecided approval requests, and calls without an outcome. A call waits while
    its effect runs, and after a crash until somebody resumes it. THREAD and KEY of
    an approval are what approve and deny take. Exits with 0 also where nothing
    waits.
    """
    found = run(_pending(store_url(url), thread))

    if json:
        print_json({"pending": [_as_json(one) for one in found]})
        return

    if not found:
        say("nothing waits")
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
    """Return what waits in a thread, oldest first; no messages are read."""
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
    async with opened(url, ListsThreads, KeepsReceipts) as cp:
        if thread is not None:
            if await cp.load(thread) is None:
                raise No(f"there is no thread {thread!r}; cpkit threads lists them")

            return await pending_in(cp, thread)

        found: list[Waiting] = []
        after: str | None = None

        with progress("threads") as advance:
            while page := await cp.list_threads(after=after, limit=_PAGE):
                for i in range(0, len(page), _AT_ONCE):
                    some = page[i : i + _AT_ONCE]
                    lists = await asyncio.gather(
                        *(pending_in(cp, one.thread_id) for one in some)
                    )
                    found += [one for waiting in lists for one in waiting]
                    advance(len(some))

                after = page[-1].thread_id

        return sorted(found, key=_since)


def _since(waiting: Waiting) -> datetime:
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
