"""Approval requests in the store: what is recorded of them, and how they are found.

Request ``n`` of an effect is a call in the effect's thread, whose key is derived from
the effect's key and ``n``. It is undecided while it is issued. A call's outcome is
write-once, so the store says which of two decisions was first; a withdrawal is such an
outcome too. A request is for exact arguments. One for other arguments gets the next
number, and so does one that is asked again, or that follows a withdrawn one.

The list of runs (`cpkit.runs`) says which run waits for which request. So the undecided
requests of a store are those of its open runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import inf
from typing import Any, Literal
from urllib.parse import urlencode

from cpkit.canonical import canonical_json
from cpkit.effects.attempts import Attempts
from cpkit.effects.effect import Decision, Effect, Verdict, request_key
from cpkit.effects.records import APPROVAL, Outcome, fresh_call_id, signed
from cpkit.effects.tracing import log
from cpkit.errors import CheckpointerError, CorruptThread, UnknownCall
from cpkit.lease import LeaseTimeout, held_leases, thread_lease
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, JsonValue, ToolCall
from cpkit.runs import Ask, RunList, RunThread, hint, read_all, store_time

__all__ = [
    "ApprovalRequest",
    "Requests",
    "request_of",
    "waiting_tools",
]


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """An effect that needs a decision.

    ``key`` names the effect, and is what `EffectLedger.approve` takes. ``number``
    counts the requests of the effect: 1, 2, … ``thread_id`` is the thread with the
    request's record, and ``run_thread`` the one that a worker runs after the decision.
    A person may change the arguments named in ``editable``. ``link`` leads to the page
    on which a person decides; it is empty unless the ledger was given ``ui``.
    """

    key: str
    thread_id: str
    tool: str
    args: Mapping[str, Any]
    requested_at: datetime
    record: CallRecord
    number: int = 1
    expires_after: float | None = None
    run_thread: str = ""
    editable: tuple[str, ...] = ()
    link: str = ""

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
        record = self.record
        at = record.resolved_at

        if record.status == "issued":
            return None

        found = record.result if isinstance(record.result, dict) else {}
        verdict: Verdict = "denied"

        if found.get("withdrawn") is True:
            verdict = "withdrawn"
        elif found.get("expired") is True or (at is not None and self.is_late(at)):
            verdict = "expired"
        elif found.get("approved") is True and not record.erased:
            verdict = "approved"

        return signed(verdict, found, at)

    @property
    def verdict(self) -> Verdict | Literal["undecided"]:
        """How it was decided; a withdrawn one counts for no later run."""
        return "undecided" if self.decision is None else self.decision.verdict

    @property
    def cursor(self) -> str:
        """The ``after`` with which `EffectLedger.requests` continues after this one."""
        return f"{self.requested_at.isoformat()} {self.record.call.call_id}"

    def same_args(self, args: Mapping[str, JsonValue]) -> bool:
        """Return whether the request is for exactly these arguments."""
        return canonical_json(dict(self.args)) == canonical_json(dict(args))

    def is_late(self, at: datetime) -> bool:
        """Return whether a time of the store is after the request's time."""
        return self.expires_at is not None and at > self.expires_at


# Requests in the store


class Requests:
    """Finds, records and decides approval requests."""

    def __init__(self, cp: Checkpointer[Any], ui: str | None = None) -> None:
        self._cp = cp
        self._attempts = Attempts(cp)
        self._ui = None if ui is None else ui.rstrip("/")
        self._runs: RunList | None = None
        self._clock: datetime | None = None
        """The store's time at time 0 of the event loop's clock."""
        self._damaged: set[str] = set()
        """The call ids of damaged requests that the log has named."""

    def of(self, record: CallRecord | None) -> ApprovalRequest | None:
        """Return the request of a record, with its link."""
        request = None if record is None else request_of(record)

        if request is None or self._ui is None:
            return request

        place = {
            "id": request.thread_id,
            "request": request.record.call.idempotency_key,
        }
        return replace(request, link=f"{self._ui}/waiting/decide?{urlencode(place)}")

    async def get(self, key: str, number: int) -> ApprovalRequest | None:
        """Return one request, or ``None``."""
        return self.of(await self._attempts.find(request_key(key, number)))

    async def all_of(self, key: str) -> list[ApprovalRequest]:
        """Return the requests of an effect, oldest first."""
        found: list[ApprovalRequest] = []

        while (request := await self.get(key, len(found) + 1)) is not None:
            found.append(request)

        return found

    async def find(
        self,
        key: str,
        args: Mapping[str, JsonValue] | None = None,
        number: int | None = None,
    ) -> ApprovalRequest | None:
        """Return the request that a person means, or ``None``.

        That is the newest request with the given number and arguments. With neither, it
        is the newest one with the arguments of the effect's first request; then another
        undecided request raises ``ValueError``.
        """
        requests = await self.all_of(key)
        requests = [one for one in requests if not one.record.erased] or requests

        if number is not None:
            requests = [one for one in requests if one.number == number]

        if args is not None:
            requests = [one for one in requests if one.same_args(args)]
        elif requests and number is None:
            same = [one for one in requests if one.same_args(requests[0].args)]

            # This is an error even if one later request alone is undecided: the person
            # may mean the first request, and another person just decided that one.
            if any(one.decision is None for one in requests if one not in same):
                raise ValueError(
                    f"{key!r} was requested with several sets of arguments; say with "
                    "args= which request is meant"
                )

            requests = same

        return requests[-1] if requests else None

    async def of_thread(self, thread_id: str) -> list[ApprovalRequest]:
        """Return the undecided requests recorded in a thread, oldest first."""
        calls: list[CallRecord] = await self._attempts.cp.list_calls(thread_id)
        found = [self.of(one) for one in calls if one.status == "issued"]
        return [one for one in found if one is not None and not one.record.erased]

    async def undecided(self) -> list[ApprovalRequest]:
        """Return the undecided requests that runs of the store wait for, oldest first.

        A damaged request is logged and left out: it must not hide the others.
        """
        self._runs = self._runs or RunList(self._cp)
        await self._runs.refresh()
        asks = {
            ask.request: ask
            for state in self._runs.states.values()
            for ask in state.asks.values()
        }
        found = await read_all(self.of_ask, list(asks.values()))
        requests = [one for one in found if isinstance(one, ApprovalRequest)]
        is_open = [one for one in requests if one.decision is None]
        return sorted(is_open, key=lambda one: one.cursor)

    async def of_ask(
        self, ask: Ask
    ) -> ApprovalRequest | CorruptThread | Literal["gone"]:
        """Return the request that a run waits for, or that it is damaged or gone.

        It is gone if it was withdrawn, or deleted with its thread. A damaged one is
        logged once; a person repairs it, and the run waits for that.
        """
        try:
            request = await self.get(ask.key, ask.number)
        except CorruptThread as exc:
            if ask.request not in self._damaged:
                self._damaged.add(ask.request)
                log.exception("cannot read a request of thread %r", ask.thread_id)

            return exc

        if request is None or request.record.call.call_id != ask.request:
            return "gone"

        is_gone = request.record.erased or request.verdict == "withdrawn"
        return "gone" if is_gone else request

    async def seconds_left(self, request: ApprovalRequest) -> float:
        """Return how long it takes until a request expires; ``inf`` if it never does.

        By the store's clock, which is read once: a wall clock that is wrong ends none.
        If the store does not show its clock, the whole time is left.
        """
        if request.expires_at is not None and self._clock is None:
            self._set_clock(await store_time(self._cp) or request.requested_at)

        return self._seconds_left(request)

    def is_in_time(self, request: ApprovalRequest) -> bool:
        """Return whether a request is known not to have expired yet."""
        is_known = request.expires_at is None or self._clock is not None
        return is_known and self._seconds_left(request) > 0

    def _seconds_left(self, request: ApprovalRequest) -> float:
        if request.expires_at is None or self._clock is None:
            return inf

        left = request.expires_at - self._clock
        return left.total_seconds() - asyncio.get_running_loop().time()

    def _set_clock(self, now: datetime) -> None:
        self._clock = now - timedelta(seconds=asyncio.get_running_loop().time())

    async def create(
        self,
        effect: Effect,
        number: int,
        run_thread: str,
        expires_after: float | None,
        editable: tuple[str, ...] = (),
    ) -> ApprovalRequest | None:
        """Record a request, or return the one that has this number already.

        Then it is put on the list of runs. If this process dies in between, the next
        run of the effect does that. ``None`` if the request was deleted at once.
        """
        call = ToolCall(
            fresh_call_id("approval"),
            APPROVAL,
            {
                "key": effect.key,
                "tool": effect.tool,
                "args": dict(effect.args),
                "number": number,
                "run_thread": run_thread,
                "expires_after": expires_after,
                "editable": [*editable],
            },
            request_key(effect.key, number),
        )
        request = self.of(await self._attempts.claim(effect.thread_id, call))

        if request is not None:
            is_new = request.record.call.call_id == call.call_id

            if is_new:
                self._set_clock(request.requested_at)

            await self.list_for(request, run_thread, is_new=is_new)

        return request

    async def list_for(
        self, request: ApprovalRequest, run_thread: str, *, is_new: bool = False
    ) -> None:
        """Record that a run waits for a request, unless that is on record."""
        call_id, run = request.record.call.call_id, RunThread(self._cp, run_thread)

        if request.decision is not None:
            return

        if is_new or call_id not in (await run.look()).asks:
            key, number, thread_id = request.key, request.number, request.thread_id
            await run.ask(Ask(call_id, key, number, thread_id))

    async def resolve(
        self, request: ApprovalRequest, result: dict[str, JsonValue]
    ) -> ApprovalRequest | None:
        """Record a decision; return the request as it is decided now.

        ``None`` if it was deleted with ``forget_keys``.
        """
        place, call = request.record.thread_id, request.record.call

        try:
            record = await self._attempts.resolve(place, call, Outcome(result))
        except UnknownCall:
            return None

        await hint(self._cp, request=record.call.call_id)
        return self.of(record)

    async def expire(self, request: ApprovalRequest) -> ApprovalRequest | None:
        """End an undecided request whose time is over, as `resolve` does."""
        return await self.resolve(request, {"approved": False, "expired": True})

    async def settle_used(self, key: str) -> None:
        """Take the approved requests of a completed effect off the list of runs."""
        for request in await self.all_of(key):
            if request.verdict == "approved":
                await self.settle(request.run_thread or request.thread_id, request)

    async def settle(self, run_thread: str, request: ApprovalRequest) -> None:
        """Take a request off the list of runs: no run waits for it any more.

        Under a lease of the run's thread, the end of the run does that.
        """
        call_id = request.record.call.call_id

        for lease in held_leases(self._cp):
            if lease.thread_id == run_thread:
                lease.seen.add(call_id)
                return

        try:
            async with thread_lease(self._cp, run_thread, timeout=0) as lease:
                lease.run_no_agent()
                lease.seen.add(call_id)
        except LeaseTimeout:
            await RunThread(self._cp, run_thread).add(settled=call_id)
        except CheckpointerError:
            # A worker runs the thread again, which replays the effect.
            log.warning("could not settle a request", exc_info=True)


def request_of(record: CallRecord) -> ApprovalRequest | None:
    """Return the approval request of a record, or ``None`` for another call.

    Of an erased record, only its own key is known.
    """
    if record.call.tool_name != APPROVAL:
        return None

    if record.erased:
        return ApprovalRequest("", record.thread_id, "", {}, record.issued_at, record)

    args: Any = record.call.args

    if not args.keys() >= {"key", "tool", "args", "number", "run_thread"}:
        return None

    return ApprovalRequest(
        args["key"],
        record.thread_id,
        args["tool"],
        args["args"],
        record.issued_at,
        record,
        args["number"],
        args.get("expires_after"),
        args["run_thread"],
        tuple(args.get("editable", ())),
    )


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
        listed = await requests.of_thread(thread_id)
        asks = (await RunThread(cp, thread_id).look()).asks.values()

        for request in [*listed, *[await requests.of_ask(one) for one in asks]]:
            if isinstance(request, CorruptThread):
                raise request  # it may be that of any tool

            if request == "gone":
                continue

            if request.decision is None:
                found[request.tool] = (
                    "its approval request is undecided; approve or deny it"
                )
            elif request.verdict == "approved":
                holder = await attempts.find(request.key)

                if holder is None or holder.status != "completed":
                    reason = "its approval is not used; run the thread again"
                    found.setdefault(request.tool, reason)

    return found
