"""Approval requests in the store: what is recorded of them, and how they are found.

Request ``n`` of an effect is a call in the effect's thread, whose key is derived from
the effect's key and ``n``. It is undecided while it is issued. A call's outcome is
write-once, so the store says which of two decisions was first; a withdrawal is such an
outcome too. A request is for exact arguments: other ones are the next request.

The list of runs (`cpkit.runs`) says which run waits for which request. So the undecided
requests of a store are those of its open runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from math import inf
from typing import Any, Literal
from urllib.parse import urlencode

from cpkit.canonical import canonical_json
from cpkit.effects.attempts import Attempts
from cpkit.effects.effect import Decision, Verdict, request_key
from cpkit.effects.records import APPROVAL, Outcome, fresh_call_id, signed
from cpkit.effects.tracing import log
from cpkit.errors import CheckpointerError, CorruptThread, UnknownCall
from cpkit.lease import LeaseTimeout, held_leases, thread_lease
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, JsonValue, ToolCall
from cpkit.runs.threads import Ask, RunThread, hint, store_time

__all__ = ["ApprovalRequest", "Requests", "request_of", "waiting_tools"]

_STORED = "key", "tool", "args", "number", "expires_after", "run_thread", "editable"
"""Arguments of a request's call, and fields of `ApprovalRequest`."""


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """An effect that needs a decision.

    ``key`` names the effect, and is what `EffectLedger.approve` takes. ``number``
    counts the requests of the effect: 1, 2, … ``thread_id`` is the thread with the
    request's record, and ``run_thread`` the one that a worker runs after the decision.
    A person may change the arguments named in ``editable``.
    """

    record: CallRecord
    thread_id: str
    requested_at: datetime
    key: str = ""
    tool: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    number: int = 1
    expires_after: float | None = None
    run_thread: str = ""
    editable: Sequence[str] = ()

    @property
    def expires_at(self) -> datetime | None:
        """When it expires, by the store's clock; a later decision does not count."""
        if self.expires_after is None:
            return None

        return self.requested_at + timedelta(seconds=self.expires_after)

    @property
    def decision(self) -> Decision | None:
        """The decision on record, or ``None`` while a person may decide.

        No clock but the store's is asked.
        """
        at, result = self.record.resolved_at, self.record.result
        found = result if isinstance(result, dict) else {}
        verdict: Verdict = "erased" if self.record.erased else "denied"

        if at is None:
            return None

        if found.get("withdrawn") is True:
            verdict = "withdrawn"
        elif found.get("expired") is True or self.is_late(at):
            verdict = "expired"
        elif found.get("approved") is True:
            verdict = "approved"

        return signed(verdict, found, at)

    @property
    def is_gone(self) -> bool:
        """Whether it was withdrawn or erased, and counts for no later run."""
        return self.record.erased or self.verdict == "withdrawn"

    @property
    def verdict(self) -> Verdict | Literal["undecided"]:
        """How it was decided."""
        return "undecided" if self.decision is None else self.decision.verdict

    def same_args(self, args: Mapping[str, JsonValue]) -> bool:
        """Return whether the request is for exactly these arguments."""
        return canonical_json(dict(self.args)) == canonical_json(dict(args))

    def is_late(self, at: datetime) -> bool:
        """Return whether a time of the store is after the request's time."""
        return self.expires_at is not None and at > self.expires_at

    def link(self, ui: str) -> str:
        """Return the link to the request on the page of ``cpkit ui`` at an address."""
        own_key = self.record.call.idempotency_key
        place = urlencode({"id": self.thread_id, "request": own_key})
        return f"{ui.rstrip('/')}/waiting/decide?{place}"


# Requests in the store


class Requests:
    """Finds, records and decides approval requests."""

    def __init__(self, cp: Checkpointer[Any]) -> None:
        self.cp = cp
        self.attempts = Attempts(cp)
        self._clock: datetime | None = None
        """The store's time at time 0 of the event loop's clock."""
        self._damaged: set[str] = set()
        """The call ids of damaged requests that the log has named."""

    async def get(self, key: str, number: int) -> ApprovalRequest | None:
        """Return one request, or ``None``."""
        return request_of(await self.attempts.find(request_key(key, number)))

    async def all_of(self, key: str) -> list[ApprovalRequest]:
        """Return the requests of an effect, oldest first."""
        found: list[ApprovalRequest] = []

        while (request := await self.get(key, len(found) + 1)) is not None:
            found.append(request)

        return found

    async def of_thread(self, thread_id: str) -> list[ApprovalRequest]:
        """Return the undecided requests recorded in a thread, oldest first."""
        calls: list[CallRecord] = await self.attempts.cp.list_calls(thread_id)
        found = [request_of(one) for one in calls if one.status == "issued"]
        return [one for one in found if one is not None and not one.record.erased]

    async def of_ask(
        self, ask: Ask
    ) -> ApprovalRequest | CorruptThread | Literal["gone"]:
        """Return the request that a run waits for, or that it is damaged or gone.

        It is gone if it was withdrawn, or deleted with its thread. A damaged one is
        logged once: it must not hide the others, and a person repairs it.
        """
        try:
            request = await self.get(ask.key, ask.number)
        except CorruptThread as exc:
            if ask.request not in self._damaged:
                self._damaged.add(ask.request)
                log.exception("cannot read a request of thread %r", ask.thread_id)

            return exc

        is_same = request is not None and request.record.call.call_id == ask.request
        return request if request and is_same and not request.is_gone else "gone"

    async def seconds_left(self, request: ApprovalRequest) -> float:
        """Return the time until a request expires; ``inf`` if it never does.

        By the store's clock, read once; if the store shows none, all of it is left.
        """
        if request.expires_at is None:
            return inf

        clock = asyncio.get_running_loop().time

        if self._clock is None:
            now = await store_time(self.cp) or request.requested_at
            self._clock = now - timedelta(seconds=clock())

        return (request.expires_at - self._clock).total_seconds() - clock()

    async def create(
        self, thread_id: str, key: str, number: int, asked: Mapping[str, JsonValue]
    ) -> ApprovalRequest | None:
        """Record a request and list it for its run; ``None`` if the number is taken."""
        args = {**asked, "key": key, "number": number}
        own_key = request_key(key, number)
        call = ToolCall(fresh_call_id("approval"), APPROVAL, args, own_key)
        request = request_of(await self.attempts.claim(thread_id, call))

        # Another run's, or erased since: the answer may have come late.
        if request is None or request.record.call != call:
            return None

        since = timedelta(seconds=asyncio.get_running_loop().time())
        self._clock = request.requested_at - since
        await self.list_for(request, request.run_thread, is_new=True)
        return request

    async def list_for(
        self, request: ApprovalRequest, run_thread: str, *, is_new: bool = False
    ) -> None:
        """Record that a run waits for a request, unless it is decided or listed."""
        call_id, run = request.record.call.call_id, RunThread(self.cp, run_thread)
        ask = Ask(call_id, request.key, request.number, request.thread_id)

        if is_new or not (request.decision or call_id in (await run.look()).asks):
            await run.add(asks=asdict(ask))

    async def resolve(
        self, request: ApprovalRequest, result: dict[str, JsonValue]
    ) -> ApprovalRequest | None:
        """Record a decision; return the request as it is now, ``None`` if forgotten."""
        place, call = request.record.thread_id, request.record.call

        try:
            record = await self.attempts.resolve(place, call, Outcome(result))
        except UnknownCall:
            return None

        await hint(self.cp, request=record.call.call_id)
        return request_of(record)

    async def expire(self, request: ApprovalRequest) -> ApprovalRequest | None:
        """End an undecided request whose time is over, as `resolve` does."""
        return await self.resolve(request, {"approved": False, "expired": True})

    async def settle_used(self, key: str) -> None:
        """Take the approved requests of a completed effect off the list of runs."""
        for request in await self.all_of(key):
            if request.verdict == "approved":
                await self.settle(request.run_thread, request)

    async def settle(self, run_thread: str, request: ApprovalRequest) -> None:
        """Take a request off the list of runs: no run waits for it any more.

        Under a lease of the run's thread, the end of the run does that.
        """
        call_id = request.record.call.call_id

        for lease in held_leases(self.cp):
            if lease.thread_id == run_thread:
                lease.seen.add(call_id)
                return

        try:
            async with thread_lease(self.cp, run_thread, timeout=0) as lease:
                lease.run_no_agent()
                lease.seen.add(call_id)
        except LeaseTimeout:
            await RunThread(self.cp, run_thread).add(settled=call_id)
        except CheckpointerError:
            # A worker runs the thread again, which replays the effect.
            log.warning("could not settle a request", exc_info=True)


def request_of(record: CallRecord | None) -> ApprovalRequest | None:
    """Return the approval request of a record, or ``None`` for another call.

    Of an erased record, only its own key is known.
    """
    if record is None or record.call.tool_name != APPROVAL:
        return None

    place, args = record.thread_id, record.call.args
    stored = {"run_thread": place, **{n: args[n] for n in _STORED if n in args}}

    if not (record.erased or args.keys() >= {*_STORED}):
        return None

    return ApprovalRequest(record, place, record.issued_at, **stored)


async def waiting_tools(
    cp: Checkpointer[Any], threads: Collection[str]
) -> dict[str, str]:
    """Return the tools whose effects wait for an approval in these threads, and why.

    Their open calls must stay open. A request does not say which call of the model
    asked for it. So an open call of the same tool may be that call.
    """
    attempts, requests = Attempts(cp), Requests(cp)
    found: dict[str, str] = {}

    for thread_id in threads:
        asks = (await RunThread(cp, thread_id).look()).asks.values()
        asked = [await requests.get(one.key, one.number) for one in asks]

        for request in [*await requests.of_thread(thread_id), *asked]:
            if request is None or request.record.erased:
                continue

            if request.decision is None:
                found[request.tool] = "its approval request is undecided; decide it"
            elif request.verdict == "approved":
                holder = await attempts.find(request.key)

                if holder is None or holder.status != "completed":
                    reason = "its approval is not used; run the thread again"
                    found.setdefault(request.tool, reason)

    return found
