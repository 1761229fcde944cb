"""Approvals of a run: whether an effect may run, and the wait for a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from math import inf
from typing import Any

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
from cpkit.effects.tracing import Trail, log
from cpkit.lease import held_leases
from cpkit.records import CallRecord
from cpkit.waiting import RETRY_FOR

__all__ = ["Approvals", "Notifier"]

Notifier = Callable[[ApprovalRequest], Awaitable[object] | object]
"""What an agent calls when an approval is requested: a function, sync or async."""


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
        self._told: dict[str, bool] = {}
        """The requests (by call id) that the notifier was called with; true once it
        finished."""

    async def wait_until_approved(
        self, plan: EffectPlan, trail: Trail
    ) -> ApprovalRequest | None:
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
            made = request.decision

            if made is None:
                await self._wait(request, trail, deadline, limit)
                continue

            self._told.pop(request.record.call.call_id, None)

            if made.is_approved:
                trail.note("approved")
                return request

            await self.settle(plan, request)
            error = ApprovalExpired if made.verdict == "expired" else EffectDenied
            raise error(plan.effect.key, plan.effect.tool, made.reason, made.by)

    async def settle(self, plan: EffectPlan, request: ApprovalRequest) -> None:
        """Take a request off the list of runs: this run acted on the decision."""
        await self._requests.settle(self._run_thread(plan), request)

    def _run_thread(self, plan: EffectPlan) -> str:
        """Return the thread to run after a decision: the main agent's, if it leases."""
        if plan.options.run_thread is not None:
            return plan.options.run_thread

        leases = held_leases(self._attempts.cp)
        return leases[0].thread_id if leases else plan.thread_id

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
                status = request.record.status
                raise EffectErased(effect.key, effect.tool, status, "approval")

            if request.same_args(effect.args):
                newest = request

                # While a request is undecided or approved for good, none follows it.
                if request.decision is None or (
                    request.is_approved and request.expires_after is None
                ):
                    return request
            elif plan.kind == "given":
                raise KeyReused(effect.key, effect.tool)

        raise AssertionError

    async def _wait(
        self,
        request: ApprovalRequest,
        trail: Trail,
        deadline: float,
        limit: float | None,
    ) -> None:
        """Wait until the request has changed, and notify people of it.

        Raises ``EffectTimeout``; if people could not be told before the deadline, from
        the notifier's error. Raises ``ApprovalWithdrawn``.
        """
        attempts, record = self._attempts, request.record
        own = record.call.idempotency_key
        clock = asyncio.get_running_loop().time
        notify_at = clock()
        # No wall clock ends a request: this process has watched it for so long.
        expires = notify_at + (request.expires_after or inf)
        failure: Exception | None = None
        leases = held_leases(attempts.cp)

        for lease in leases:
            lease.effects[trail.key] = "waiting"

        async with attempts.waits.join(
            own, record, attempts.cp, lambda: attempts.find(own)
        ) as reader:
            while True:
                if clock() >= notify_at:
                    failure, told = await self._notify_once(request, trail)
                    notify_at = inf if told else clock() + RETRY_FOR

                if clock() >= deadline:
                    assert limit is not None
                    raise EffectTimeout(
                        request.key, request.tool, limit, "an approval"
                    ) from failure

                if clock() >= expires:
                    await self._requests.expire(request)
                    break

                ends = min(deadline, expires, notify_at)

                try:
                    found = await reader.wait(None if ends == inf else ends - clock())
                except TimeoutError:
                    continue

                if await self._is_withdrawn(request, found):
                    raise ApprovalWithdrawn(request.key, request.tool)

                break

        for lease in leases:
            lease.effects[trail.key] = "running"

    async def _is_withdrawn(self, request: ApprovalRequest, found: Any) -> bool:
        """Tell whether a person withdrew the request for which this run waited."""
        call_id = request.record.call.call_id
        calls: list[CallRecord] = [found]

        if not isinstance(found, CallRecord) or found.call.call_id != call_id:
            calls = await self._attempts.cp.list_calls(request.thread_id)

        return any(
            one.call.call_id == call_id and one.status == "failed" for one in calls
        )

    async def _notify_once(
        self, request: ApprovalRequest, trail: Trail
    ) -> tuple[Exception | None, bool]:
        """Call the notifier, once for this request in this process.

        Returns its error, and whether it has finished. If it has not, the caller tries
        again after a while.
        """
        mark = request.record.call.call_id

        if mark in self._told:
            return None, self._told[mark]

        self._told[mark] = False
        trail.note("approval requested")

        try:
            if self._notify is not None:
                await call_callback(self._notify, request)
        except BaseException as exc:
            del self._told[mark]

            if not isinstance(exc, Exception):
                raise

            log.exception("on_approval_required failed for %s", request.tool)
            return exc, False

        self._told[mark] = True
        return None, True
