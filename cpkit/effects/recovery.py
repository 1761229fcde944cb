"""What `EffectLedger.resume` and ``recover`` do with the calls that a crash left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from cpkit.effects.attempts import (
    Attempts,
    ask_verify,
    close_attempt,
    read_heartbeat,
    store_doubt,
)
from cpkit.effects.effect import Landed, NotLanded
from cpkit.effects.records import (
    APPROVAL,
    effect_of,
    released_envelope,
    value_envelope,
)
from cpkit.effects.tools import RunsEffects, Tool, ToolOutcome, run_recorded
from cpkit.effects.tracing import log
from cpkit.errors import PayloadTooLarge, SerializationError
from cpkit.lease import Lease, own_lease, thread_lease
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, JsonValue
from cpkit.terms import WaitHook
from cpkit.waiting import StaleDetector

__all__ = [
    "Action",
    "RecoverReport",
    "ResumeReport",
    "Resumed",
    "by_name",
    "resume_thread",
    "run_released",
    "under_lease",
]

Action = Literal["discarded", "landed", "released", "surfaced", "alive", "finished"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What resume did with one pending call, and why.

    ``record`` is the call as it is stored now. ``action`` is one of

    - ``discarded``: the tool only reads; the key is free
    - ``landed``: ``verify`` found the effect; its result is recorded, as a new attempt
      if this one was released meanwhile
    - ``released``: ``verify`` says that nothing happened; the key is free
    - ``surfaced``: the outcome is unknown; the call stays issued, a person decides
    - ``alive``: a run is executing it
    - ``finished``: its own run recorded an outcome during the resume, or it was erased
    """

    record: CallRecord
    action: Action
    reason: str

    def __str__(self) -> str:
        call = self.record.call
        effect = effect_of(self.record)
        args = call.args if effect is None else effect.args
        return (
            f"{self.action}: {call.tool_name} {dict(args)} "
            f"(attempt {self.record.attempt}, call {call.call_id}): {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What `EffectLedger.resume` found and did, one entry for each pending call.

    A person decides the ``surfaced`` calls, with the ledger: ``commit(record, result)``
    if the effect happened, ``release(record)`` if it did not.
    """

    thread_id: str
    calls: tuple[Resumed, ...]

    @property
    def surfaced(self) -> tuple[Resumed, ...]:
        """The calls that a person must decide."""
        return tuple(call for call in self.calls if call.action == "surfaced")

    def __str__(self) -> str:
        if not self.calls:
            return f"thread {self.thread_id!r}: nothing was pending"

        lines = [f"thread {self.thread_id!r}: {len(self.calls)} pending"]
        return "\n".join([*lines, *(f"  {call}" for call in self.calls)])


@dataclass(frozen=True, slots=True)
class RecoverReport(ResumeReport):
    """What `EffectLedger.recover` found and did: the report of a resume, and more.

    ``outcomes`` are the tool calls that recover ran again, with their answers for the
    model. ``healed`` is the answer of the ``heal`` callback.
    """

    outcomes: tuple[tuple[Resumed, ToolOutcome], ...] = ()
    healed: object = None

    def __str__(self) -> str:
        lines = [
            f"  ran {call.record.call.tool_name}: "
            + (f"error: {outcome.content}" if outcome.is_error else "done")
            for call, outcome in self.outcomes
        ]
        lines += [] if self.healed is None else [f"healed: {self.healed}"]
        return "\n".join([ResumeReport.__str__(self), *lines])


@asynccontextmanager
async def under_lease(
    cp: Checkpointer[Any],
    thread_id: str,
    lease: Lease | None,
    wants_lease: bool,
    timeout: float | None,
    on_wait: WaitHook | None,
) -> AsyncIterator[Lease | None]:
    """Hold the thread's lease: the given one, the task's own, or a new one.

    Without ``wants_lease`` no new one is taken. Whether a lease is still held is for
    the caller to check, after its first read.
    """
    lease = lease or own_lease(cp, thread_id)

    if lease is not None:
        if lease.thread_id != thread_id:
            raise ValueError(f"{lease!r} is not a lease of thread {thread_id!r}")

        yield lease
    elif wants_lease:
        taken = thread_lease(cp, thread_id, timeout=timeout, on_wait=on_wait)

        async with taken as new:
            new.keep_mark()
            yield new
    else:
        yield None


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return the tools by name; raise ``TypeError`` for anything else."""
    named = {}

    for tool in tools:
        if not isinstance(tool, Tool):
            raise TypeError(
                f"tools takes tools, not {tool!r:.80}; make one with @tool or "
                "tool(function)"
            )

        named[tool.name] = tool

    return named


async def run_released(
    ledger: RunsEffects, thread_id: str, tools: Mapping[str, Tool], call: Resumed
) -> ToolOutcome | None:
    """Run a released call again, with its recorded arguments.

    Returns ``None`` if the tool refuses these arguments now, or would give another key:
    that would be another effect. An effect that waits for an approval is reported as an
    error.
    """
    effect = effect_of(call.record)

    if effect is None:
        return None

    tool = tools[call.record.call.tool_name]
    return await run_recorded(ledger, thread_id, tool, effect)


async def resume_thread(
    attempts: Attempts,
    thread_id: str,
    tools: Mapping[str, Tool],
    running: Set[str],
    stale_after: float | None,
    lease: Lease | None,
    when_released: Callable[[Resumed], Awaitable[None]] | None = None,
) -> ResumeReport:
    """Recover the thread's pending calls; see `EffectLedger.resume`.

    ``running`` has the call ids that the ledger itself is executing. ``when_released``
    is called with each released call, before the next call is recovered.
    """
    data = await attempts.cp.load(thread_id)

    if lease is not None:
        # After the load: if the lease was lost before, the new owner runs these calls.
        await lease.check()

    pending = [] if data is None else data.pending
    pending = [record for record in pending if record.call.tool_name != APPROVAL]
    orphans = [record for record in pending if record.call.call_id not in running]
    alive = set(running)  # a copy, because it may change during the awaits
    stale: dict[str, StaleDetector] = {}

    if stale_after is not None:
        stale = await _stale_calls(attempts, orphans, stale_after)
        alive.update(
            record.call.call_id
            for record in orphans
            if record.call.call_id not in stale
        )

    resumed = []

    for record in pending:
        if record.call.call_id in alive:
            resumed.append(_alive(record))
        else:
            detector = stale.get(record.call.call_id)
            resumed.append(await _recover(attempts, record, tools, detector))

        log.info("resume of %r: %s", thread_id, resumed[-1].action)

        if resumed[-1].action == "released" and when_released is not None:
            await when_released(resumed[-1])

    return ResumeReport(thread_id, tuple(resumed))


def _alive(record: CallRecord) -> Resumed:
    return Resumed(record, "alive", "a run is executing it")


async def _stale_calls(
    attempts: Attempts, records: list[CallRecord], stale_after: float
) -> dict[str, StaleDetector]:
    """Watch the calls for ``stale_after`` seconds.

    Returns the detectors of the stale ones, by call id.
    """
    watched = {record.call.call_id: record for record in records}
    detectors = {call_id: StaleDetector(stale_after) for call_id in watched}
    stale: dict[str, StaleDetector] = {}

    while watched:
        for call_id, record in list(watched.items()):
            detector = detectors[call_id]

            if await detector.is_stale(partial(read_heartbeat, attempts.cp, record)):
                stale[call_id] = detector

            if call_id in stale or detector.changed:
                del watched[call_id]

        if watched:
            await asyncio.sleep(stale_after / 4)

    return stale


async def _recover(
    attempts: Attempts,
    record: CallRecord,
    tools: Mapping[str, Tool],
    stale: StaleDetector | None,
) -> Resumed:
    """Find out what happened to one orphaned call, and record it if that is known.

    ``stale`` is the detector that found the call's run silent; ``None`` if the caller
    knows by other means, such as a lease, that no run executes the call.
    """
    tool = tools.get(record.call.tool_name)

    if effect_of(record) is None:
        return Resumed(record, "surfaced", "it was not recorded by a ledger")

    if tool is None:
        return Resumed(record, "surfaced", "its tool was not passed to resume")

    if tool.side_effects == "read":
        result = released_envelope("discarded: the tool only reads")
        return await _close(
            attempts, record, stale, result, "discarded", "the tool only reads"
        )

    if tool.verify is None:
        return Resumed(record, "surfaced", "its tool has no verify")

    verdict = await ask_verify(attempts.cp, tool.verify, record)

    if isinstance(verdict, Landed):
        result = value_envelope(verdict.result)
        return await _close(
            attempts, record, stale, result, "landed", "verify found it"
        )

    if isinstance(verdict, NotLanded):
        result = released_envelope("verify: it did not land")
        reason = "verify says that it did not land"
        return await _close(attempts, record, stale, result, "released", reason)

    return Resumed(record, "surfaced", "verify gave no clear answer")


async def _close(
    attempts: Attempts,
    record: CallRecord,
    stale: StaleDetector | None,
    result: dict[str, JsonValue],
    action: Action,
    reason: str,
) -> Resumed:
    # The callbacks took time. A holder that was only slow may be alive again.
    if stale is not None:
        heartbeat = partial(read_heartbeat, attempts.cp, record)

        if not await stale.is_stale(heartbeat):
            return _alive(record)

    try:
        stored, closed_here = await close_attempt(
            attempts, record, result, success=action == "landed"
        )
    except (PayloadTooLarge, SerializationError) as exc:
        await store_doubt(attempts.cp, record, f"its answer cannot be stored: {exc}")
        return Resumed(record, "surfaced", f"cannot record what verify found: {exc}")

    if closed_here:
        return Resumed(stored, action, reason)

    if stored.call.call_id != record.call.call_id and stored.status == "issued":
        return _alive(stored)

    if stored.erased or stored.status == "issued":
        return Resumed(
            stored, "finished", "its record was erased or deleted during the resume"
        )

    return Resumed(stored, "finished", "another process recorded an outcome first")
