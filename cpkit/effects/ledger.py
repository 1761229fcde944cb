"""`EffectLedger`: runs each side effect once, however often it is requested."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

from cpkit.driver.backoff import Backoff
from cpkit.driver.ids import check_id
from cpkit.effects.approvals import Approvals, Notifier
from cpkit.effects.attempts import Attempts, delete_heartbeats
from cpkit.effects.claim import Claim
from cpkit.effects.effect import (
    GLOBAL_THREAD,
    ClaimOptions,
    EffectName,
    EffectOptions,
    EffectPlan,
    EffectSpec,
    Handler,
    LedgerSettings,
    Policy,
    SupersededHook,
    call_callback,
    check_callback,
    plan_effect,
)
from cpkit.effects.errors import Superseded
from cpkit.effects.records import (
    Outcome,
    error_envelope,
    released_envelope,
    value_envelope,
)
from cpkit.effects.recovery import (
    RecoverReport,
    Resumed,
    ResumeReport,
    by_name,
    resume_thread,
    run_released,
    under_lease,
)
from cpkit.effects.requests import (
    ApprovalRequest,
    Decision,
    DecisionOptions,
    Requests,
)
from cpkit.effects.run import EffectRun, RunResult
from cpkit.effects.tools import Tool, ToolOutcome
from cpkit.effects.tracing import Trail, log
from cpkit.errors import PayloadTooLarge, SerializationError
from cpkit.lease import Lease
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, JsonValue
from cpkit.terms import WaitHook
from cpkit.waiting import check_interval, check_limit

__all__ = ["Begun", "EffectLedger"]

_HEARTBEAT = 10.0
"""Seconds between heartbeats of a ledger without ``heartbeat`` and ``stale_after``."""

Heal = Callable[[Checkpointer[Any], str, RecoverReport], Awaitable[object] | object]
"""Closes what a crash left open in the conversation of a recovered thread."""


class Begun(NamedTuple):
    """What ``begin`` found: the key's record, and whether the caller must run it."""

    record: CallRecord
    fresh: bool


class EffectLedger:
    """Runs each side effect once, on any checkpointer.

    Approval
        ``requires_approval`` decides whether a person must approve an `Effect`. The
        ledger calls it before each claim and each takeover, but not for a replay.
        ``on_approval_required`` is called with each undecided `ApprovalRequest`, at
        least once in each process that finds it. Its errors are logged. ``ui`` is the
        address of ``cpkit ui``, for the request's ``link``. A request expires if it
        is undecided, or approved and not used, ``expires_after`` seconds after it was
        recorded. Its run then raises `ApprovalExpired`.

    Waiting, in seconds
        ``timeout`` bounds the wait for another attempt's result, ``approval_timeout``
        the wait for a decision; ``None`` means without limit. A holder without a
        heartbeat for ``stale_after`` seconds is taken over; ``None``, the default,
        means never. Without ``verify``, a takeover runs the effect again: use it only
        if the handler passes the key downstream. ``heartbeat`` is the interval between
        the heartbeats of a long effect: a third of ``stale_after``, or 10. If the store
        answers later than half of it, the run reads its record again before the handler
        starts.
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
        ui: str | None = None,
        timeout: float | None = 30.0,
        approval_timeout: float | None = None,
        expires_after: float | None = None,
        stale_after: float | None = None,
        heartbeat: float | None = None,
        backoff: Backoff | None = None,
        patience: float = 30.0,
        release_failures: bool = False,
        max_payload: int = 1024 * 1024,
    ) -> None:
        for name, callback, *parameters in (
            ("requires_approval", requires_approval, "effect"),
            ("on_approval_required", on_approval_required, "request"),
            ("on_superseded", on_superseded, "effect", "record"),
        ):
            if callback is not None:
                check_callback(name, callback, *parameters)

        check_limit("patience", patience)
        self.cp = cp
        self._attempts = Attempts(cp, backoff or Backoff(), patience)
        self._requests = Requests(self._attempts, ui)
        self._approvals = Approvals(
            self._attempts, self._requests, requires_approval, on_approval_required
        )
        self._on_superseded = on_superseded
        self.settings = LedgerSettings(
            timeout=timeout,
            approval_timeout=approval_timeout,
            expires_after=expires_after,
            stale_after=stale_after,
            heartbeat=heartbeat,
            release_failures=release_failures,
            max_payload=max_payload,
        )
        self._running: set[str] = set()

        if timeout is not None and stale_after is not None and timeout <= stale_after:
            log.warning(
                "timeout=%g ends each wait before stale_after=%g: no waiting run takes "
                "over from a holder that died",
                timeout,
                stale_after,
            )

    async def run(
        self,
        thread_id: str,
        tool: str,
        args: Mapping[str, JsonValue],
        handler: Handler,
        **options: Unpack[EffectOptions],
    ) -> JsonValue:
        """Return the effect's result: run it, wait for another run, or replay it.

        Scope, tool and arguments name the effect. Instead of all arguments, it can be
        named by the arguments in ``key_fields``, by a ``resource``, or by a given
        ``idempotency_key``. With scope ``"global"`` it is the same in every thread.
        Every caller that returns gets the recorded result, as JSON. `EffectOptions` has
        all keywords.

        ``handler`` is called with an `Effect`. It runs again only if it raised
        `NoEffect`, if ``verify`` said that the effect did not land, or if
        ``stale_after`` took over a stale holder. A takeover cannot stop a holder that
        is merely slow: pass ``effect.key`` downstream if that matters.

        The handler's own caller gets the handler's exception, and all other callers get
        ``EffectFailed``. Also raises ``EffectDenied``, ``EffectTimeout``,
        ``EffectErased``, ``KeyReused``, and what the store raises. A handler or an
        option that cannot be used is a ``TypeError`` or ``ValueError``, and nothing is
        recorded.
        """
        check_callback("handler", handler, "effect")
        spec = EffectSpec(thread_id=thread_id, tool=tool, args=args, **options)
        plan = plan_effect(spec, self.settings)
        return (await self.execute(plan, handler)).value()

    async def begin(
        self,
        thread_id: str,
        tool: str,
        args: Mapping[str, JsonValue],
        **options: Unpack[ClaimOptions],
    ) -> Begun:
        """Claim an effect that the caller runs itself; never wait for another holder.

        With a fresh record the caller must run the effect, and `commit` its outcome, or
        `release` the key if nothing happened. No heartbeats are written for it, so a
        ledger with ``stale_after`` takes it over after that time. Any other record
        holds the key, issued or completed.
        """
        spec = EffectSpec(thread_id=thread_id, tool=tool, args=args, **options)
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

        Returns the stored record, also for a second commit of the same outcome. If the
        attempt was released meanwhile, and no other attempt holds the key, the outcome
        is that of a new attempt: the effect has happened. Raises ``Superseded`` with
        the winning record if another attempt or another outcome won. A result
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
        **options: Unpack[EffectName],
    ) -> str:
        """Return the key under which `run` records the effect."""
        spec = EffectSpec(thread_id=thread_id, tool=tool, args=args, **options)
        return plan_effect(spec, self.settings).effect.key

    async def find(self, key: str) -> CallRecord | None:
        """Return the completed record of a key, or ``None``.

        If the store keeps receipts, also an issued record that holds the key.
        """
        return await self._attempts.find_holder(key)

    # Approvals

    async def requests(
        self, *, after: str = "", limit: int = 100
    ) -> list[ApprovalRequest]:
        """Return a page of the store's undecided approval requests, oldest first.

        They are of all threads. Pass the last request's ``cursor`` as ``after`` to get
        the next page; the last page is empty. No messages are read.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit!r}")

        return await self._requests.undecided(after, limit)

    async def pending(self, thread_id: str) -> list[ApprovalRequest]:
        """Return the thread's undecided approval requests, oldest first."""
        return await self._requests.of_thread(thread_id)

    async def approve(
        self, *thread_and_key: str, **options: Unpack[DecisionOptions]
    ) -> bool:
        """Approve a request: ``approve(key)``, or ``approve(thread_id, key)``.

        Returns whether the recorded decision is an approval that counts. A request is
        decided once: ``False`` means that it was denied or has expired before, or that
        there is no such request. `decision` then says by whom. `DecisionOptions` has
        all keywords, for instance ``by`` and ``reason``.
        """
        return await self._decide(thread_and_key, True, options)

    async def deny(
        self, *thread_and_key: str, **options: Unpack[DecisionOptions]
    ) -> bool:
        """Deny a request; return whether the recorded decision is a denial.

        Once this returned ``True``, every run of the effect raises ``EffectDenied``
        until `ask_again` reopens the request. The parameters are those of `approve`.
        """
        return await self._decide(thread_and_key, False, options)

    async def decision(
        self,
        key: str,
        *,
        args: Mapping[str, JsonValue] | None = None,
        number: int | None = None,
    ) -> Decision | None:
        """Return the decision on an effect's request: by whom, when, why, from where.

        ``None`` if the request is undecided, or does not exist. ``args`` and
        ``number`` select a request as in `approve`.
        """
        request = await self._approvals.find(key, None, args, number)
        return None if request is None else request.decision

    async def ask_again(
        self, key: str, *, args: Mapping[str, JsonValue] | None = None
    ) -> ApprovalRequest:
        """Request an approval again that was denied, withdrawn, or has expired.

        The new request has the next number, and is undecided. An undecided request is
        returned as it is. Raises ``ValueError`` if there is no request, or if it is
        approved. ``args`` selects a request as in `approve`.
        """
        return await self._approvals.ask_again(key, args)

    async def _decide(
        self, thread_and_key: tuple[str, ...], approved: bool, options: DecisionOptions
    ) -> bool:
        if not 1 <= len(thread_and_key) <= 2:
            raise TypeError(
                f"give a key, or a thread and a key, not {thread_and_key!r:.80}"
            )

        *thread, key = thread_and_key
        thread_id = thread[0] if thread else None
        return await self._approvals.decide(
            check_id("key", key), thread_id, approved, options
        )

    # After a crash

    async def resume(
        self,
        thread_id: str,
        tools: Iterable[Tool],
        *,
        stale_after: float | None = None,
        lease: Lease | None = None,
        on_wait: WaitHook | None = None,
    ) -> ResumeReport:
        """Recover the thread's pending calls after a crash.

        Resume is for the process that runs the thread. It takes the thread's lease, or
        uses the given ``lease``, or the one that the current task holds. Every pending
        call is then an orphan, except the calls that this ledger is running. With
        ``stale_after`` it takes no lease, and touches only calls without a heartbeat
        for that many seconds. The lease says nothing about the calls of
        ``cpkit:global``: there, also without ``stale_after``, only those are touched
        that have no heartbeat for the ledger's ``stale_after``, or for three intervals
        of 10 seconds, or of the ledger's ``heartbeat`` if that is longer.

        The call of a read-only tool is discarded. For other tools, ``verify`` decides:
        if the effect landed, its result is recorded; if not, the key is freed. All
        other calls stay as they are, and the report shows them. Resume executes no tool
        and touches no approval request.

        ``on_wait`` is called with a `LeaseWait` when this begins to wait for another
        process. Raises ``LeaseTimeout`` if another process runs the thread, and
        ``LeaseLost`` if the lease was lost before the calls were read.
        """
        named = by_name(tools)

        if stale_after is not None:
            check_interval("stale_after", stale_after)

        wants_lease = stale_after is None
        stale_after = stale_after or self._stale_global(thread_id)

        async with self._lease(thread_id, lease, on_wait, wants_lease) as held:
            return await resume_thread(
                self._attempts, thread_id, named, self._running, stale_after, held
            )

    async def recover(
        self,
        thread_id: str,
        tools: Iterable[Tool],
        *,
        lease: Lease | None = None,
        on_wait: WaitHook | None = None,
        heal: Heal | None = None,
    ) -> RecoverReport:
        """Do all that a thread needs after a crash of its run, under its lease.

        For each pending call this does what `resume` does: it asks the tool's
        ``verify``. If nothing happened, it runs the call again, through its tool,
        before it goes on to the next call. Last it calls ``heal(cp, thread_id,
        report)``, which can close tool calls that the conversation left open.
        ``surfaced`` calls are for a person, and effects that need an undecided approval
        are reported, not waited for. A ledger without ``requires_approval``, for
        instance that of ``cpkit recover``, runs no call whose approval request is
        undecided, denied or expired. Of ``cpkit:global``, only calls without a
        heartbeat are touched, as in `resume`.

        After a crash or an error of the store, recover again: the calls not reached yet
        are still pending. A call that was just released, and not yet claimed again, is
        not: its key is free, and only a new request of the agent runs it.

        While another process holds the lease, the log says at once for whom this waits
        and how long, and ``on_wait`` is called with a `LeaseWait`. A lease that the
        current task holds is used; pass another task's as ``lease``.

        Raises ``LeaseTimeout`` if another process runs the thread, and ``LeaseLost`` if
        the lease was lost before the calls were read.
        """
        if heal is not None:
            check_callback("heal", heal, "cp", "thread_id", "report")

        named = by_name(tools)
        outcomes: list[tuple[Resumed, ToolOutcome]] = []

        async def run(call: Resumed) -> None:
            outcome = await run_released(self, thread_id, named, call)

            if outcome is not None:
                outcomes.append((call, outcome))

        async with self._lease(thread_id, lease, on_wait) as held:
            stale_after = self._stale_global(thread_id)
            report = await resume_thread(
                self._attempts, thread_id, named, self._running, stale_after, held, run
            )
            recovered = RecoverReport(thread_id, report.calls, tuple(outcomes))

            if heal is None:
                return recovered

            healed = await call_callback(heal, self.cp, thread_id, recovered)
            return replace(recovered, healed=healed)

    def _stale_global(self, thread_id: str) -> float | None:
        """Return after how long a call of the global thread counts as an orphan.

        Runs of any thread have calls in it, and no run holds its lease.
        """
        if thread_id != GLOBAL_THREAD:
            return None

        settings = self.settings
        return settings.stale_after or 3 * max(settings.heartbeat or 0, _HEARTBEAT)

    def _lease(
        self,
        thread_id: str,
        lease: Lease | None,
        on_wait: WaitHook | None,
        wants_lease: bool = True,
    ) -> AbstractAsyncContextManager[Lease | None]:
        timeout = self.settings.timeout
        return under_lease(self.cp, thread_id, lease, wants_lease, timeout, on_wait)

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
        stored = await self._attempts.close(
            record, outcome.result, success=outcome.success, retry_rejected=True
        )

        is_own = call.call_id in self._running

        if is_own:
            self._running.discard(call.call_id)
        else:
            # A person decides the attempt of another process, which may have written
            # heartbeats.
            await delete_heartbeats(self.cp, call.idempotency_key)

        if stored.status == "completed" and not (is_own and self._approvals.are_off):
            await self._approvals.effect_ended(call.idempotency_key)

        if stored.erased or outcome.is_recorded_in(stored):
            return stored

        winner = await self.cp.find_completed(call.idempotency_key)
        raise Superseded(call.idempotency_key, winner or stored)
