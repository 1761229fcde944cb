"""Approvals of a run: whether an effect may run, and the wait for a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import inf

from cpkit.effects.effect import Approval, EffectPlan, Policy, call_callback, handling
from cpkit.effects.errors import (
    ApprovalExpired,
    ApprovalWithdrawn,
    EffectDenied,
    EffectErased,
    EffectTimeout,
    KeyReused,
)
from cpkit.effects.requests import ApprovalRequest, Requests, request_of
from cpkit.effects.tracing import log, note
from cpkit.lease import held_leases, note_effect
from cpkit.records import JsonValue
from cpkit.runs.waiting import RETRY_FOR, StaleDetector

__all__ = ["Approvals", "Notifier"]

Notifier = Callable[[ApprovalRequest], Awaitable[object] | object]
"""What an agent calls when an approval is requested: a function, sync or async."""

_ERRORS = {"expired": ApprovalExpired, "withdrawn": ApprovalWithdrawn}


class Approvals:
    """Asks for the approvals of a ledger's runs."""

    def __init__(
        self, requests: Requests, policy: Policy | None, notify: Notifier | None
    ) -> None:
        self._requests = requests
        self._attempts = requests.attempts
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

        request: ApprovalRequest | None = None

        while request is None:
            request = await self._request(plan, wanted.editable)

            if request.decision is None:
                request = await self._wait(plan, request)

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
        leases = held_leases(self._attempts.cp)
        thread_id = leases[0].thread_id if leases else plan.effect.thread_id
        return plan.options.run_thread or thread_id

    async def _wanted(self, plan: EffectPlan) -> Approval | None:
        """Return what a person must approve; ``None`` if the effect needs no approval.

        A ledger without a policy asks for none. But a recovered effect may be another
        ledger's: it needs an approval if that ledger asked for one.
        """
        wants: bool | Approval

        if self._policy is not None:
            wants = await call_callback(self._policy, plan.effect)
        else:
            key = plan.effect.key
            wants = plan.is_recovered and bool(await self._requests.all_of(key))

        if not isinstance(wants, Approval):
            return Approval() if wants else None

        # A person would change an argument that the handler does not read.
        if unknown := [one for one in wants.editable if one not in plan.effect.args]:
            raise ValueError(f"editable names {unknown}, which are not arguments")

        return wants

    async def _request(
        self, plan: EffectPlan, editable: Sequence[str]
    ) -> ApprovalRequest:
        """Return the newest request for exactly the plan's arguments, or record one.

        A withdrawn one counts for the runs that waited then, and no kept.
        """
        effect, run_thread = plan.effect, self._run_thread(plan)

        while True:
            found = await self._requests.all_of(effect.key)
            kept = [one for one in found if not one.is_gone]
            same = [one for one in kept if one.same_args(effect.args)]
            is_live = same and same[-1].verdict in ("undecided", "approved")

            # None follows a live request. Else an erased one may be its successor.
            if found and found[-1].record.erased and not is_live:
                status = found[-1].record.status
                raise EffectErased(effect.key, effect.tool, status, "approval")

            if plan.kind == "given" and len(same) < len(kept):
                raise KeyReused(effect.key, effect.tool)

            if same:
                await self._requests.list_for(same[-1], run_thread)
                return same[-1]

            asked: dict[str, JsonValue] = {
                "tool": effect.tool,
                "args": dict(effect.args),
                "expires_after": plan.options.expires_after,
                "run_thread": run_thread,
                "editable": [*editable],
            }
            place = effect.thread_id, effect.key, len(found) + 1

            if request := await self._requests.create(*place, asked):
                return request

    async def _wait(
        self, plan: EffectPlan, request: ApprovalRequest
    ) -> ApprovalRequest | None:
        """Notify people, and return the request once it has ended.

        ``None`` if it was deleted. Raises ``EffectTimeout``; from the notifier's error,
        if people could not be told before the deadline.
        """
        clock = asyncio.get_running_loop().time
        leases = held_leases(self._attempts.cp)
        limit = plan.options.approval_timeout

        if limit == "auto":
            # A handler's timeout would be recorded as the error of its effect.
            is_unattended = any(one.unattended for one in leases)
            limit = 0.0 if is_unattended and not handling.get() else None

        # A run that looks once does not wait for the end of a request.
        left = inf if limit == 0 else await self._requests.seconds_left(request)
        notify_at = clock()
        deadline = inf if limit is None else notify_at + limit
        expires = notify_at + left
        note_effect(leases, plan.key, "waiting")

        while True:
            if clock() >= notify_at:
                failure, is_told = await self._notify_once(plan, request)
                notify_at = inf if is_told else clock() + RETRY_FOR

            if clock() >= deadline:
                place, seconds = (request.key, request.tool), limit or 0.0
                raise EffectTimeout(*place, seconds, "an approval") from failure

            if clock() >= expires:
                ended = await self._requests.expire(request)
                break

            ends = min(deadline, expires, notify_at)

            try:
                async with asyncio.timeout_at(ends if ends < inf else None):
                    found = await self._attempts.wait_for(request.record, None)
            except TimeoutError:
                continue

            # Not a detector of silence: this wait has no holder.
            assert not isinstance(found, StaleDetector)
            ended = request_of(found)
            break

        note_effect(leases, plan.key, "running")
        # It may be erased now. Or it was forgotten, and the key is another request's.
        is_same = ended is not None and ended.record.call == request.record.call
        return ended if is_same else None

    async def _notify_once(
        self, plan: EffectPlan, request: ApprovalRequest
    ) -> tuple[Exception | None, bool]:
        """Call the notifier, once for a request in this process.

        Return its error, and whether people are told now: another run's notifier may
        still fail.
        """
        mark = request.record.call.call_id

        if mark in self._told:
            return None, False

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
            return exc, False

        return None, True
