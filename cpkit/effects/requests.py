"""Approval requests in the store: what is recorded of them, and how they are found.

Request ``n`` of an effect is a call in the effect's thread. Its idempotency key is
derived from the effect's key and ``n``, so a process that knows the effect's key finds
all requests of the effect. A call's outcome is write-once, so a request is decided
once. A request is for exact arguments. A request for other arguments of the same effect
gets the next number, and so does one that `EffectLedger.ask_again` makes.

The list of open requests is the pending calls of the thread ``cpkit:requests``. An
entry is recorded before its request. It leaves the list when a run has acted on the
decision, so the list also shows which decided requests wait for a run. An entry only
names a request: the request's own record says whether it is decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import count
from typing import Any, Literal, TypedDict
from urllib.parse import urlencode

from cpkit.canonical import canonical_json
from cpkit.effects.attempts import Attempts
from cpkit.effects.effect import EffectPlan, entry_key, request_key
from cpkit.effects.records import APPROVAL, REQUESTS, fresh_call_id
from cpkit.effects.tracing import log
from cpkit.errors import (
    CallMismatch,
    CheckpointerError,
    CorruptThread,
    UnknownCall,
)
from cpkit.records import CallRecord, JsonValue, ToolCall

__all__ = [
    "ApprovalRequest",
    "Decision",
    "DecisionOptions",
    "Entry",
    "Requests",
    "decision_at",
    "request_of",
]

_ENTRY = "cpkit:request"
"""The tool name of an entry in the list of open requests."""

_DROP_AFTER = timedelta(days=30)
"""The age at which an entry without an undecided request is dropped from the list."""

_MAX_WITHDRAWN = 8
"""Withdrawn requests in a row that do not hide the requests after them."""

Verdict = Literal["approved", "denied", "expired", "withdrawn"]


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """An effect that needs a decision.

    ``key`` names the effect, and is what `EffectLedger.approve` and
    `EffectLedger.deny` take. ``number`` counts the requests of the effect: 1, 2, …
    ``thread_id`` is the thread with the request's record, and ``run_thread`` that of
    the run that asked. The two differ for an effect with global scope. ``link`` leads
    to the page on which a person decides; it is empty unless the ledger was given
    ``ui``.
    """

    key: str
    thread_id: str
    tool: str
    args: Mapping[str, JsonValue]
    requested_at: datetime
    record: CallRecord
    number: int = 1
    expires_at: datetime | None = None
    run_thread: str = ""
    link: str = ""
    cursor: str = ""
    """The ``after`` with which `EffectLedger.requests` continues after this request."""

    @property
    def decision(self) -> Decision | None:
        """The decision on record, or ``None`` while a person may decide."""
        return decision_at(self, datetime.now(UTC))

    @property
    def is_approved(self) -> bool:
        """Whether an approval is on record that has not expired."""
        decision = self.decision
        return decision is not None and decision.verdict == "approved"

    def same_args(self, args: Mapping[str, JsonValue]) -> bool:
        """Return whether the request is for exactly these arguments."""
        return canonical_json(dict(self.args)) == canonical_json(dict(args))


@dataclass(frozen=True, slots=True)
class Decision:
    """How a request ended: the verdict, and by whom, when, why and from where.

    A request ``expired`` if it was not decided in time, or approved and not used in
    time. It was ``withdrawn`` if it was ended without a decision. ``at`` is a time of
    the store's clock, if the store has one. ``origin`` is the program that decided, for
    instance ``"cpkit approve, host:4711"``.
    """

    request: ApprovalRequest
    verdict: Verdict
    by: str | None = None
    at: datetime | None = None
    reason: str | None = None
    origin: str | None = None

    @property
    def is_approved(self) -> bool:
        """Whether the effect may run."""
        return self.verdict == "approved"

    def __str__(self) -> str:
        by = "" if self.by is None else f" by {self.by}"
        reason = "" if self.reason is None else f": {self.reason}"
        return f"{self.verdict}{by}{reason}"


class DecisionOptions(TypedDict, total=False):
    """The keywords of `EffectLedger.approve` and `EffectLedger.deny`.

    ``by``, ``reason`` and ``origin`` are recorded: who decides, why, and from where;
    the origin is by default this host and process. ``number`` selects one request of
    the effect, and ``args`` the newest request with these arguments. Leaving both out
    is a ``ValueError`` if requests with different arguments are open.
    """

    by: str | None
    reason: str | None
    origin: str | None
    args: Mapping[str, JsonValue] | None
    number: int | None


@dataclass(frozen=True, slots=True)
class Entry:
    """An open entry of the list: a request that is undecided, or not acted upon."""

    call_id: str
    key: str
    number: int
    thread_id: str
    run_thread: str
    listed_at: datetime

    @property
    def cursor(self) -> str:
        """The place in the list: entries are ordered by time, then by id."""
        return f"{self.listed_at.isoformat()} {self.call_id}"

    def is_old(self, decision: Decision | None) -> bool:
        """Whether the entry is old enough to be dropped; not asked of undecided ones.

        If the decision is newer than the entry, the age counts from the decision. So a
        run has the whole time to act on it.
        """
        made = None if decision is None else decision.at
        since = self.listed_at if made is None else max(made, self.listed_at)
        return datetime.now(UTC) - since > _DROP_AFTER


class Requests:
    """Finds, records and ends approval requests."""

    def __init__(self, attempts: Attempts, ui: str | None) -> None:
        self._attempts = attempts
        self._ui = None if ui is None else ui.rstrip("/")

    # Find

    async def get(
        self, key: str, number: int, thread_id: str | None
    ) -> ApprovalRequest | None:
        """Return one request, or ``None`` for an unknown or withdrawn one.

        A store without ``KeepsReceipts`` shows an undecided request only among the
        pending calls of its thread, so it is not found without ``thread_id``.
        """
        attempts = self._attempts
        own_key = request_key(key, number)
        record = await attempts.find_holder(own_key)

        if record is None and attempts.receipts is None and thread_id is not None:
            data = await attempts.cp.load(thread_id)
            pending = () if data is None else data.pending
            record = next(
                (one for one in pending if one.call.idempotency_key == own_key), None
            )

        return None if record is None else self.of(record)

    async def all_of(
        self,
        key: str,
        thread_id: str | None = None,
        *,
        until_open: bool = False,
        past_withdrawn: bool = False,
    ) -> list[ApprovalRequest]:
        """Return the requests of an effect, oldest first.

        With ``past_withdrawn`` this finds those behind withdrawn ones too, at the price
        of eight reads; without it, only if one of them is on the list of open requests.

        With ``until_open`` this stops at an undecided request, unless the list of open
        requests has a later one. So it may leave out later requests that were acted
        upon. Those are for other arguments: while a request is undecided, no second
        request is recorded for the same arguments.
        """
        found: dict[int, ApprovalRequest] = {}
        listed = await self.entries(needed=key)
        entries = {one.number: one for one in listed if one.key == key}

        # A withdrawn request is not found, so do not stop there if the list has an
        # entry with a higher number.
        for number in count(1):
            entry = entries.get(number)
            where = thread_id if entry is None else entry.thread_id
            request = await self.get(key, number, where)

            if request is not None:
                found[number] = request
                is_last = until_open and _is_undecided(request)
            elif not past_withdrawn:
                is_last = True
            else:
                # Look ahead: decided requests may follow, which have no entry.
                later = range(number + 1, number + _MAX_WITHDRAWN + 1)
                find = self._attempts.find_holder
                finds = (find(request_key(key, one)) for one in later)
                is_last = not any(await asyncio.gather(*finds))

            if is_last and number >= max(entries, default=0):
                return list(found.values())

        raise AssertionError

    async def of_thread(self, thread_id: str) -> list[ApprovalRequest]:
        """Return the undecided requests of a thread.

        It reads the thread's messages only in a store without ``KeepsReceipts``.
        """
        receipts = self._attempts.receipts

        if receipts is None:
            data = await self._attempts.cp.load(thread_id)
            calls = [] if data is None else data.pending
        else:
            calls = await receipts.list_calls(thread_id)

        found = [self.of(one) for one in calls if one.status == "issued"]
        return [one for one in found if one is not None and _is_undecided(one)]

    async def entries(self, after: str = "", needed: str | None = None) -> list[Entry]:
        """Return the open entries after a cursor, oldest first.

        A damaged entry is logged and left out. If it is of the effect with the key
        ``needed``, ``CorruptThread`` is raised.
        """
        pending: Sequence[CallRecord]

        try:
            data = await self._attempts.cp.load(REQUESTS)
            pending = [] if data is None else data.pending
        except CorruptThread as exc:
            if not exc.damaged_calls:
                raise

            start = f"request:{needed}:"

            if needed is not None and any(
                one.startswith(start) for one in exc.damaged_calls
            ):
                raise

            log.exception("cannot read the requests %s", ", ".join(exc.damaged_calls))
            pending = exc.calls

        found = [_entry_of(one) for one in pending]
        open_entries = [one for one in found if one is not None and one.cursor > after]
        return sorted(open_entries, key=lambda one: one.cursor)

    async def of_entry(self, entry: Entry) -> ApprovalRequest | None:
        """Return the request of an entry.

        ``None`` for an unknown or withdrawn request. ``None`` for a request that was
        erased with its thread: its decision does not count, and no run is needed. A
        damaged request is logged, and also ``None``: it must not hide the others.
        """
        try:
            request = await self.get(entry.key, entry.number, entry.thread_id)
        except CorruptThread:
            log.exception("cannot read a request of thread %r", entry.thread_id)
            return None

        return None if request is None or request.record.erased else request

    async def undecided(self, after: str, limit: int) -> list[ApprovalRequest]:
        """Return a page of undecided requests after a cursor, oldest first.

        Entries on the way that are old are taken off the list.
        """
        page: list[ApprovalRequest] = []
        seen: set[tuple[str, int]] = set()

        for entry in await self.entries(after):
            if (entry.key, entry.number) in seen:
                continue

            seen.add((entry.key, entry.number))
            request = await self.of_entry(entry)

            if request is not None and request.decision is None:
                page.append(replace(request, cursor=entry.cursor))
            elif entry.is_old(None if request is None else request.decision):
                await self.end_entry(entry, "nothing acted on it")

            if len(page) == limit:
                break

        return page

    # Record

    async def create(
        self,
        key: str,
        number: int,
        thread_id: str,
        run_thread: str,
        tool: str,
        args: Mapping[str, JsonValue],
        expires_after: float | None,
    ) -> ApprovalRequest | None:
        """Record a request, or return the request that has this number.

        Returns ``None`` if the number is that of a withdrawn request with other
        arguments.
        """
        entry = _entry_call(key, number, thread_id, run_thread)

        # Record the entry first: without it, only the run that asked finds the request.
        listed = await self._attempts.issue(REQUESTS, entry)
        call = ToolCall(
            _call_id(key, number),
            APPROVAL,
            {
                "key": key,
                "tool": tool,
                "args": dict(args),
                "number": number,
                "run_thread": run_thread,
                "expires_after": expires_after,
            },
            request_key(key, number),
        )
        request = await self._issue(key, number, thread_id, call)

        # This entry may have ended long ago, if an earlier request with this number
        # was deleted with ``forget_keys``.
        if request is not None and _is_undecided(request) and not _is_open(listed):
            await self.list_for(request, run_thread)

        return request

    async def _issue(
        self, key: str, number: int, thread_id: str, call: ToolCall
    ) -> ApprovalRequest | None:
        """Record the call of a request; return the request that has its number."""
        attempts = self._attempts

        try:
            record = await attempts.issue(thread_id, call)

            if record is None and attempts.receipts is not None:
                return await self.get(key, number, thread_id)

            if record is None:
                # Issuing a recorded call again writes nothing and returns its record.
                record = await attempts.issue(thread_id, call)
        except CallMismatch:
            return await self.get(key, number, thread_id)

        return None if record is None else self.of(record)

    async def list_for(self, request: ApprovalRequest, run_thread: str) -> None:
        """List the request for a thread that waits for it, if it is not listed.

        An entry that ended cannot be opened again. If the request was recorded again
        after ``forget_keys``, or restored with its thread, it gets an entry with the
        next ``turn``.
        """
        key, number, thread_id = request.key, request.number, request.thread_id

        for turn in count(1):
            entry = _entry_call(key, number, thread_id, run_thread, turn)

            if _is_open(await self._attempts.issue(REQUESTS, entry)):
                return

    async def resolve(
        self, request: ApprovalRequest, decision: dict[str, JsonValue]
    ) -> ApprovalRequest:
        """Record a decision, and return the request as it is decided now."""
        record = await self._attempts.resolve(
            request.thread_id,
            request.record.call.call_id,
            decision,
            success=True,
        )

        try:
            # This wakes the watchers of the list. If it fails, the decision is still
            # on record.
            await self._attempts.cp.save_extra(REQUESTS, {"decided": request.key})
        except CheckpointerError:
            log.warning("could not wake the watchers of decisions", exc_info=True)

        return self.of(record) or request

    async def expire(self, request: ApprovalRequest) -> ApprovalRequest:
        """End a request that expired undecided, so that no late decision counts."""
        if request.record.status != "issued" or request.decision is None:
            return request

        try:
            return await self.resolve(request, {"approved": False, "expired": True})
        except UnknownCall:  # its thread was deleted with forget_keys
            return request

    async def acted_upon(self, plan: EffectPlan, number: int) -> None:
        """Take a request off the list: its run acted on the decision."""
        key, thread_id = plan.effect.key, plan.effect.thread_id

        for turn in count(1):
            call = _entry_call(key, number, thread_id, plan.thread_id, turn)

            # An entry with the next turn exists only if this one ended before. The last
            # one is unknown to the store, which ends the loop.
            if not await self._end(call.call_id, "acted upon"):
                return

    async def end_approved(self, key: str) -> None:
        """Take an effect's approved requests off the list: its run has an outcome."""
        for entry in await self.entries():
            if entry.key == key:
                request = await self.of_entry(entry)

                if request is not None and request.is_approved:
                    await self.end_entry(entry, "acted upon")

    async def end_entry(self, entry: Entry, why: str) -> None:
        """Take an entry off the list."""
        await self._end(entry.call_id, why)

    async def _end(self, call_id: str, why: str) -> bool:
        """End an entry; return whether it was ended or erased before this call.

        The random ``by`` tells this call's result from that of another one.
        """
        result: JsonValue = {"ended": why, "by": fresh_call_id()}

        try:
            record = await self._attempts.cp.record_result(REQUESTS, call_id, result)
        except CheckpointerError:
            # The entry stays on the list, until a worker ends it or it is old. Replays
            # do not end it: each of them would cost a write.
            log.debug("could not end the entry %r", call_id, exc_info=True)
            return False

        return record.result != result

    def of(self, record: CallRecord) -> ApprovalRequest | None:
        """Return the request of a record, with its link."""
        request = request_of(record)

        if request is None or self._ui is None:
            return request

        place = {"id": request.thread_id, "request": record.call.idempotency_key}
        return replace(request, link=f"{self._ui}/waiting/decide?{urlencode(place)}")


def request_of(record: CallRecord) -> ApprovalRequest | None:
    """Return the approval request of a record, or ``None`` for another call.

    Of an erased record, only the key and the number are known.
    """
    call = record.call

    if call.tool_name != APPROVAL:
        return None

    if record.erased:
        # As `_call_id` makes it. A key has no colon: it is a hash.
        _, _, named = call.call_id.partition(":")
        key, _, number = named.partition(":")
        return ApprovalRequest(
            key,
            record.thread_id,
            "",
            {},
            record.issued_at,
            record,
            int(number) if number.isdecimal() else 1,
        )

    match call.args:
        case {
            "key": str(key),
            "tool": str(tool),
            "args": dict(args),
            "number": int(nth),
            "run_thread": str(run_thread),
            "expires_after": int() | float() | None as seconds,
        }:
            return ApprovalRequest(
                key,
                record.thread_id,
                tool,
                args,
                record.issued_at,
                record,
                nth,
                None if seconds is None else _later(record.issued_at, seconds),
                run_thread,
            )

    return None


def _later(time: datetime, seconds: float) -> datetime | None:
    try:
        return time + timedelta(seconds=seconds)
    except OverflowError:  # after Python's last date: the request never expires
        return None


def _is_undecided(request: ApprovalRequest) -> bool:
    return request.decision is None and not request.record.erased


def decision_at(request: ApprovalRequest, now: datetime) -> Decision | None:
    """Return the decision that counts at the time ``now``."""
    record = request.record

    if record.status == "issued":
        if request.expires_at is not None and now >= request.expires_at:
            return Decision(request, "expired", at=request.expires_at)

        return None

    if record.status == "failed":
        return Decision(
            request,
            "withdrawn",
            at=record.resolved_at,
            reason="the request was withdrawn without a decision",
        )

    found = record.result if isinstance(record.result, dict) else {}
    verdict: Verdict = "denied"

    if found.get("approved") is True and not record.erased:
        # An approval counts only until the request expires, used or not. An approval
        # that the store recorded after that time never counts, even if the clock of
        # this process is behind.
        latest = max(now, record.resolved_at or now)
        expired = request.expires_at is not None and latest >= request.expires_at
        verdict = "expired" if expired else "approved"
    elif found.get("expired") is True:
        verdict = "expired"

    texts: dict[str, Any] = {
        name: value
        for name in ("by", "reason", "origin")
        if isinstance(value := found.get(name), str)
    }
    return Decision(request, verdict, at=record.resolved_at, **texts)


def _call_id(key: str, number: int) -> str:
    return f"approval:{key}" if number == 1 else f"approval:{key}:{number}"


def _is_open(entry: CallRecord | None) -> bool:
    """Return whether an entry is on the list; ``None`` is one just recorded."""
    return entry is None or (entry.status == "issued" and not entry.erased)


def _entry_call(
    key: str, number: int, thread_id: str, run_thread: str, turn: int = 1
) -> ToolCall:
    asker = sha256(run_thread.encode()).hexdigest()[:16]
    suffix = "" if turn == 1 else f":{turn}"
    return ToolCall(
        f"request:{key}:{number}:{asker}{suffix}",
        _ENTRY,
        {
            "key": key,
            "number": number,
            "thread_id": thread_id,
            "run_thread": run_thread,
        },
        entry_key(key, number, run_thread, turn),
    )


def _entry_of(record: CallRecord) -> Entry | None:
    match record.call.args:
        case {
            "key": str(key),
            "number": int(number),
            "thread_id": str(thread_id),
            "run_thread": str(run_thread),
        } if record.call.tool_name == _ENTRY:
            return Entry(
                record.call.call_id,
                key,
                number,
                thread_id,
                run_thread,
                record.issued_at,
            )

    return None
