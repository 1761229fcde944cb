"""`EffectLedger`: runs each side effect once, however often it is requested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from cpkit.driver.backoff import Backoff
from cpkit.effects.approvals import ApprovalRequest, Approvals
from cpkit.effects.attempts import Attempts, delete_heartbeats
from cpkit.effects.claim import Claim
from cpkit.effects.effect import (
    Handler,
    Notifier,
    Policy,
    SupersededHook,
    Verify,
)
from cpkit.effects.errors import Superseded
from cpkit.effects.records import (
    Outcome,
    Scope,
    error_envelope,
    released_envelope,
    value_envelope,
)
from cpkit.effects.recovery import ResumeReport, resume_thread
from cpkit.effects.run import EffectRun, RunResult
from cpkit.effects.spec import (
    LEDGER_DEFAULT,
    EffectPlan,
    EffectSpec,
    LedgerDefault,
    LedgerSettings,
    plan_effect,
)
from cpkit.effects.tools import Tool
from cpkit.effects.tracing import Trail
from cpkit.errors import PayloadTooLarge, SerializationError
from cpkit.lease import Lease, thread_lease
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, JsonValue

__all__ = ["Begun", "EffectLedger"]


class Begun(NamedTuple):
    """What ``begin`` found: the key's record, and whether the caller must run it."""

    record: CallRecord
    fresh: bool


class EffectLedger:
    """Runs each side effect once, on any checkpointer.

    Approval
        ``requires_approval`` decides whether a person must approve an `Effect`. The
        ledger calls it before each claim and each takeover, but not for a replay.
        ``on_approval_required`` is called for each undecided request, at least once in
        each process that finds it. Its errors are logged.

    Waiting, in seconds
        ``timeout`` bounds the wait for another attempt's result, ``approval_timeout``
        the wait for a decision; ``None`` means without limit. A holder without a
        heartbeat for ``stale_after`` seconds is taken over; ``None``, the default,
        means never. Without ``verify``, a takeover runs the effect again: use it only
        if the handler passes the key downstream. ``heartbeat`` is the interval between
        the heartbeats of a long effect: a third of ``stale_after``, or 10.
        ``backoff`` sets the pauses between two looks at the store. ``patience`` bounds
        the retries of an operation whose answer was lost, and of recording an outcome
        while the store is away.

    Failures
        A handler's exception is the effect's final outcome. With ``release_failures``
        it frees the key for another attempt instead. `NoEffect` always does.

    ``max_payload`` bounds the arguments of one effect, in bytes of JSON.
    ``on_superseded(effect, record)`` is called if another process recorded an outcome
    for a run's attempt first. Callbacks may be sync or async. A sync callback runs in
    the event loop's thread and must not block.
    """

    def __init__(
        self,
        cp: Checkpointer[Any],
        *,
        requires_approval: Policy | None = None,
        on_approval_required: Notifier | None = None,
        on_superseded: SupersededHook | None = None,
        timeout: float | None = 30.0,
        approval_timeout: float | None = None,
        stale_after: float | None = None,
        heartbeat: float | None = None,
        backoff: Backoff | None = None,
        patience: float = 30.0,
        release_failures: bool = False,
        max_payload: int = 1024 * 1024,
    ) -> None:
        self.cp = cp
        self._attempts = Attempts(cp, backoff or Backoff(), patience)
        self._approvals = Approvals(
            self._attempts, requires_approval, on_approval_required
        )
        self._on_superseded = on_superseded
        self.settings = LedgerSettings(
            timeout=timeout,
            approval_timeout=approval_timeout,
            stale_after=stale_after,
            heartbeat=heartbeat,
            release_failures=release_failures,
            max_payload=max_payload,
        )
        self._running: set[str] = set()

    async def run(
        self,
        thread_id: str,
        tool: str,
        args: Mapping[str, JsonValue],
        handler: Handler,
        *,
        scope: Scope = "thread",
        key_fields: Sequence[str] | None = None,
        resource: JsonValue = None,
        idempotency_key: str | None = None,
        verify: Verify | None = None,
        timeout: float | None | LedgerDefault = LEDGER_DEFAULT,
        approval_timeout: float | None | LedgerDefault = LEDGER_DEFAULT,
        stale_after: float | None | LedgerDefault = LEDGER_DEFAULT,
        release_failures: bool | None = None,
        tool_call_id: str | None = None,
    ) -> JsonValue:
        """Return the effect's result: run it, wait for another run, or replay it.

        Scope, tool and arguments name the effect. Instead of all arguments, it can be
        named by the arguments in ``key_fields``, by a ``resource``, or by a given
        ``idempotency_key``. With scope ``"global"`` it is the same in every thread.
        Every caller that returns gets the recorded result, as JSON.

        ``handler`` is called with an `Effect`. It runs again only if it raised
        `NoEffect`, if ``verify`` said that the effect did not land, or if
        ``stale_after`` took over a stale holder. A takeover cannot stop a holder that
        is merely slow: pass ``effect.key`` downstream if that matters.

        The handler's own caller gets the handler's exception, and all other callers get
        ``EffectFailed``. Also raises ``EffectDenied``, ``EffectTimeout``,
        ``EffectErased``, ``KeyReused``, and what the store raises.
        """
        spec = EffectSpec(
            thread_id=thread_id,
            tool=tool,
            args=args,
            scope=scope,
            key_fields=key_fields,
            resource=resource,
            idempotency_key=idempotency_key,
            tool_call_id=tool_call_id,
            verify=verify,
            timeout=timeout,
            approval_timeout=approval_timeout,
            stale_after=stale_after,
            release_failures=release_failures,
        )
        plan = plan_effect(spec, self.settings)
        return (await self.execute(plan, handler)).value()

    async def begin(
        self,
        thread_id: str,
        tool: str,
        args: Mapping[str, JsonValue],
        *,
        scope: Scope = "thread",
        key_fields: Sequence[str] | None = None,
        resource: JsonValue = None,
        idempotency_key: str | None = None,
        approval_timeout: float | None | LedgerDefault = LEDGER_DEFAULT,
        tool_call_id: str | None = None,
    ) -> Begun:
        """Claim an effect that the caller runs itself; never wait for another holder.

        With a fresh record the caller must run the effect, and `commit` its outcome, or
        `release` the key if nothing happened. No heartbeats are written for it, so a
        ledger with ``stale_after`` takes it over after that time. Any other record
        holds the key, issued or completed.
        """
        spec = EffectSpec(
            thread_id=thread_id,
            tool=tool,
            args=args,
            scope=scope,
            key_fields=key_fields,
            resource=resource,
            idempotency_key=idempotency_key,
            tool_call_id=tool_call_id,
            approval_timeout=approval_timeout,
        )
        plan = plan_effect(spec, self.settings)

        with Trail(plan.effect, thread_id) as trail:
            return Begun(*await self._new_run(plan, trail).begin())

    async def commit(
        self,
        record: CallRecord,
        result: JsonValue = None,
        *,
        error: Exception | None = None,
    ) -> CallRecord:
        """Record the outcome of a begun effect: a result, or its final failure.

        Returns the stored record, also for a second commit of the same outcome. Raises
        ``Superseded`` with the winning record if another outcome is recorded. A result
        that JSON cannot hold is recorded as a final failure, and raised.
        """
        if error is not None:
            return await self._resolve(record, Outcome(error_envelope(error)))

        try:
            return await self._resolve(record, Outcome(value_envelope(result)))
        except (SerializationError, PayloadTooLarge) as exc:
            await self._resolve(record, Outcome(error_envelope(exc)))
            raise

    async def release(self, record: CallRecord, reason: str = "") -> CallRecord:
        """Free the key of an attempt that had no effect, so that it may run again.

        Raises ``Superseded`` if another outcome is recorded.
        """
        return await self._resolve(
            record, Outcome(released_envelope(reason), success=False)
        )

    def key(
        self,
        thread_id: str,
        tool: str,
        args: Mapping[str, JsonValue],
        *,
        scope: Scope = "thread",
        key_fields: Sequence[str] | None = None,
        resource: JsonValue = None,
        idempotency_key: str | None = None,
    ) -> str:
        """Return the key under which `run` records the effect."""
        spec = EffectSpec(
            thread_id=thread_id,
            tool=tool,
            args=args,
            scope=scope,
            key_fields=key_fields,
            resource=resource,
            idempotency_key=idempotency_key,
        )
        return plan_effect(spec, self.settings).effect.key

    async def find(self, key: str) -> CallRecord | None:
        """Return the completed record of a key, or ``None``.

        If the store keeps receipts, also an issued record that holds the key.
        """
        return await self._attempts.find_holder(key)

    async def pending(self, thread_id: str) -> list[ApprovalRequest]:
        """Return the thread's undecided approval requests, oldest first."""
        return await self._approvals.pending(thread_id)

    async def approve(
        self,
        thread_id: str,
        key: str,
        *,
        by: str | None = None,
        args: Mapping[str, JsonValue] | None = None,
    ) -> bool:
        """Approve a request; return whether the recorded decision is an approval.

        A request is decided once. ``False`` means that it was denied before, or that
        there is no such request. ``args`` selects the request if the key was requested
        with several sets of arguments; leaving it out is a ``ValueError`` then.
        """
        decision: dict[str, JsonValue] = {"approved": True, "by": by}
        return await self._approvals.decide(thread_id, key, decision, args)

    async def deny(
        self,
        thread_id: str,
        key: str,
        *,
        reason: str | None = None,
        by: str | None = None,
        args: Mapping[str, JsonValue] | None = None,
    ) -> bool:
        """Deny a request, finally; return whether the recorded decision is a denial.

        Once this returned ``True`` the effect never runs: every run of it raises
        ``EffectDenied``. ``args`` as for `approve`.
        """
        decision: dict[str, JsonValue] = {
            "approved": False,
            "by": by,
            "reason": reason,
        }
        return await self._approvals.decide(thread_id, key, decision, args)

    async def resume(
        self,
        thread_id: str,
        tools: Iterable[Tool],
        *,
        stale_after: float | None = None,
        lease: Lease | None = None,
    ) -> ResumeReport:
        """Recover the thread's pending calls after a crash.

        Resume is for the process that runs the thread. It takes the thread's lease, or
        uses the caller's ``lease``. Every pending call is then an orphan, except the
        calls that this ledger is running. With ``stale_after`` it takes no lease, and
        touches only calls without a heartbeat for that many seconds.

        The call of a read-only tool is discarded. For other tools, ``verify`` decides:
        if the effect landed, its result is recorded; if not, the key is freed. All
        other calls stay as they are, and the report shows them. Resume executes no tool
        and touches no approval request.

        Raises ``LeaseTimeout`` if another process runs the thread.
        """
        tools_by_name = {tool.name: tool for tool in tools}

        if lease is not None:
            await lease.check()

        held = (
            nullcontext()
            if lease is not None or stale_after is not None
            else thread_lease(self.cp, thread_id, timeout=self.settings.timeout)
        )

        async with held:
            return await resume_thread(
                self._attempts, thread_id, tools_by_name, self._running, stale_after
            )

    # For this package only

    async def execute(
        self, plan: EffectPlan, handler: Handler, *, wants_attempt: bool = True
    ) -> RunResult:
        """Run a planned effect, and return how it ended."""
        with Trail(plan.effect, plan.thread_id) as trail:
            result = await self._new_run(plan, trail).run(
                handler, wants_attempt=wants_attempt
            )
            error_type = result.error_type()

            if error_type is not None:
                trail.failed(error_type)

            return result

    def _new_run(self, plan: EffectPlan, trail: Trail) -> EffectRun:
        claim = Claim(self._attempts, self._approvals, plan, trail, self._running)
        return EffectRun(self._attempts, claim, plan, trail, self._on_superseded)

    async def _resolve(self, record: CallRecord, outcome: Outcome) -> CallRecord:
        """Record the outcome of a begun effect; raise ``Superseded`` if it lost."""
        call = record.call
        stored = await self._attempts.resolve(
            record.thread_id,
            call.call_id,
            outcome.result,
            success=outcome.success,
            retry_rejected=True,
        )

        if call.call_id in self._running:
            self._running.discard(call.call_id)
        else:
            # A person decides the attempt of another process, which may have written
            # heartbeats.
            await delete_heartbeats(self.cp, call.idempotency_key)

        if stored.erased or outcome.is_recorded_in(stored):
            return stored

        winner = await self.cp.find_completed(call.idempotency_key)
        raise Superseded(call.idempotency_key, winner or stored)
