"""Approvals: whether an effect may run, and what people decide.

Requests and decisions are in the store, so that they survive every process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from itertools import count
from math import inf

from cpkit.effects.attempts import Attempts
from cpkit.effects.effect import EffectPlan, Policy, call_callback
from cpkit.effects.errors import (
    ApprovalExpired,
    EffectDenied,
    EffectErased,
    EffectTimeout,
    KeyReused,
)
from cpkit.effects.requests import (
    ApprovalRequest,
    DecisionOptions,
    Requests,
    decision_at,
)
from cpkit.effects.tracing import Trail, log
from cpkit.errors import CheckpointerError, UnknownCall
from cpkit.lease import this_process
from cpkit.records import CallRecord, JsonValue
from cpkit.wakeups import Answer

__all__ = ["Approvals", "Notifier"]

Notifier = Callable[[ApprovalRequest], Awaitable[object] | object]
"""What an agent calls when an approval is requested: a function, sync or async."""


class Approvals:
    """Requests approvals for a ledger, and records decisions."""

    def __init__(
        self,
        attempts: Attempts,
        requests: Requests,
        policy: Policy | None,
        notify: Notifier | None,
    ) -> None:
        self._attempts = attempts
        self._requests = requests
        self._policy = policy
        self._notify = notify
        self._told: dict[tuple[str, int], bool] = {}
        """The requests that the notifier was called with; true once it finished."""

    # A run

    async def wait_until_approved(
        self, plan: EffectPlan, trail: Trail
    ) -> ApprovalRequest | None:
        """Return the request that allows the effect; ``None`` if none is needed.

        Raises ``EffectDenied``, ``EffectErased``, or ``EffectTimeout`` if no decision
        came within the plan's ``approval_timeout``. A timeout of 0 looks once.
        """
        if not await self._is_needed(plan):
            return None

        timeout = plan.approval_timeout
        clock = asyncio.get_running_loop().time
        deadline = inf if timeout is None else clock() + timeout
        request = await self._request(plan)

        while not request.is_approved:
            if request.decision is None:
                approved = await self._wait(request, trail, deadline, plan)
                request = approved or await self._request(plan)
            else:
                self._told.pop((request.key, request.number), None)
                await self._refuse(plan, request)
                request = await self._request(plan)

        self._told.pop((request.key, request.number), None)
        trail.note("approved")
        return request

    async def _is_needed(self, plan: EffectPlan) -> bool:
        """Return whether the effect needs an approval.

        A ledger without a policy asks for none. But a recovered effect may be another
        ledger's: it needs an approval if that ledger asked for one.
        """
        if self._policy is not None:
            return bool(await call_callback(self._policy, plan.effect))

        return plan.is_recovered and await self.newest(plan) is not None

    async def newest(self, plan: EffectPlan) -> ApprovalRequest | None:
        """Return the newest request for exactly the plan's arguments, if there is one.

        Withdrawn requests do not hide those that follow.
        """
        effect = plan.effect
        return await self.find(effect.key, effect.thread_id, effect.args, None)

    async def _request(self, plan: EffectPlan) -> ApprovalRequest:
        """Return the request that counts for exactly the plan's arguments.

        Without one, this records it.
        """
        effect = plan.effect
        newest: ApprovalRequest | None = None

        for number in count(1):
            request = await self._requests.get(effect.key, number, effect.thread_id)

            if request is None and newest is not None:
                return await self._after_gap(newest)

            was_recorded = request is not None

            if request is None:
                request = await self._requests.create(
                    effect.key,
                    number,
                    effect.thread_id,
                    plan.thread_id,
                    effect.tool,
                    effect.args,
                    plan.expires_after,
                )

            if request is None:  # a withdrawn one has this number
                continue

            if request.record.erased:
                status = request.record.status
                raise EffectErased(effect.key, effect.tool, status, "approval")

            if request.same_args(effect.args):
                if request.decision is None and was_recorded:
                    # It may not be listed for this thread: another thread asked, or
                    # the request was restored with its thread and without its entry.
                    await self._requests.list_for(request, plan.thread_id)

                # While a request is undecided or approved for good, none follows it.
                # An approval that expires may have been followed by a denial, and this
                # process's clock may be behind the one that saw it expire.
                if request.decision is None or (
                    request.is_approved and request.expires_at is None
                ):
                    return request

                newest = request
            elif plan.key_kind == "given":
                raise KeyReused(effect.key, effect.tool)

        raise AssertionError

    async def _after_gap(self, newest: ApprovalRequest) -> ApprovalRequest:
        """Return the newest request for the same arguments.

        The store does not find a withdrawn request, so its number looks free. Requests
        with higher numbers may follow it.
        """
        requests = await self._requests.all_of(newest.key, newest.thread_id)
        return [newest, *(one for one in requests if one.same_args(newest.args))][-1]

    async def _refuse(self, plan: EffectPlan, request: ApprovalRequest) -> None:
        """Raise: the request was denied, withdrawn, or expired.

        Return only if the clock was set back, so that the request has not expired.
        """
        effect = plan.effect
        request = await self._requests.expire(request)
        decision = request.decision

        if decision is None:
            return

        await self._requests.acted_upon(plan, request.number)
        error = ApprovalExpired if decision.verdict == "expired" else EffectDenied
        raise error(effect.key, effect.tool, decision.reason, decision.by)

    async def _wait(
        self, request: ApprovalRequest, trail: Trail, deadline: float, plan: EffectPlan
    ) -> ApprovalRequest | None:
        """Wait for a decision, and notify people of the request.

        Returns the request if it is approved for good, and otherwise ``None``: then the
        caller reads which request counts now, because another may have followed.

        If people could not be told before the deadline, ``EffectTimeout`` is raised
        from the notifier's error.
        """
        attempts = self._attempts
        clock = asyncio.get_running_loop().time
        notify_at = clock()
        failure: Exception | None = None

        waiting = attempts.waits.join(
            request.record.call.idempotency_key,
            request.record,
            attempts.cp,
            lambda: self._look(request),
            attempts.backoff,
            attempts.retry_timeout,
        )

        async with waiting as reader:
            while True:
                if clock() >= notify_at:
                    notify_at = clock() + attempts.retry_timeout
                    failure, told = None, False

                    try:
                        told = await self._notify_once(request, trail)
                    except Exception as exc:
                        tool = request.tool
                        log.exception("on_approval_required failed for %s", tool)
                        failure = exc

                if clock() >= deadline:
                    assert plan.approval_timeout is not None
                    raise EffectTimeout(
                        request.key, request.tool, plan.approval_timeout, "an approval"
                    ) from failure

                ends = min(deadline, clock() + _seconds_left(request))

                try:
                    found = await reader.wait(
                        _timeout(min(ends, inf if told else notify_at) - clock())
                    )
                except TimeoutError:
                    if request.decision is None:
                        continue

                    return None

                return self._approved(request, found)

    def _approved(
        self, request: ApprovalRequest, found: Answer
    ) -> ApprovalRequest | None:
        """Return what was found, if it approves the request's arguments for good."""
        seen = self._requests.of(found) if isinstance(found, CallRecord) else None

        if seen is None or not seen.is_approved or not seen.same_args(request.args):
            return None

        return seen if seen.expires_at is None else None

    async def _look(self, request: ApprovalRequest) -> CallRecord | None:
        found = await self._requests.get(request.key, request.number, request.thread_id)
        return None if found is None else found.record

    async def _notify_once(self, request: ApprovalRequest, trail: Trail) -> bool:
        """Call the notifier, once for this request in this process.

        Returns whether the notifier has finished. If it has not, or if its error is
        raised, the caller tries again after a while.
        """
        mark = request.key, request.number

        if mark in self._told:
            return self._told[mark]

        self._told[mark] = False
        trail.note("approval requested")

        try:
            if self._notify is not None:
                await call_callback(self._notify, request)
        except BaseException:
            self._told.pop(mark, None)
            raise

        self._told[mark] = True
        return True

    async def acted_upon(self, plan: EffectPlan, number: int) -> None:
        """Take a request off the list of open requests: its run has an outcome."""
        await self._requests.acted_upon(plan, number)

    @property
    def are_off(self) -> bool:
        """Whether this ledger asks for no approval."""
        return self._policy is None

    async def effect_ended(self, key: str) -> None:
        """Take the approved requests of a completed effect off the list."""
        try:
            await self._requests.end_approved(key)
        except CheckpointerError:
            # The outcome is on record. A worker that runs the thread ends them too.
            log.warning("could not end the requests of %r", key, exc_info=True)

    # People

    async def decide(
        self,
        key: str,
        thread_id: str | None,
        approved: bool,
        options: DecisionOptions,
    ) -> bool:
        """Record a decision; return whether the request is decided so now."""
        args, number = options.get("args"), options.get("number")
        origin = options.get("origin")
        decision: dict[str, JsonValue] = {
            "approved": approved,
            "by": options.get("by"),
            "reason": options.get("reason"),
            "origin": this_process() if origin is None else origin,
        }
        request = await self.find(key, thread_id, args, number)

        if request is None or request.record.erased:
            return False

        if request.decision is None:
            try:
                request = await self._requests.resolve(request, decision)
            except UnknownCall:  # its thread was deleted with forget_keys
                return False

            # What counts is the time of the record: the request may have expired since,
            # and a run may have used the approval before that.
            made = decision_at(request, request.record.resolved_at or datetime.now(UTC))
        else:
            made = (await self._requests.expire(request)).decision

        wanted = "approved" if approved else "denied"
        return made is not None and made.verdict == wanted

    async def find(
        self,
        key: str,
        thread_id: str | None,
        args: Mapping[str, JsonValue] | None,
        number: int | None,
    ) -> ApprovalRequest | None:
        """Return the request that a person means, or ``None``.

        That is the newest request with the given number and arguments. With neither, it
        is the newest one with the arguments of the effect's first request; then another
        undecided request raises ``ValueError``.
        """
        by_first = number is None and args is None
        requests = await self._requests.all_of(
            key, thread_id, until_open=by_first, past_withdrawn=number is None
        )

        if number is not None:
            requests = [one for one in requests if one.number == number]

        # With a number too: after ``forget_keys`` it may be that of another request.
        if args is not None:
            requests = [one for one in requests if one.same_args(args)]
        elif requests and number is None:
            first = requests[0]
            same = [one for one in requests if one.same_args(first.args)]

            # This is an error even if one later request alone is undecided: the person
            # may mean the first request, and another person just decided that one.
            if any(r.decision is None for r in requests if r not in same):
                raise ValueError(
                    f"{key!r} was requested with several sets of arguments; say with "
                    "args= which request is meant"
                )

            requests = same

        return requests[-1] if requests else None

    async def ask_again(
        self, key: str, args: Mapping[str, JsonValue] | None
    ) -> ApprovalRequest:
        """Record a new request in place of one that was closed without an approval."""
        request = await self.find(key, None, args, None)

        if request is None or request.record.erased:
            raise ValueError(f"there is no approval request for {key!r} to ask again")

        request = await self._requests.expire(request)

        if request.is_approved:
            raise ValueError(f"{key!r} is approved already, so there is nothing to ask")

        seconds: float | None = None

        if request.expires_at is not None:
            seconds = (request.expires_at - request.requested_at).total_seconds()

        number = request.number

        while request.decision is not None:
            requests = await self._requests.all_of(key)

            # Another process may have asked again, or for other arguments, meanwhile.
            for other in requests:
                if other.decision is None and other.same_args(request.args):
                    return other

            # Higher each time: a withdrawn request has its number, and is not found.
            number = max([number, *(one.number for one in requests)]) + 1
            again = await self._requests.create(
                key,
                number,
                request.thread_id,
                request.run_thread or request.thread_id,
                request.tool,
                request.args,
                seconds,
            )

            if again is not None and again.same_args(request.args):
                request = again

                # By a clock that is far ahead of the store's, it has expired already.
                if request.record.status == "issued":
                    break

        return request


def _seconds_left(request: ApprovalRequest) -> float:
    if request.expires_at is None:
        return inf

    return (request.expires_at - datetime.now(UTC)).total_seconds()


def _timeout(seconds: float) -> float | None:
    return None if seconds == inf else max(0.0, seconds)
