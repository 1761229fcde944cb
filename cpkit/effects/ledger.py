"""`EffectLedger`: runs each side effect once, however often it is requested."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Unpack

from cpkit.effects.approvals import Approvals, Notifier
from cpkit.effects.attempts import Resumed
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
from cpkit.effects.errors import EffectDenied, EffectErased, EffectTimeout, Superseded
from cpkit.effects.people import ForPeople
from cpkit.effects.records import Outcome, effect_of
from cpkit.effects.run import EffectRun, RunResult
from cpkit.effects.tools import Tool, ToolOutcome, ToolRegistry, run_recorded
from cpkit.effects.tracing import Similar, log, traced
from cpkit.errors import BackendUnavailable
from cpkit.lease import Lease, held_leases, note_effect, thread_lease
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, JsonValue
from cpkit.runs.waiting import StaleDetector

__all__ = ["Begun", "EffectLedger", "RecoverReport"]


@dataclass(frozen=True, slots=True)
class RecoverReport:
    """What `EffectLedger.resume` or ``recover`` found and did.

    A person decides the ``surfaced`` ones of the ``calls`` that were pending, with
    ``landed`` or ``not_landed``. ``outcomes`` are the calls that ran again, with their
    answers for the model. ``healed`` is what ``heal`` returned.
    """

    thread_id: str
    calls: tuple[Resumed, ...]
    outcomes: tuple[tuple[Resumed, ToolOutcome], ...] = ()
    healed: object = None

    @property
    def surfaced(self) -> tuple[Resumed, ...]:
        """The calls that a person must decide."""
        return tuple(call for call in self.calls if call.action == "surfaced")

    def __str__(self) -> str:
        found = f"{len(self.calls)} pending" if self.calls else "nothing was pending"
        lines = [f"thread {self.thread_id!r}: {found}"]
        lines += [f"  {call}" for call in self.calls]

        for call, outcome in self.outcomes:
            how = f"error: {outcome.content}" if outcome.is_error else "done"
            lines.append(f"  ran {call.record.call.tool_name}: {how}")

        lines += [] if self.healed is None else [f"healed: {self.healed}"]
        return "\n".join(lines)


class Begun(NamedTuple):
    """What ``begin`` found: the key's record, and whether the caller must run it."""

    record: CallRecord
    fresh: bool


class EffectLedger(ForPeople):
    """Runs each side effect once, on any checkpointer that keeps receipts.

    ``requires_approval`` answers whether a person must approve an `Effect`: a bool, or
    an `Approval`. It is called before each claim. ``on_approval_required`` is called
    with each undecided `ApprovalRequest`, at least once in each process that finds it;
    its errors are logged. The other options are the defaults of `Options`. A sync
    callback runs in the event loop's thread. A store without ``KeepsReceipts`` is a
    ``TypeError``.
    """

    make_run: ClassVar[type[EffectRun]] = EffectRun

    def __init__(
        self,
        cp: Checkpointer[Any],
        *,
        requires_approval: Policy | None = None,
        on_approval_required: Notifier | None = None,
        **options: Unpack[EffectOptions],
    ) -> None:
        if requires_approval is not None:
            check_callback("requires_approval", requires_approval, "effect")

        if on_approval_required is not None:
            check_callback("on_approval_required", on_approval_required, "request")

        super().__init__(cp)
        self.options = Options(**options)
        self._approvals = Approvals(
            self._requests, requires_approval, on_approval_required
        )
        self._similar = Similar()
        timeout, stale_after = self.options.timeout, self.options.stale_after

        if timeout is not None and stale_after is not None and timeout <= stale_after:
            log.warning(
                "timeout=%g ends each wait before stale_after=%g: no waiting run takes "
                "over; give a longer timeout",
                *(timeout, stale_after),
            )

    async def run(
        self,
        thread_id: str,
        tool: str,
        args: Mapping[str, JsonValue],
        handler: Handler,
        **options: Unpack[EffectOptions],
    ) -> Any:
        """Return the effect's result: run it, wait for another run, or replay it.

        Every caller that returns gets the recorded result, as JSON. ``handler`` is
        called with an `Effect`. It runs again only if it raised `NoEffect`, if
        ``verify`` or a person said that the effect did not land, or if ``stale_after``
        took over a silent holder, which may be merely slow.

        The handler's own caller gets the handler's exception, and all other callers get
        ``EffectFailed``. Also raises ``EffectDenied``, ``EffectTimeout``,
        ``EffectErased``, ``KeyReused``, and what the store raises; ``TypeError``,
        ``ValueError`` or ``RuntimeError`` for what cannot be run.
        """
        check_callback("handler", handler, "effect")
        plan = plan_effect(thread_id, tool, args, self.options.merged(options))
        result = await self.execute(plan, handler)

        if result.error is not None:
            raise result.error

        return result.value

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
        holds the key.
        """
        plan = plan_effect(thread_id, tool, args, self.options.merged(options))
        run = self.make_run(self._attempts, self._approvals, plan)
        noted = held_leases(self.cp), plan.key

        try:
            record = await run.begin()
        except (EffectDenied, EffectErased):  # it may have waited for a person
            note_effect(*noted, None)
            raise

        heartbeat = run.heartbeat if run.holds(record) else None

        if heartbeat is not None:
            heartbeat.noted = noted
            note_effect(*noted, "running")
        elif record.status == "completed":
            note_effect(*noted, None)

        return Begun(record, heartbeat is not None)

    async def commit(
        self,
        record: CallRecord,
        result: JsonValue = None,
        *,
        error: Exception | None = None,
    ) -> CallRecord:
        """Record the outcome of a begun effect: a result, or its final failure.

        Returns the stored record: that of a new attempt if this one was released
        meanwhile, and the key is free. Raises ``Superseded`` if another outcome won. A
        result that JSON cannot hold is recorded as a final failure, and raised.
        """
        outcome = Outcome.returned(result)

        if error is not None:
            outcome = replace(Outcome.failure(error), raised=None)

        return await self._end(record, outcome)

    async def release(self, record: CallRecord, reason: str = "") -> CallRecord:
        """Free the key of an attempt that had no effect; raises as `commit`."""
        return await self._end(record, Outcome.release(reason))

    def key(
        self,
        thread_id: str,
        tool: str,
        args: Mapping[str, JsonValue],
        **options: Unpack[EffectOptions],
    ) -> str:
        """Return the key under which `run` with these options records the effect."""
        return plan_effect(thread_id, tool, args, self.options.merged(options)).key

    async def find(self, key: str) -> CallRecord | None:
        """Return the issued or completed record of an effect, or ``None``."""
        _, record = await self._attempts.newest(key)
        return record

    # After a crash

    async def resume(self, thread_id: str, tools: Iterable[Tool]) -> RecoverReport:
        """Find out how the thread's pending calls ended whose process is gone.

        A call is an orphan only if its own holder was silent: the lease under which it
        ran was taken over, or this has watched it for the ``stale_after`` of its run
        (15 seconds by default). ``verify`` decides whether its result is recorded, or
        its key freed. That of a read-only tool is freed. Other calls stay as they are.
        """
        return await self._resume(thread_id, ToolRegistry(self, tools), None)

    async def recover(
        self,
        thread_id: str,
        tools: Iterable[Tool],
        *,
        lease: Lease | None = None,
        heal: Callable[[Checkpointer[Any], str, RecoverReport], Any] | None = None,
    ) -> RecoverReport:
        """Do all that a thread needs after a crash of its run, under its lease.

        Each pending call is resumed, and runs again through its tool if nothing
        happened. Last comes ``heal(cp, thread_id, report)``, which can close tool calls
        that the conversation left open. An undecided approval is reported, not waited
        for. A ledger without ``requires_approval`` runs no call whose request is not
        approved. After a crash or an error of the store, recover again.

        A lease under which the current task runs is used; pass another task's as
        ``lease``. Raises ``LeaseTimeout`` if another process runs the thread, and
        ``LeaseLost`` if the lease was lost before the calls were read.
        """
        if heal is not None:
            check_callback("heal", heal, "cp", "thread_id", "report")

        named = ToolRegistry(self, tools)
        own = {one.thread_id: one for one in held_leases(self.cp)}
        lease = lease or own.get(thread_id)

        if lease is not None and lease.thread_id != thread_id:
            raise ValueError(f"{lease!r} is not a lease of thread {thread_id!r}")

        taken = thread_lease(self.cp, thread_id, timeout=self.options.timeout)
        taken.run_no_agent()

        async with taken if lease is None else nullcontext(lease) as held:
            report = await self._resume(thread_id, named, held)

            if heal is None:
                return report

            healed = await call_callback(heal, self.cp, thread_id, report)
            return replace(report, healed=healed)

    async def _resume(
        self, thread_id: str, tools: ToolRegistry, lease: Lease | None
    ) -> RecoverReport:
        """Resume the thread; under a ``lease``, run each released call again."""
        calls: list[CallRecord] = await self._attempts.cp.list_calls(thread_id)

        if lease is not None:
            # After the read: if the lease was lost before, the new owner runs them.
            await lease.check()

        own = [one for one in calls if not one.call.tool_name.startswith("cpkit:")]
        pending = [one for one in own if one.status == "issued" and not one.erased]
        silent = await asyncio.gather(*map(self._attempts.watch, pending))
        resumed: list[Resumed] = []
        outcomes: list[tuple[Resumed, ToolOutcome]] = []

        for record, stale in zip(pending, silent, strict=True):
            found = await self._end_orphan(record, tools, stale)
            resumed.append(found)

            if found.action == "released" and lease is not None:
                outcome = await run_recorded(
                    self, self._attempts, tools[record.call.tool_name], found.record
                )
                outcomes += [] if outcome is None else [(found, outcome)]

        return RecoverReport(thread_id, tuple(resumed), tuple(outcomes))

    async def _end_orphan(
        self, record: CallRecord, tools: ToolRegistry, stale: StaleDetector | None
    ) -> Resumed:
        """Find out what happened to an orphan, and record it if that is known."""
        if effect_of(record) is None:
            return Resumed(record, "surfaced", "it was not recorded by a ledger")

        if stale is None:
            return await self._attempts.look_again(record)

        if record.call.tool_name not in tools:
            return Resumed(record, "surfaced", "its tool was not passed to resume")

        tool = tools[record.call.tool_name]
        verify, reason = tool.options.get("verify"), "verify says that it did not land"

        if tool.side_effects == "read":
            verify, reason = None, "the tool only reads"
        elif verify is None:
            return Resumed(record, "surfaced", "its tool has no verify")

        return await self._attempts.close_silent(record, verify, stale, reason)

    async def execute(self, plan: EffectPlan, handler: Handler) -> RunResult:
        """Run a planned effect for this package; its leases know whether it is open."""
        leases = held_leases(self.cp)
        self._similar.note(plan)
        note_effect(leases, plan.key, "running")

        run = self.make_run(self._attempts, self._approvals, plan)

        try:
            result: RunResult = await traced(plan.effect, run.run(handler))
        except (EffectTimeout, BackendUnavailable):
            raise  # it is open
        except Exception:
            note_effect(leases, plan.key, None)
            raise

        note_effect(leases, plan.key, None)
        return result

    async def _end(self, record: CallRecord, outcome: Outcome) -> CallRecord:
        """Record the outcome of a begun effect; raise ``Superseded`` if it lost."""
        call, key = record.call, record.call.idempotency_key
        stored, outcome = await self._attempts.close(record.thread_id, call, outcome)

        if (heartbeat := self._attempts.running.get(call.call_id)) is not None:
            await heartbeat.end()
        else:  # another process began it, and may have written heartbeats
            await self._attempts.delete_heartbeats(call.call_id)

        if stored.status == "completed":
            await self._requests.settle_used(key)

        if not stored.erased and not outcome.is_recorded_in(stored):
            raise Superseded(key, stored)

        if outcome.raised is not None:
            raise outcome.raised

        return stored
