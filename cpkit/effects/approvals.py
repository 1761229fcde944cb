"""Approvals of a run: whether an effect may run, and the wait for a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from math import inf

from cpkit.effects.attempts import Attempts
from cpkit.effects.effect import (
    Approval,
    EffectPlan,
    Policy,
    call_callback,
    handling,
)
from cpkit.effects.errors import (
    ApprovalExpired,
    ApprovalWithdrawn,
    EffectDenied,
    EffectErased,
    EffectTimeout,
    KeyReused,
)
from cpkit.effects.requests import ApprovalRequest, Requests
from cpkit.effects.tracing import log, note
from cpkit.lease import held_leases, note_effect
from cpkit.waiting import RETRY_FOR, StaleDetector

__all__ = ["Approvals", "Notifier"]

Notifier = Callable[[ApprovalRequest], Awaitable[object] | object]
"""What an agent calls when an approval is requested: a function, sync or async."""

_ERRORS = {"expired": ApprovalExpired, "withdrawn": ApprovalWithdrawn}


class Approvals:
    """Asks for the approvals of a ledger's runs."""

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
        self._told: set[str] = set()
        """The call ids of the requests that the notifier was called with."""

    async def wait_until_approved(self, plan: EffectPlan) -> ApprovalRequest | None:
        """Return the request that allows the effect; ``None`` if none is needed.

        Raises ``EffectDenied``, ``EffectErased``, or ``EffectTimeout`` if no decision
        came within ``approval_timeout``. A timeout of 0 looks once.
        """
        wanted = await self._wanted(plan)

        if wanted is None:
            return None

        limit = plan.options.approval_timeout

        if limit == "auto":
            # A handler's timeout would be recorded as the error of its effect.
            leases = [] if handling.get() else held_leases(self._attempts.cp)
            limit = 0.0 if any(one.unattended for one in leases) else None

        clock = asyncio.get_running_loop().time
        deadline = inf if limit is None else clock() + limit

        while True:
            request = await self._request(plan, tuple(wanted.editable))

            if request.decision is None:
                ended = await self._wait(plan, request, deadline, limit or 0.0)

                if ended is None or ended.verdict != "withdrawn":
                    continue  # look again: is it the request that counts, in time?

                request = ended

            self._told.discard(request.record.call.call_id)

            if request.verdict == "approved":
                note(plan.effect, "approved")
                return request

            await self.settle(plan, request)
            made = request.decision
            assert made is not None
            error = _ERRORS.get(made.verdict, EffectDenied)
            raise error(plan.effect.key, plan.effect.tool, made.reason, made.by)

    async def settle(self, plan: EffectPlan, request: ApprovalRequest) -> None:
        """Take a request off the list of runs: this run acted on the decision."""
        await self._requests.settle(self._run_thread(plan), request)

    def _run_thread(self, plan: EffectPlan) -> str:
        """Return the thread to run after a decision: the main agent's, if it leases."""
        if plan.options.run_thread is not None:
            return plan.options.run_thread

        leases = held_leases(self._attempts.cp)
        return leases[0].thread_id if leases else plan.effect.thread_id

    async def _wanted(self, plan: EffectPlan) -> Approval | None:
        """Return what a person must approve; ``None`` if the effect needs no approval.

        A ledger without a policy asks for none. But a recovered effect may be another
        ledger's: it needs an approval if that ledger asked for one.
        """
        effect = plan.effect

        if self._policy is None:
            asked = plan.is_recovered and await self._requests.all_of(effect.key)
            return Approval() if asked else None

        wants = await call_callback(self._policy, effect)

        if not isinstance(wants, Approval):
            return Approval() if wants else None

        unknown = [name for name in wants.editable if name not in effect.args]

        if unknown:
            raise ValueError(
                f"editable names {', '.join(map(repr, unknown))}, which the arguments "
                f"of {effect.tool!r} do not have"
            )

        return wants

    async def _request(
        self, plan: EffectPlan, editable: tuple[str, ...]
    ) -> ApprovalRequest:
        """Return the request that counts for exactly the plan's arguments.

        Without one, this records it.
        """
        effect, expires_after = plan.effect, plan.options.expires_after
        run_thread = self._run_thread(plan)
        newest: ApprovalRequest | None = None

        for number in count(1):
            request = await self._requests.get(effect.key, number)

            if request is None and newest is not None:
                return newest

            if request is not None and request.same_args(effect.args):
                # Another run asked, or the request was restored with its thread.
                await self._requests.list_for(request, run_thread)

            while request is None:
                request = await self._requests.create(
                    effect, number, run_thread, expires_after, editable
                )

            if request.record.erased:
                if await self._requests.get(effect.key, number + 1) is not None:
                    continue  # it was asked again after this one

                status = request.record.status
                raise EffectErased(effect.key, effect.tool, status, "approval")

            if request.verdict == "withdrawn":
                continue  # it counts for the runs that waited then, and no others

            if request.same_args(effect.args):
                newest = request

                # While a request is undecided, or its approval counts, none follows.
                if request.decision is None or (
                    request.verdict == "approved" and self._requests.is_in_time(request)
                ):
                    return request
            elif plan.kind == "given":
                raise KeyReused(effect.key, effect.tool)

        raise AssertionError

    async def _wait(
        self,
        plan: EffectPlan,
        request: ApprovalRequest,
        deadline: float,
        limit: float,
    ) -> ApprovalRequest | None:
        """Wait until the request has ended, and notify people of it.

        Returns the request as it is then; ``None`` if it was deleted. Raises
        ``EffectTimeout``; if people could not be told before the deadline, from the
        notifier's error.
        """
        clock = asyncio.get_running_loop().time
        notify_at = clock()
        # A run that looks once does not wait for the end of a request.
        left = (
            await self._requests.seconds_left(request) if deadline > notify_at else inf
        )
        expires = clock() + left
        failure: Exception | None = None
        leases = held_leases(self._attempts.cp)
        note_effect(leases, plan.key, "waiting")

        async with self._attempts.wait_for(request.record, None) as reader:
            while True:
                if clock() >= notify_at:
                    failure = await self._notify_once(plan, request)
                    notify_at = clock() + RETRY_FOR

                if clock() >= deadline:
                    place = request.key, request.tool
                    raise EffectTimeout(*place, limit, "an approval") from failure

                if clock() >= expires:
                    found = await self._requests.expire(request)
                    break

                ends = min(deadline, expires, notify_at)

                try:
                    answer = await reader.wait(ends - clock())
                except TimeoutError:
                    continue

                # Not a detector of silence: this wait has no holder.
                assert not isinstance(answer, StaleDetector)
                found = self._requests.of(answer)
                break

        note_effect(leases, plan.key, "running")
        return found

    async def _notify_once(
        self, plan: EffectPlan, request: ApprovalRequest
    ) -> Exception | None:
        """Call the notifier, once for this request in this process; return its error.

        After an error it is called again by the next look of any run that waits.
        """
        mark = request.record.call.call_id

        if mark in self._told:
            return None

        self._told.add(mark)
        note(plan.effect, "approval requested")

        try:
            if self._notify is not None:
                await call_callback(self._notify, request)
        except BaseException as exc:
            self._told.discard(mark)

            if not isinstance(exc, Exception):
                raise

            log.exception("on_approval_required failed for %s", request.tool)
            return exc

        return None
