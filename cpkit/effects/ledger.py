"""`EffectLedger`: a side effect happens once, however often it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cpkit.driver.backoff import Backoff
from cpkit.driver.ids import check_id
from cpkit.effects import envelope
from cpkit.effects.approvals import ApprovalRequest, Approvals
from cpkit.effects.calls import Calls
from cpkit.effects.effect import (
    Effect,
    Handler,
    Notifier,
    Policy,
    Verify,
)
from cpkit.effects.errors import Superseded
from cpkit.effects.heartbeat import forget_beats
from cpkit.effects.keys import GLOBAL_THREAD, Scope, chosen, effect_key, plain_args
from cpkit.effects.outcome import Plan, Settled
from cpkit.effects.resume import ResumeReport, resume
from cpkit.effects.run import EffectRun, SupersededHook
from cpkit.effects.tracing import Trail
from cpkit.errors import InvalidId, PayloadTooLarge, SerializationError
from cpkit.lease import Lease, thread_lease
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, JsonValue

if TYPE_CHECKING:
    from cpkit.effects.tools import Tool

__all__ = ["Begun", "EffectLedger"]


class _Default:
    """Stands for the ledger's own setting where ``None`` has a meaning."""


DEFAULT: Final = _Default()


class Begun(NamedTuple):
    """What ``begin`` found: the key's record, and whether it is the caller's to run."""

    record: CallRecord
    fresh: bool


class EffectLedger:
    """Runs side effects once, on any checkpointer.

    Approval
        ``requires_approval`` says of an `Effect` whether a person must approve it; it
        is asked before each claim and each takeover, not on a replay.
        ``on_approval_required`` is told of each undecided request, at least once in
        each process that finds it; its errors are logged.

    Waiting, in seconds
        ``timeout`` for another's result and ``approval_timeout`` for a decision
        (``None``: without end). ``stale_after``: how long a holder may be silent
        before its key is taken over; ``None``, the default, is never. Without
        ``verify`` a takeover runs the effect again, so ask for it where the handler
        passes the key downstream. ``heartbeat``: how often a long effect shows that
        it is alive; by default a third of ``stale_after``, or 10. ``backoff`` is
        between two looks; ``patience``, how long to go on asking a store that lost an
        answer, or one that is away while there is an outcome to record.

    Failures
        A handler's exception is the effect's final outcome, or with
        ``release_failures`` frees the key for another try. `NoEffect` always does.

    ``max_payload`` bounds the arguments of one effect, in bytes of JSON.
    ``on_superseded(effect, record)`` is told where a run's attempt was settled by
    somebody else before its own outcome came. Callbacks may be sync or async; a sync
    one runs in the event loop's thread and must not block.
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
        self._calls = Calls(cp, backoff or Backoff(), patience)
        self._approvals = Approvals(
            self._calls, requires_approval, on_approval_required
        )
        self._on_superseded = on_superseded
        self._timeout = timeout
        self._approval_timeout = approval_timeout
        self._stale_after = stale_after
        self._heartbeat = heartbeat
        self._release_failures = release_failures
        self._max_payload = max_payload
        self._running: set[str] = set()
        _interval(heartbeat, stale_after)

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
        timeout: float | None | _Default = DEFAULT,
        approval_timeout: float | None | _Default = DEFAULT,
        stale_after: float | None | _Default = DEFAULT,
        release_failures: bool | None = None,
        tool_call_id: str | None = None,
    ) -> JsonValue:
        """Return the effect's result: run it, wait for who runs it, or replay it.

        The effect is named by scope, tool and arguments; or by those arguments that
        ``key_fields`` names, by a ``resource``, or by a given ``idempotency_key``. A
        ``global`` one is the same in every thread. Every caller that returns gets the
        result on record, as JSON has it.

        ``handler`` is called with an `Effect`, at most once at a time in the whole
        store. It runs again only where it said that nothing happened (`NoEffect`),
        where ``verify`` said so, or where ``stale_after`` took a silent holder over.
        A takeover cannot stop a holder that is merely slow: pass ``effect.key``
        downstream where that matters.

        Raises what the handler raises, to its own caller; ``EffectFailed`` to all
        others. Also ``EffectDenied``, ``EffectTimeout``, ``EffectErased``,
        ``KeyReused``, and what the store raises.
        """
        plan = self.plan(
            thread_id,
            tool,
            args,
            scope=scope,
            key_fields=key_fields,
            resource=resource,
            idempotency_key=idempotency_key,
            verify=verify,
            timeout=timeout,
            approval_timeout=approval_timeout,
            stale_after=stale_after,
            release_failures=release_failures,
            tool_call_id=tool_call_id,
        )
        return (await self.settle(thread_id, plan, handler)).value()

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
        approval_timeout: float | None | _Default = DEFAULT,
        tool_call_id: str | None = None,
    ) -> Begun:
        """Claim an effect that the caller runs itself; never wait for another holder.

        A fresh record is the caller's: run the effect and `commit` what came of it,
        or `release` the key if nothing happened. Nothing beats for it meanwhile, so a
        ledger with ``stale_after`` takes it over when that time is up. Any other
        record holds the key, issued or completed.
        """
        plan = self.plan(
            thread_id,
            tool,
            args,
            scope=scope,
            key_fields=key_fields,
            resource=resource,
            idempotency_key=idempotency_key,
            approval_timeout=approval_timeout,
            tool_call_id=tool_call_id,
        )

        with Trail(plan.effect, thread_id) as trail:
            return Begun(*await self._run(plan, trail).begin())

    async def commit(
        self,
        record: CallRecord,
        result: JsonValue = None,
        *,
        error: Exception | None = None,
    ) -> CallRecord:
        """Record what came of a begun effect: a result, or its final failure.

        Returns the record; a second commit of the same outcome does too. Raises
        ``Superseded`` with the record that won where another outcome is on record. A
        result that JSON cannot hold is recorded as a final failure and raised.
        """
        if error is not None:
            return await self._resolve(record, envelope.error(error), True)

        try:
            return await self._resolve(record, envelope.value(result), True)
        except (SerializationError, PayloadTooLarge) as exc:
            await self._resolve(record, envelope.error(exc), True)
            raise

    async def release(self, record: CallRecord, reason: str = "") -> CallRecord:
        """Free the key of an attempt that had no effect, so that it may run again.

        Raises ``Superseded`` where another outcome is on record.
        """
        return await self._resolve(record, envelope.released(reason), False)

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
        return self.plan(
            thread_id,
            tool,
            args,
            scope=scope,
            key_fields=key_fields,
            resource=resource,
            idempotency_key=idempotency_key,
        ).effect.key

    async def find(self, key: str) -> CallRecord | None:
        """Return the completed record of a key, or ``None``.

        Where the store keeps receipts, also an issued one that holds it.
        """
        return await self._calls.holder(key)

    async def pending(self, thread_id: str) -> list[ApprovalRequest]:
        """Return the approvals that the thread waits for, oldest first."""
        return await self._approvals.pending(thread_id)

    async def approve(
        self,
        thread_id: str,
        key: str,
        *,
        by: str | None = None,
        args: Mapping[str, JsonValue] | None = None,
    ) -> bool:
        """Approve a request; return whether it is approved on record.

        A request is decided once: ``False`` where it was denied before, and where
        nothing was asked. ``args`` says which is meant where the key was asked for
        with several arguments; without it that is a ``ValueError``.
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
        """Deny a request, for good; return whether it is denied on record.

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
        """Settle what a crash left in the thread, as far as that can be known.

        It is for the one who runs the thread: it takes the thread's lease (or is given
        the caller's), and may then take every pending call for an orphan but those of
        this ledger. With ``stale_after`` it takes no lease and touches only calls
        that show no sign of life for so many seconds.

        A read-only tool's call is discarded. A tool's ``verify`` says whether the
        effect landed: then its result is recorded; if not, the key is freed. Whatever
        it cannot tell, and every call without ``verify``, is left as it is and shown
        in the report. Nothing is executed here, and approval requests are not touched.

        Raises ``LeaseTimeout`` where another runs the thread.
        """
        known = {tool.name: tool for tool in tools}

        if lease is not None:
            await lease.check()

        held = (
            nullcontext()
            if lease is not None or stale_after is not None
            else thread_lease(self.cp, thread_id, timeout=self._timeout)
        )

        async with held:
            return await resume(
                self._calls, thread_id, known, self._running, stale_after
            )

    # Within the package

    async def settle(
        self,
        thread_id: str,
        plan: Plan,
        handler: Handler,
        *,
        wants_attempt: bool = True,
    ) -> Settled:
        """Run a plan for the agent's thread, and say how it ended."""
        with Trail(plan.effect, thread_id) as trail:
            settled = await self._run(plan, trail).settle(
                handler, wants_attempt=wants_attempt
            )

            trail.failed(settled.failure())
            return settled

    def _run(self, plan: Plan, trail: Trail) -> EffectRun:
        return EffectRun(
            self._calls,
            self._approvals,
            plan,
            trail,
            self._running,
            self._on_superseded,
        )

    def plan(
        self,
        thread_id: str,
        tool: str,
        args: Mapping[str, JsonValue],
        *,
        scope: Scope = "thread",
        key_fields: Sequence[str] | None = None,
        resource: JsonValue = None,
        idempotency_key: str | None = None,
        verify: Verify | None = None,
        timeout: float | None | _Default = DEFAULT,
        approval_timeout: float | None | _Default = DEFAULT,
        stale_after: float | None | _Default = DEFAULT,
        release_failures: bool | None = None,
        tool_call_id: str | None = None,
    ) -> Plan:
        """Check everything that a run is asked for, and name the effect."""
        thread_id = check_id("thread_id", thread_id)
        tool = check_id("tool_name", tool)

        if tool.startswith("cpkit:"):
            raise InvalidId("tool_name", "must not start with 'cpkit:', which is ours")

        if scope not in ("thread", "global"):
            raise ValueError(f"scope is 'thread' or 'global', not {scope!r}")

        plain = plain_args(args, self._max_payload)
        kind, values = chosen(plain, key_fields, resource, idempotency_key)
        stale = _or(stale_after, self._stale_after)
        effect = Effect(
            effect_key(scope, thread_id, tool, kind, values),
            GLOBAL_THREAD if scope == "global" else thread_id,
            tool,
            plain,
            tool_call_id=tool_call_id,
        )
        return Plan(
            effect,
            kind,
            verify,
            _or(timeout, self._timeout),
            _or(approval_timeout, self._approval_timeout),
            stale,
            _interval(self._heartbeat, stale),
            self._release_failures if release_failures is None else release_failures,
        )

    async def _resolve(
        self, record: CallRecord, result: dict[str, JsonValue], success: bool
    ) -> CallRecord:
        call = record.call
        stands = await self._calls.resolve(
            record.thread_id, call.call_id, result, success=success, insist=True
        )

        if call.call_id in self._running:
            self._running.discard(call.call_id)
        else:
            # A person's word on another's attempt, which may have shown signs of life.
            await forget_beats(self.cp, call.idempotency_key)

        status = "completed" if success else "failed"

        if stands.erased or (stands.status == status and stands.result == result):
            return stands

        won = await self.cp.find_completed(call.idempotency_key)
        raise Superseded(call.idempotency_key, won or stands)


def _or(given: float | None | _Default, default: float | None) -> float | None:
    return default if isinstance(given, _Default) else given


def _interval(heartbeat: float | None, stale_after: float | None) -> float:
    """Return seconds between two beats, several of which fit into ``stale_after``."""
    if stale_after is not None and stale_after <= 0:
        raise ValueError("stale_after must be positive, or None for never")

    if heartbeat is None:
        return 10.0 if stale_after is None else stale_after / 3

    if heartbeat <= 0 or (stale_after is not None and heartbeat > stale_after / 2):
        raise ValueError("heartbeat must be positive and at most half of stale_after")

    return heartbeat
