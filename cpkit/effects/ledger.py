"""`EffectLedger`: runs each side effect once, however often it is requested."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Unpack

from cpkit.effects.approvals import Approvals, Notifier
from cpkit.effects.attempts import Heartbeat, delete_heartbeats
from cpkit.effects.effect import (
    EffectOptions,
    EffectPlan,
    Handler,
    Options,
    Policy,
    call_callback,
    check_callback,
    plan_effect,
)
from cpkit.effects.errors import EffectTimeout, Superseded
from cpkit.effects.people import ForPeople
from cpkit.effects.records import (
    Outcome,
    error_envelope,
    outcome_of,
    released_envelope,
)
from cpkit.effects.recovery import (
    RecoverReport,
    resume_thread,
)
from cpkit.effects.run import EffectRun, RunResult
from cpkit.effects.similar import Similar
from cpkit.effects.tools import Tool, ToolOutcome, ToolRegistry, run_recorded
from cpkit.effects.tracing import Trail, log
from cpkit.errors import BackendUnavailable
from cpkit.lease import Lease, WaitHook, held_leases, note_effect, thread_lease
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, JsonValue

__all__ = ["Begun", "EffectLedger"]

Heal = Callable[[Checkpointer[Any], str, RecoverReport], Awaitable[object] | object]
"""Closes what a crash left open in the conversation of a recovered thread."""


class Begun(NamedTuple):
    """What ``begin`` found: the key's record, and whether the caller must run it."""

    record: CallRecord
    fresh: bool


class EffectLedger(ForPeople):
    """Runs each side effect once, on any checkpointer that keeps receipts.

    ``requires_approval`` decides whether a person must approve an `Effect`: it answers
    a bool, or an `Approval`. The ledger calls it before each claim and each takeover,
    but not for a replay. ``on_approval_required`` is called with each undecided
    `ApprovalRequest`, at least once in each process that finds it. Its errors are
    logged. ``ui`` is the address of ``cpkit ui``, for the request's ``link``.

    The other options are `Options`; each of them is the default for the same option of
    `run`. Callbacks may be sync or async. A sync callback runs in the event loop's
    thread and must not block.

    A store without ``KeepsReceipts`` is a ``TypeError``.
    """

    make_run: ClassVar[type[EffectRun]] = EffectRun

    def __init__(
        self,
        cp: Checkpointer[Any],
        *,
        requires_approval: Policy | None = None,
        on_approval_required: Notifier | None = None,
        ui: str | None = None,
        **options: Unpack[EffectOptions],
    ) -> None:
        for name, callback, parameter in (
            ("requires_approval", requires_approval, "effect"),
            ("on_approval_required", on_approval_required, "request"),
        ):
            if callback is not None:
                check_callback(name, callback, parameter)

        super().__init__(cp, ui)
        self.options = Options(**options)
        self._approvals = Approvals(
            self._attempts, self._requests, requires_approval, on_approval_required
        )
        self._begun: dict[str, tuple[Heartbeat, list[Lease], str]] = {}
        self._similar = Similar()
        timeout, stale_after = self.options.timeout, self.options.stale_after

        if timeout is not None and stale_after is not None and timeout <= stale_after:
            log.warning(
                "timeout=%g ends each wait before stale_after=%g: no waiting run takes "
                "over; give a longer timeout",
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

        Thread, tool and arguments name the effect; see `Options`. Every caller that
        returns gets the recorded result, as JSON. ``handler`` is called with an
        `Effect`. It runs again only if it raised `NoEffect`, if ``verify`` or a person
        said that the effect did not land, or if ``stale_after`` took over a silent
        holder, which may be merely slow: pass ``effect.key`` downstream then.

        The handler's own caller gets the handler's exception, and all other callers get
        ``EffectFailed``. Also raises ``EffectDenied``, ``EffectTimeout``,
        ``EffectErased``, ``KeyReused``, and what the store raises; ``TypeError`` or
        ``ValueError`` for a handler or option that cannot be used, before anything is
        recorded; ``RuntimeError`` for an effect inside its own handler.
        """
        check_callback("handler", handler, "effect")
        plan = plan_effect(thread_id, tool, args, self.options.merged(options))
        return (await self.execute(plan, handler)).value()

    async def begin(
        self,
        thread_id: str,
        tool: str,
        args: Mapping[str, JsonValue],
        **options: Unpack[EffectOptions],
    ) -> Begun:
        """Claim an effect that the caller runs itself; never wait for another holder.

        With a fresh record the caller runs the effect, and calls `commit`, or `release`
        if nothing happened. Until then this process writes heartbeats. Any other record
        holds the key. Pass the options of `run`, so that the key is the same.
        """
        plan = plan_effect(thread_id, tool, args, self.options.merged(options))

        with Trail(plan.effect, thread_id) as trail:
            run = self.make_run(self._attempts, self._approvals, plan, trail)
            record, heartbeat = await run.begin()

        if heartbeat is not None:
            leases = held_leases(self.cp)
            self._begun[record.call.call_id] = heartbeat, leases, plan.effect.key
            note_effect(leases, plan.effect.key, "running")

        return Begun(record, heartbeat is not None)

    async def commit(
        self,
        record: CallRecord,
        result: JsonValue = None,
        *,
        error: Exception | None = None,
    ) -> CallRecord:
        """Record the outcome of a begun effect: a result, or its final failure.

        Returns the stored record, also for a second commit of the same outcome. If the
        attempt was released meanwhile, and its key is free, the outcome is that of a
        new attempt. Raises ``Superseded`` if another attempt or another outcome won. A
        result that JSON cannot hold is recorded as a final failure, and raised.
        """
        outcome = outcome_of(result)

        if error is not None:
            outcome = Outcome(error_envelope(error))

        return await self._end(record, outcome)

    async def release(self, record: CallRecord, reason: str = "") -> CallRecord:
        """Free the key of an attempt that had no effect, so that it may run again.

        Raises ``Superseded`` if another outcome is recorded.
        """
        return await self._end(
            record, Outcome(released_envelope(reason), success=False)
        )

    def key(
        self,
        thread_id: str,
        tool: str,
        args: Mapping[str, JsonValue],
        **options: Unpack[EffectOptions],
    ) -> str:
        """Return the key under which `run` with these options records the effect."""
        merged = self.options.merged(options)
        return plan_effect(thread_id, tool, args, merged).effect.key

    async def find(self, key: str) -> CallRecord | None:
        """Return the issued or completed record of an effect, or ``None``."""
        _, record = await self._attempts.newest(key)
        return record

    # After a crash

    async def resume(
        self,
        thread_id: str,
        tools: Iterable[Tool],
        *,
        stale_after: float | None = None,
        on_wait: WaitHook | None = None,
    ) -> RecoverReport:
        """Find out how the thread's pending calls ended whose process is gone.

        A call is an orphan only if its own holder was silent: the lease under which it
        ran was taken over, or this has watched it for ``stale_after`` seconds (15, and
        never less than its run asked for). The log says so, and ``on_wait`` is called
        with a `CallsWait`. Calls that this process runs are alive.

        An orphan of a read-only tool is discarded. Of another tool, ``verify`` decides:
        its result is recorded, or its key is freed. All other calls stay as they are.
        Resume executes no tool, takes no lease, and touches no approval request.
        """
        named = ToolRegistry(self, tools)
        return await resume_thread(
            self._attempts, thread_id, named, stale_after, on_wait
        )

    async def recover(
        self,
        thread_id: str,
        tools: Iterable[Tool],
        *,
        lease: Lease | None = None,
        stale_after: float | None = None,
        on_wait: WaitHook | None = None,
        heal: Heal | None = None,
    ) -> RecoverReport:
        """Do all that a thread needs after a crash of its run, under its lease.

        For each pending call this does what `resume` does, and runs it again through
        its tool if nothing happened, before the next call. Last it calls ``heal(cp,
        thread_id, report)``, which can close tool calls that the conversation left
        open. ``surfaced`` calls are for a person, and effects that need an undecided
        approval are reported, not waited for. A ledger without ``requires_approval``
        runs no call whose approval request is not approved.

        After a crash or an error of the store, recover again. A call that was released
        and not yet claimed again is not pending: a new request of the agent runs it.

        A lease under which the current task runs is used; pass another task's as
        ``lease``. While another process holds it, ``on_wait`` is called with a
        `LeaseWait`. Raises ``LeaseTimeout`` if another process runs the thread, and
        ``LeaseLost`` if the lease was lost before the calls were read.
        """
        if heal is not None:
            check_callback("heal", heal, "cp", "thread_id", "report")

        named = ToolRegistry(self, tools)

        async def run(record: CallRecord) -> ToolOutcome | None:
            tool = named[record.call.tool_name]
            return await run_recorded(self, self._attempts, thread_id, tool, record)

        own = [one for one in held_leases(self.cp) if one.thread_id == thread_id]
        lease = lease or next(iter(own), None)

        if lease is not None and lease.thread_id != thread_id:
            raise ValueError(f"{lease!r} is not a lease of thread {thread_id!r}")

        taken = thread_lease(
            self.cp, thread_id, timeout=self.options.timeout, on_wait=on_wait
        )
        taken.run_no_agent()

        async with taken if lease is None else nullcontext(lease) as held:
            report = await resume_thread(
                self._attempts, thread_id, named, stale_after, on_wait, held, run
            )

            if heal is None:
                return report

            healed = await call_callback(heal, self.cp, thread_id, report)
            return replace(report, healed=healed)

    # For this package only

    async def execute(
        self, plan: EffectPlan, handler: Handler, *, wants_attempt: bool = True
    ) -> RunResult:
        """Run a planned effect, and return how it ended.

        The leases under which it runs know whether it is open: a run that ends with an
        effect open is unfinished, unless the effect waits for a person.
        """
        key = plan.effect.key
        leases = held_leases(self.cp)
        self._similar.note(plan)
        note_effect(leases, key, "running")

        with Trail(plan.effect, plan.thread_id) as trail:
            run = self.make_run(self._attempts, self._approvals, plan, trail)

            try:
                result = await run.run(handler, wants_attempt=wants_attempt)
            except (EffectTimeout, BackendUnavailable):
                raise  # it is open
            except Exception:
                note_effect(leases, key, None)
                raise

            note_effect(leases, key, None)
            error_type = result.error_type()

            if error_type is not None:
                trail.failed(error_type)

            return result

    async def _end(self, record: CallRecord, outcome: Outcome) -> CallRecord:
        """Record the outcome of a begun effect; raise ``Superseded`` if it lost."""
        key = record.call.idempotency_key
        stored, outcome = await self._attempts.record(record, outcome)

        if record.call.call_id in self._begun:
            heartbeat, leases, noted = self._begun.pop(record.call.call_id)
            note_effect(leases, noted, None)
            await heartbeat.end()
        else:
            # A person decides the attempt of another process, which may have written
            # heartbeats.
            await delete_heartbeats(self.cp, key)

        if stored.status == "completed":
            await self._requests.settle_used(key)

        if not stored.erased and not outcome.is_recorded_in(stored):
            winner = await self.cp.find_completed(key)
            raise Superseded(key, winner or stored)

        if outcome.raised is not None:
            raise outcome.raised

        return stored
