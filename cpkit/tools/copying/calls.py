"""Carrying calls: with their keys, attempt numbers, statuses and results.

A store numbers the attempts at a key itself, in the order in which they are claimed.
So a call is carried when the attempt before it is there. Attempts at one key can be in
several threads: a call that comes before its turn waits until all threads were seen,
and those that wait are carried by their numbers. Where an attempt is in no thread any
more, because it was forgotten, a failed one is put in its place: numbers are fencing
tokens, and must not start again.

What ``delete_thread`` left of calls cannot be written as such. It goes into a thread
of its own, `GRAVES`, which is deleted in the end, so that each key is kept as it was:
held, and erased. No thread that somebody else may use is ever deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from cpkit.errors import CallMismatch
from cpkit.protocol import Checkpointer, ErasesThreads, KeepsReceipts, ListsThreads
from cpkit.records import CallRecord, CheckpointData, ToolCall
from cpkit.tools.copying.report import CopyReport, Problem
from cpkit.tools.copying.shape import Calls

__all__ = ["GRAVES", "CallCopier", "Conflict", "Destination", "Source", "Waiting"]

GRAVES = "cpkit:deleted"
"""The thread of a destination that keeps the keys of threads deleted in the source."""

# More lost attempts at one key than this are somebody's mistake, not a history.
_LONGEST_GAP = 1000


class Source(ListsThreads, Protocol):
    """What can be copied from: a store that keeps receipts, or an export."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None: ...

    async def list_calls(self, thread_id: str) -> list[CallRecord]: ...


class Destination(Checkpointer[Any], KeepsReceipts, Protocol):
    """What is copied into."""


class Waiting(NamedTuple):
    """A call that comes before its turn; its payload is fetched when that comes."""

    attempt: int
    thread_id: str
    call_id: str


class Conflict(Exception):
    """The destination has something else; the message says what."""


class CallCopier:
    """Puts calls into a destination; safe to repeat from any point."""

    def __init__(
        self, source: Source, destination: Destination, report: CopyReport
    ) -> None:
        self._from = source
        self._to = destination
        self._report = report
        # By key: its last attempt that is known to be there and failed. Only after a
        # failed one there is a next.
        self._reached: dict[str, int] = {}
        self._graves: Calls = {}
        self._buried: dict[str, CallRecord] = {}
        self.waiting: set[Waiting] = set()

    async def survey(self) -> None:
        """Learn which deleted calls an earlier copy has carried."""
        self._graves = await self.there(GRAVES)

    async def there(self, thread_id: str) -> Calls:
        """Return what the destination has of a thread's calls."""
        calls = await self._to.list_calls(thread_id)

        for one in calls:
            self._reach(one)

        return {one.call.call_id: one for one in calls}

    async def check_keys(self, calls: list[CallRecord], there: Calls) -> None:
        """Raise ``Conflict`` where another call of the destination holds a key.

        Asked before anything is written, so that such a thread is left alone.
        """
        ours = {_own_place(one) for one in calls}

        for record in calls:
            if record.erased or record.call.call_id in there:
                continue

            holder = await self._to.find_call(record.call.idempotency_key)

            if holder is None or _own_place(holder) in ours:
                continue

            if not await self._is_of_source(holder):
                raise _held(record.call, holder)

    async def put(self, calls: Iterable[CallRecord], there: Calls) -> bool:
        """Carry a thread's calls; have those wait that come before their turn.

        Returns whether anything was not in ``there`` yet. Raises ``Conflict``.
        """
        has_news = False

        for record in calls:
            place = _place(record)
            known = self._graves if place[0] == GRAVES else there

            if place[1] in known or not self._missing(record):
                has_news |= await self._put(record)
                # Another copy may have carried it since, or its outcome.
                has_news |= place[0] != GRAVES and not _has(there, record)
            else:
                self.waiting.add(_turn(record))
                has_news = True

        return has_news

    def is_waiting(self, record: CallRecord) -> bool:
        """Tell whether a call has not been carried because its turn comes later."""
        return _turn(record) in self.waiting

    async def put_late(self, record: CallRecord) -> None:
        """Carry a call that waited, now that all threads were seen."""
        missing = self._missing(record)

        if len(missing) > _LONGEST_GAP:
            raise Conflict(
                f"call {record.call.call_id!r} is attempt {record.attempt}, and "
                f"{len(missing)} attempts before it are in no thread"
            )

        for attempt in missing:
            await self._fill(record.call, attempt)

        await self._put(record)

    async def bury(self) -> None:
        """Have what is left of deleted calls marked as erased, and check it."""
        if not self._buried:
            return

        if isinstance(self._to, ErasesThreads):
            await self._to.delete_thread(GRAVES)
        else:
            self._report.notes.append(
                f"{len(self._buried)} calls of deleted threads keep their keys, but "
                "not the mark of being erased: the destination cannot delete threads"
            )

        there = await self.there(GRAVES)

        for call_id, record in self._buried.items():
            found = there.get(call_id)

            if found is None or (found.status, found.attempt) != (
                record.status,
                record.attempt,
            ):
                reason = f"erased call {call_id!r} is not there as it was"
                self._report.failures.append(Problem(record.thread_id, reason))

    async def _put(self, record: CallRecord) -> bool:
        thread_id, call_id = _place(record)
        call = record.call
        # Erased content is none; what stands for it is erased again in the end.
        found = await self._claim(
            thread_id,
            ToolCall(
                call_id,
                call.tool_name,
                {} if record.erased else call.args,
                call.idempotency_key,
            ),
        )

        is_open = record.status != "issued" and (
            found is None or found.status == "issued"
        )

        if is_open:
            await self._to.record_result(
                thread_id,
                call_id,
                None if record.erased else record.result,
                success=record.status == "completed",
            )

        self._reach(record)

        if thread_id == GRAVES:
            self._buried[call_id] = record

        return found is None or is_open

    async def _fill(self, call: ToolCall, attempt: int) -> None:
        """Put a failed attempt where the source has none any more."""
        call_id = f"gap:{_digest(call.idempotency_key)}:{attempt}"
        key = call.idempotency_key
        await self._claim(GRAVES, ToolCall(call_id, call.tool_name, {}, key))
        self._buried[call_id] = await self._to.record_result(
            GRAVES, call_id, None, success=False
        )

    async def _claim(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        try:
            found = await self._to.record_issued(thread_id, call)
        except CallMismatch as exc:
            raise Conflict(str(exc)) from exc

        if found is None:
            self._report.calls += thread_id != GRAVES
            self._report.erased_calls += thread_id == GRAVES
        elif _own_place(found) != (thread_id, call.call_id):
            raise _held(call, found)

        return found

    async def _is_of_source(self, holder: CallRecord) -> bool:
        """Tell whether a holder was carried, by a copy that died before its outcome."""
        if holder.thread_id == GRAVES:
            return True  # or not, as the claim will show

        call = holder.call
        return any(
            (one.call.call_id, one.call.idempotency_key)
            == (call.call_id, call.idempotency_key)
            for one in await self._from.list_calls(holder.thread_id)
        )

    def _missing(self, record: CallRecord) -> range:
        reached = self._reached.get(record.call.idempotency_key, 0)
        return range(reached + 1, record.attempt)

    def _reach(self, record: CallRecord) -> None:
        if record.status == "failed":
            key = record.call.idempotency_key
            self._reached[key] = max(record.attempt, self._reached.get(key, 0))


def _held(call: ToolCall, holder: CallRecord) -> Conflict:
    return Conflict(
        f"the key of call {call.call_id!r} is held in the destination by call "
        f"{holder.call.call_id!r} of thread {holder.thread_id!r}"
    )


def _has(there: Calls, record: CallRecord) -> bool:
    found = there.get(record.call.call_id)
    return found is not None and found.status == record.status


def _own_place(record: CallRecord) -> tuple[str, str]:
    return record.thread_id, record.call.call_id


def _turn(record: CallRecord) -> Waiting:
    return Waiting(record.attempt, *_own_place(record))


def _place(record: CallRecord) -> tuple[str, str]:
    """Return the thread and the id under which the destination has the call."""
    if not record.erased or record.thread_id == GRAVES:
        return _own_place(record)

    return GRAVES, f"erased:{_digest(chr(0).join(_own_place(record)))}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
