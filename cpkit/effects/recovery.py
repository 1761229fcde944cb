"""What `EffectLedger.resume` and ``recover`` do with the calls that a crash left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from cpkit.effects.attempts import Attempts, Resumed, find_silent
from cpkit.effects.records import effect_of
from cpkit.effects.tools import ToolOutcome, ToolRegistry
from cpkit.effects.tracing import log
from cpkit.lease import Lease, WaitHook
from cpkit.records import CallRecord
from cpkit.waiting import StaleDetector

__all__ = [
    "RecoverReport",
    "resume_thread",
]


@dataclass(frozen=True, slots=True)
class RecoverReport:
    """What `EffectLedger.resume` or ``recover`` found and did.

    ``calls`` has one entry for each pending call. A person decides the ``surfaced``
    ones: ``landed(key, result)`` if the effect happened, ``not_landed(key)`` if it did
    not. ``outcomes`` are the calls that recover ran again, with their answers for the
    model, and ``healed`` is the answer of its ``heal`` callback.
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


async def resume_thread(
    attempts: Attempts,
    thread_id: str,
    tools: ToolRegistry,
    stale_after: float | None,
    on_wait: WaitHook | None,
    lease: Lease | None = None,
    run: Callable[[CallRecord], Awaitable[ToolOutcome | None]] | None = None,
) -> RecoverReport:
    """Recover the thread's pending calls; see `EffectLedger.resume`.

    ``run`` is called with each released call, before the next call is recovered.
    """
    calls: list[CallRecord] = await attempts.cp.list_calls(thread_id)

    if lease is not None:
        # After the read: if the lease was lost before, the new owner runs these calls.
        await lease.check()

    pending = [
        one
        for one in calls
        if one.status == "issued"
        and not one.erased
        and not one.call.tool_name.startswith("cpkit:")
    ]
    effects = [one for one in pending if effect_of(one) is not None]
    silent = await find_silent(attempts, thread_id, effects, stale_after, on_wait)
    resumed: list[Resumed] = []
    outcomes: list[tuple[Resumed, ToolOutcome]] = []

    for record in pending:
        if record not in effects:
            why = "it was not recorded by a ledger"
            resumed.append(Resumed(record, "surfaced", why))
        elif record.call.call_id in silent:
            stale = silent[record.call.call_id]
            resumed.append(await _recover(attempts, record, tools, stale))
        else:
            resumed.append(await attempts.look_again(record))

        log.info("resume of %r: %s", thread_id, resumed[-1].action)

        if resumed[-1].action == "released" and run is not None:
            outcome = await run(resumed[-1].record)
            outcomes += [] if outcome is None else [(resumed[-1], outcome)]

    return RecoverReport(thread_id, tuple(resumed), tuple(outcomes))


async def _recover(
    attempts: Attempts,
    record: CallRecord,
    tools: ToolRegistry,
    stale: StaleDetector | None,
) -> Resumed:
    """Find out what happened to one orphaned call, and record it if that is known.

    ``stale`` is the detector that found the call's run silent; ``None`` if its lease
    was taken over.
    """
    if record.call.tool_name not in tools:
        return Resumed(record, "surfaced", "its tool was not passed to resume")

    tool = tools[record.call.tool_name]

    if tool.side_effects == "write" and tool.verify is None:
        return Resumed(record, "surfaced", "its tool has no verify")

    if tool.side_effects == "read":
        found = await attempts.close_silent(record, None, stale, "the tool only reads")
        released = found.action == "released"
        return replace(found, action="discarded") if released else found

    reason = "verify says that it did not land"
    return await attempts.close_silent(record, tool.verify, stale, reason)
