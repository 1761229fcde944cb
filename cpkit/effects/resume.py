"""What a crash left in a thread, settled as far as that can be known."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from cpkit.effects import envelope
from cpkit.effects.calls import Calls
from cpkit.effects.effect import Landed, NotLanded
from cpkit.effects.heartbeat import last_beat
from cpkit.effects.keys import APPROVAL
from cpkit.effects.settling import ask_verify, settle
from cpkit.effects.tracing import log
from cpkit.errors import PayloadTooLarge, SerializationError
from cpkit.records import CallRecord, JsonValue
from cpkit.waiting import StaleDetector

if TYPE_CHECKING:
    from cpkit.effects.tools import Tool

__all__ = ["Action", "ResumeReport", "Resumed", "resume"]

Action = Literal["discarded", "landed", "released", "surfaced", "alive", "finished"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What became of one pending call, and why.

    ``record`` is the call as it stands now. ``action`` is one of

    - ``discarded``: a read-only tool's; its key is free
    - ``landed``: ``verify`` found the effect; its result is recorded
    - ``released``: ``verify`` found that nothing happened; its key is free
    - ``surfaced``: it cannot be told, and was left issued for a person
    - ``alive``: it is being run
    - ``finished``: its own runner recorded its outcome meanwhile, or it was erased
    """

    record: CallRecord
    action: Action
    reason: str

    def __str__(self) -> str:
        call = self.record.call
        effect = envelope.effect_of(self.record)
        args = call.args if effect is None else effect.args
        return (
            f"{self.action}: {call.tool_name} {dict(args)} "
            f"(attempt {self.record.attempt}, call {call.call_id}): {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What `EffectLedger.resume` found and did, one entry for each pending call.

    ``surfaced`` are the calls for a person: settle each with the ledger's
    ``commit(record, result)`` if it happened, ``release(record)`` if it did not.
    """

    thread_id: str
    calls: tuple[Resumed, ...]

    @property
    def surfaced(self) -> tuple[Resumed, ...]:
        """The calls that nobody but a person can settle."""
        return tuple(call for call in self.calls if call.action == "surfaced")

    def __str__(self) -> str:
        if not self.calls:
            return f"thread {self.thread_id!r}: nothing was pending"

        lines = [f"thread {self.thread_id!r}: {len(self.calls)} pending"]
        return "\n".join([*lines, *(f"  {call}" for call in self.calls)])


async def resume(
    calls: Calls,
    thread_id: str,
    tools: Mapping[str, Tool],
    running: Set[str],
    stale_after: float | None,
) -> ResumeReport:
    """Settle the thread's pending calls; see `EffectLedger.resume`."""
    data = await calls.cp.load(thread_id)
    pending = [] if data is None else data.pending
    pending = [record for record in pending if record.call.tool_name != APPROVAL]
    orphans = [record for record in pending if record.call.call_id not in running]
    alive: set[str] = set(running)

    if stale_after is not None:
        silent = await _silent(calls, orphans, stale_after)
        alive.update(
            record.call.call_id
            for record in orphans
            if record.call.call_id not in silent
        )

    found = []

    for record in pending:
        if record.call.call_id in alive:
            found.append(Resumed(record, "alive", "its runner is at work"))
        else:
            found.append(await _settle(calls, record, tools))

        log.info("resume of %r: %s", thread_id, found[-1].action)

    return ResumeReport(thread_id, tuple(found))


async def _silent(
    calls: Calls, records: list[CallRecord], stale_after: float
) -> set[str]:
    """Watch the calls, and return the ids of those that show no sign of life."""
    watched = {record.call.call_id: record for record in records}
    silences = {call_id: StaleDetector(stale_after) for call_id in watched}
    silent: set[str] = set()

    while watched:
        for call_id, record in list(watched.items()):
            silence = silences[call_id]

            if await silence.is_stale(partial(last_beat, calls.cp, record)):
                silent.add(call_id)

            if call_id in silent or silence.changed:
                del watched[call_id]

        if watched:
            await asyncio.sleep(stale_after / 4)

    return silent


async def _settle(
    calls: Calls, record: CallRecord, tools: Mapping[str, Tool]
) -> Resumed:
    tool = tools.get(record.call.tool_name)

    if envelope.effect_of(record) is None:
        return Resumed(record, "surfaced", "it was not recorded by a ledger")

    if tool is None:
        return Resumed(record, "surfaced", "its tool is not among those given")

    if tool.side_effects == "read":
        result = envelope.released("discarded: the tool only reads")
        return await _resolve(calls, record, result, "discarded", "the tool only reads")

    if tool.verify is None:
        return Resumed(record, "surfaced", "its tool has no verify")

    verdict = await ask_verify(tool.verify, record)

    if isinstance(verdict, Landed):
        result = envelope.value(verdict.result)
        return await _resolve(calls, record, result, "landed", "verify found it")

    if isinstance(verdict, NotLanded):
        result = envelope.released("verify: it did not land")
        return await _resolve(
            calls, record, result, "released", "verify says that it did not land"
        )

    return Resumed(record, "surfaced", "verify cannot tell")


async def _resolve(
    calls: Calls,
    record: CallRecord,
    result: dict[str, JsonValue],
    action: Action,
    reason: str,
) -> Resumed:
    try:
        stands, ours = await settle(calls, record, result, success=action == "landed")
    except (PayloadTooLarge, SerializationError) as exc:
        return Resumed(record, "surfaced", f"what verify found: {exc}")

    if ours:
        return Resumed(stands, action, reason)

    if stands.erased or stands.status == "issued":
        return Resumed(stands, "finished", "its record was erased meanwhile")

    return Resumed(stands, "finished", "its runner recorded its outcome meanwhile")
