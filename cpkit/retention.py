"""What a store may forget, and when.

::

    policy = Retention(older_than=timedelta(days=90), keep_last=1_000)
    planned = await prune(cp, policy, dry_run=True)
    print(planned)
    await prune(cp, policy)

Nothing is forgotten without a policy. ``cpkit prune`` and ``cpkit worker`` take the
same words, and `Worker` takes a `Retention`. A thread is deleted at the version that
was looked at: one that a writer changes meanwhile is left for the next time. A cut goes
on if messages were appended meanwhile that need nothing of what goes. Each thread is
done or not done, so a prune that was stopped is simply run again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any, NamedTuple

from pydantic_core import to_jsonable_python

from cpkit.driver.jsontext import encode_json
from cpkit.errors import CorruptThread, VersionConflict
from cpkit.fenced import read_part, read_range
from cpkit.protocol import (
    ErasesCalls,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    ReadsRanges,
    TrimsThreads,
)
from cpkit.records import CallRecord, ThreadInfo
from cpkit.runs.threads import RunList
from cpkit.toolcalls import (
    Call,
    Reading,
    Result,
    begins_turn,
    call_spans,
    read_message,
    time_of,
)
from cpkit.tools.formats import counted
from cpkit.tools.paging import INTERNAL, find_thread, gather_limited, thread_pages

__all__ = [
    "Pruned",
    "Retention",
    "check_abilities",
    "find_cut",
    "prune",
]

_SESSIONS = ("cpkit:openai-agents:", "cpkit:google-adk:", "cpkit:claude-agent-sdk:")
"""Threads of cpkit itself that may be cut: their adapters read what is left."""

_CHUNK = 500
"""Messages that are read at a time."""

_PATIENCE = 5.0
"""Seconds of tries to cut a thread that a writer appends to without a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What may go. Each field that is given adds something.

    ``older_than`` deletes threads without a write for so long. Their keys stay on
    record, so that no payment is repeated, unless ``forget_keys``. A thread with a
    pending call or an open run is kept, unless ``with_pending``.

    ``keep_last`` cuts the older messages of a thread and leaves at least the last so
    many. ``messages_older_than`` cuts messages by the time that they say of themselves;
    those that say none are cut with the next one that does. Both cut where a user's
    message begins a turn, and never between a tool call and its result; the last turn
    always stays. Where no message has a role, each begins a turn. Extra and calls stay.

    ``calls_older_than`` erases args and results of calls that ended so long ago; their
    keys and status stay. An effect whose result is erased is never run again: it raises
    ``EffectErased``. A thread with a pending call or an open run keeps all of them.

    ``prefix`` limits it to threads whose ids start so. Threads of cpkit itself
    (``cpkit:…``) are deleted only if the prefix names them. Of these, only sessions of
    the OpenAI Agents SDK, the ADK and the Claude Agent SDK are cut.
    """

    prefix: str = ""
    older_than: timedelta | None = None
    keep_last: int | None = None
    messages_older_than: timedelta | None = None
    calls_older_than: timedelta | None = None
    forget_keys: bool = False
    with_pending: bool = False

    def __post_init__(self) -> None:
        for name in ("older_than", "messages_older_than", "calls_older_than"):
            value = getattr(self, name)

            if value is not None and not isinstance(value, timedelta):
                raise TypeError(f"{name} is a timedelta, not {value!r}")

            if value is not None and not timedelta() <= value <= _LONGEST:
                raise ValueError(f"{name} must be from 0 to 1000 years, not {value}")

        if self.keep_last is not None and (
            type(self.keep_last) is not int or self.keep_last < 1
        ):
            raise ValueError(f"keep_last is a number from 1 on, not {self.keep_last!r}")

        if not (self.deletes or self.cuts or self.erases):
            raise ValueError(
                "nothing may go: give older_than, keep_last, messages_older_than or "
                "calls_older_than"
            )

    @property
    def deletes(self) -> bool:
        """Whether it deletes threads."""
        return self.older_than is not None

    @property
    def cuts(self) -> bool:
        """Whether it cuts messages."""
        return self.keep_last is not None or self.messages_older_than is not None

    @property
    def erases(self) -> bool:
        """Whether it erases the content of calls."""
        return self.calls_older_than is not None

    @property
    def abilities(self) -> list[type]:
        """The optional protocols that a store needs for it."""
        needed: list[type] = [ListsThreads]
        needed += [KeepsReceipts, ErasesThreads] if self.deletes else []
        needed += [KeepsReceipts, ErasesCalls] if self.erases else []
        return needed + ([TrimsThreads] if self.cuts else [])


_LONGEST = timedelta(days=365_000)


@dataclass
class Pruned:
    """What was forgotten, or with ``dry_run`` what would be, and what was kept.

    ``threads`` were deleted with their ``messages``; of ``cut_threads`` the
    ``cut_messages`` went; ``erased_calls`` lost their content. ``bytes`` of JSON are
    counted in a dry run only. ``pending``, ``touched`` and ``damaged`` are ids of
    threads that were kept: they have a pending call or an open run, were written to
    meanwhile, or cannot be read (with the reason).
    """

    dry_run: bool
    threads: int = 0
    messages: int = 0
    cut_threads: int = 0
    cut_messages: int = 0
    erased_calls: int = 0
    bytes: int | None = None
    pending: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything went, or would go."""
        return bool(self.threads or self.cut_threads or self.erased_calls)

    def __str__(self) -> str:
        parts = []

        if self.threads or not self:
            messages = counted(self.messages, "message")
            parts.append(f"{counted(self.threads, 'thread')} with {messages}")

        if self.cut_threads:
            threads = counted(self.cut_threads, "thread")
            parts.append(
                f"the first {counted(self.cut_messages, 'message')} of {threads}"
            )

        if self.erased_calls:
            parts.append(f"the content of {counted(self.erased_calls, 'call')}")

        size = "" if self.bytes is None else f" ({self.bytes:,} bytes of JSON)"
        return f"{' and '.join(parts)}{size}"


async def prune(
    cp: Any,
    policy: Retention,
    *,
    dry_run: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Pruned:
    """Apply a policy to every thread of a store, and return what went.

    ``progress`` is called with the number of threads looked at, page by page. A damaged
    thread is named in the report and kept; it does not hide the others. A store that
    cannot do what the policy asks is a ``TypeError``.
    """
    check_abilities(cp, policy)
    now = datetime.now(UTC)
    pass_ = _Pass(cp, policy, now, Pruned(dry_run, bytes=0 if dry_run else None))

    if policy.deletes or policy.erases:
        pass_.in_use = await _threads_in_use(cp)

    async for page in thread_pages(cp, prefix=policy.prefix, internal=False):
        await gather_limited(pass_.prune_thread, page)

        if progress is not None:
            progress(len(page))

    report = pass_.report
    report.pending.sort()
    report.touched.sort()
    report.damaged.sort()
    return report


def check_abilities(cp: object, policy: Retention) -> None:
    """Raise ``TypeError`` if a store cannot do what a policy asks."""
    for ability in policy.abilities:
        if not isinstance(cp, ability):
            raise TypeError(
                f"{cp!r:.80} has not {ability.__name__}: it cannot prune so"
            )


async def _threads_in_use(cp: Any) -> set[str]:
    """Return the threads with an open run, or with a request that a run waits for."""
    runs = RunList(cp)
    await runs.refresh()
    states = runs.mine()
    asks = [ask for state in states.values() for ask in state.asks.values()]
    return {*states, *(ask.thread_id for ask in asks)}


@dataclass
class _Pass:
    """One pass of a policy over a store."""

    cp: Any
    policy: Retention
    now: datetime
    report: Pruned
    in_use: set[str] = field(default_factory=set)

    async def prune_thread(self, info: ThreadInfo) -> None:
        """Delete the thread or cut its messages, if the policy says so."""
        try:
            age, limit = self.now - info.updated_at, self.policy.older_than

            if limit is not None and age > limit:
                await self._delete(info)
            elif not info.thread_id.startswith(INTERNAL) or (
                info.thread_id.startswith(_SESSIONS)
            ):
                if self.policy.erases:
                    await self._erase_calls(info)

                if self.policy.cuts:
                    await self._cut(info)
        except CorruptThread as exc:
            self.report.damaged.append(str(exc))
        except VersionConflict:
            self.report.touched.append(info.thread_id)

    async def _delete(self, info: ThreadInfo) -> None:
        thread_id, report = info.thread_id, self.report

        if not self.policy.with_pending and await self._is_in_use(thread_id):
            report.pending.append(thread_id)
            return

        first = 0

        with suppress(CorruptThread):  # a damaged thread is deleted, too
            first, _ = await read_part(self.cp, thread_id, 0, 0)

        if report.bytes is not None:
            report.bytes += await self._size(thread_id, first, info.version)
        else:
            # A change of extra or a call does not change the version.
            found = await find_thread(self.cp, thread_id)

            if found is None:
                return  # another process deleted it

            if found != info:
                report.touched.append(thread_id)
                return

            await self.cp.delete_thread(
                thread_id,
                expected_version=info.version,
                forget_keys=self.policy.forget_keys,
            )

        report.threads += 1
        report.messages += info.version - first

    async def _erase_calls(self, info: ThreadInfo) -> None:
        assert self.policy.calls_older_than is not None
        thread_id, before = info.thread_id, self.now - self.policy.calls_older_than

        if info.created_at >= before:
            return

        is_in_use = thread_id in self.in_use or await _has_pending(self.cp, thread_id)

        if not is_in_use and self.report.bytes is None:
            self.report.erased_calls += await self.cp.erase_calls(
                thread_id, before, expected_version=info.version
            )
            return

        calls: list[CallRecord] = await self.cp.list_calls(thread_id)
        old = [one for one in calls if _is_old(one, before)]

        if old and is_in_use:
            self.report.pending.append(thread_id)
        elif self.report.bytes is not None:
            self.report.erased_calls += len(old)
            content = [part for one in old for part in (one.call.args, one.result)]
            self.report.bytes += sum(len(encode_json(one, ())) for one in content)

    async def _is_in_use(self, thread_id: str) -> bool:
        calls = await self.cp.list_calls(thread_id)
        is_open = any(one.status == "issued" and not one.erased for one in calls)
        return thread_id in self.in_use or is_open

    async def _cut(self, info: ThreadInfo) -> None:
        thread_id, version = info.thread_id, info.version
        first, _ = await read_part(self.cp, thread_id, 0, 0)
        want = first

        if self.policy.keep_last is not None:
            want = max(want, version - self.policy.keep_last)

        if self.policy.messages_older_than is not None:
            cutoff = self.now - self.policy.messages_older_than
            want = max(want, await self._first_since(info, first, cutoff))

        places: deque[_Place] = deque()
        cut = await _find_cut(self.cp, thread_id, want, first, version, places)

        if cut == first:
            return

        if self.report.bytes is not None:
            self.report.bytes += await self._size(thread_id, first, cut)
            gone = cut - first
        else:
            stay = (one.reading for one in places if one.position >= cut)
            calls = {_name(call) for reading in stay for call in reading.calls}
            gone = await self._trim(info, cut, calls)

        self.report.cut_threads += bool(gone)
        self.report.cut_messages += gone

    async def _trim(self, info: ThreadInfo, cut: int, calls: set[str]) -> int:
        """Trim a thread of which these calls stay, also if a writer appends meanwhile.

        What is new changes nothing, unless it has the result of a call that would go.
        """
        thread_id, version = info.thread_id, info.version
        end = monotonic() + _PATIENCE

        while True:
            try:
                gone: int = await self.cp.trim(thread_id, cut, expected_version=version)
                return gone
            except VersionConflict:
                start, new = await read_part(self.cp, thread_id, version)

                # It was deleted, or cut further, or never at rest.
                if not new or start > version or monotonic() > end:
                    raise

                for message in new:
                    reading = read_message(_json(message))
                    calls.update(map(_name, reading.calls))

                    if not calls.issuperset(map(_name, reading.results)):
                        raise

                version += len(new)

    async def _first_since(self, info: ThreadInfo, first: int, cutoff: datetime) -> int:
        """Return the position after the last message that is known to be older."""
        after = first

        for start in range(first, info.version, _CHUNK):
            stop = min(start + _CHUNK, info.version)
            messages = await read_range(self.cp, info.thread_id, start, stop)

            for position, message in enumerate(messages):
                time = time_of(_json(message))

                if time is not None and time >= cutoff:
                    return after

                if time is not None:
                    after = start + position + 1

        return after

    async def _size(self, thread_id: str, start: int, stop: int) -> int:
        """Return the bytes of messages as JSON."""
        total = 0

        for at in range(start, stop, _CHUNK):
            stop_at = min(at + _CHUNK, stop)
            part = await read_range(self.cp, thread_id, at, stop_at)
            total += sum(len(encode_json(_json(one), ())) for one in part)

        return total


def _is_old(record: CallRecord, before: datetime) -> bool:
    ended_at = record.resolved_at
    return not record.erased and ended_at is not None and ended_at < before


async def _has_pending(cp: Any, thread_id: str) -> bool:
    if isinstance(cp, ReadsRanges):
        data = await cp.load_range(thread_id, stop=0)
    else:
        data = await cp.load(thread_id)

    return data is not None and bool(data.pending)


def _json(message: Any) -> Any:
    """Return a message as JSON, also that of a handle with a message type."""
    return message if isinstance(message, dict) else to_jsonable_python(message)


# Where a thread may be cut


class _Place(NamedTuple):
    """What a message says of turns and calls."""

    position: int
    reading: Reading
    begins: bool | None
    """Whether a user begins a turn with it; ``None`` if it has no role."""


async def find_cut(cp: Any, thread_id: str, want: int, first: int, version: int) -> int:
    """Return the last position up to ``want`` at which a thread may be cut.

    That is the begin of a turn, with no call before it whose result comes after it;
    ``first`` if the thread has no such position. It reads what stays, and back to the
    begin of its turn.
    """
    return await _find_cut(cp, thread_id, want, first, version, deque())


async def _find_cut(
    cp: Any, thread_id: str, want: int, first: int, version: int, places: deque[_Place]
) -> int:
    """Find a cut, and fill ``places`` with what was read."""
    missing: Counter[str] = Counter()  # results of these ids have no call so far
    start = version

    while want > first and start > first:
        stop, start = start, max(first, start - _CHUNK)
        messages = await read_range(cp, thread_id, start, stop)

        if len(messages) < stop - start:
            return first  # another process has cut or deleted the thread

        for position in reversed(range(start, stop)):
            place = _place(position, messages[position - start])
            places.appendleft(place)
            missing.update(map(_name, place.reading.results))
            missing.subtract(n for n in map(_name, place.reading.calls) if missing[n])

            if position <= want and not missing.total() and _begins(place, places):
                return position

    # A call is missing, or has two results: pair them from the begin.
    spans = call_spans((one.position, one.reading) for one in places)
    inside = {at for call, result in spans for at in range(call + 1, result + 1)}
    found = [
        one.position
        for one in places
        if one.position <= want and one.position not in inside and _begins(one, places)
    ]
    return max(found, default=first)


def _place(position: int, message: Any) -> _Place:
    message = _json(message)
    return _Place(position, read_message(message), begins_turn(message))


def _begins(place: _Place, places: Collection[_Place]) -> bool:
    """Return whether a turn begins at a place; each does where none has a role."""
    return bool(place.begins) or all(one.begins is None for one in places)


def _name(one: Call | Result) -> str:
    return one.call_id or one.tool_name
