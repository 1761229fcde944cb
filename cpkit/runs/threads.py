"""The list of runs: which threads need a run, who runs them, and what they wait for.

The run of a thread T has a thread of its own, ``cpkit:run:T``, that exists only while
something of it is open. So the threads with this prefix are the list of open runs.

- A pending call is the term of T's lease (`cpkit.lease`). The claim starts the term,
  and a failed result ends it. The holder's heartbeat is in the extra.
- The messages are events, in the order of the store:
    - ``{"wake": {"why": …}}``: T needs a run. It was submitted, its run died or ended
      with an error.
    - ``{"asks": {"request": call id, …}}``: a run of T waits for an approval request.
      T needs a run once the request is decided.
    - ``{"settled": call id}``: no run of T waits for this request any more.
    - ``{"ran": [position, …], "saw": [call id, …]}``: a run has ended well. The wakes
      at these positions are done, and so are these requests.

A run that ended well and left nothing open deletes the thread, unless another event
came meanwhile. Numbers of terms go on: the store keeps the records of erased calls.

The messages of ``cpkit:runs`` are hints for workers: what to look at first. They may
get lost, and the thread starts again after a thousand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, TypeVar
from uuid import uuid4

from cpkit.driver.ids import MAX_ID_BYTES
from cpkit.errors import (
    CheckpointerError,
    CorruptThread,
    UnknownCall,
    VersionConflict,
)
from cpkit.protocol import Checkpointer, ErasesThreads, ListsThreads
from cpkit.records import CallRecord, CheckpointData, JsonValue, ToolCall
from cpkit.runs.waiting import STALE_AFTER, retry_unclear

__all__ = [
    "HINTS",
    "RUNS",
    "TAKEN_OVER",
    "TERM",
    "Ask",
    "RunList",
    "RunState",
    "RunThread",
    "Wake",
    "hint",
    "holder_of",
    "read_all",
    "store_time",
    "stale_after_of",
    "wake_run",
]

log = logging.getLogger("cpkit.lease")  # as the module that people use

RUNS = "cpkit:run"
"""Prefix of the threads of runs."""

HINTS = "cpkit:runs"
"""The thread of hints for workers."""

TERM = "cpkit:lease"
"""The tool name of a lease's term."""

TAKEN_OVER = "taken over: its holder fell silent"

T = TypeVar("T")
R = TypeVar("R")

_PAGE = 500
_AT_A_TIME = 8  # reads in parallel, to hide a server's round trips
_MAX_HINTS = 1_000


@dataclass(frozen=True, slots=True)
class Wake:
    """Why a thread needs a run: ``submitted``, ``died``, ``ended: …``.

    ``event`` is what was recorded for the run, ``by`` the program that did. With
    ``after``, the run is not due before this time.
    """

    why: str
    event: JsonValue = None
    by: str | None = None
    after: datetime | None = None
    position: int = 0

    @property
    def is_due(self) -> bool:
        """Whether its time has come, by this process's clock."""
        return self.after is None or self.after <= datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Ask:
    """An approval request that a run waits for: request ``number`` of an effect.

    ``request`` is the call id of the request, ``key`` the effect's key. ``thread_id``
    is the thread that has the request.
    """

    request: str
    key: str
    number: int
    thread_id: str


@dataclass(frozen=True, slots=True)
class RunState:
    """What the thread of a run shows."""

    thread_id: str | None = None
    version: int = 0
    term: CallRecord | None = None
    heartbeat: JsonValue = None
    wakes: tuple[Wake, ...] = ()
    asks: dict[str, Ask] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        """How many runs in a row have failed, with nothing else to run for."""
        count = 0

        for wake in reversed(self.wakes):
            if not wake.why.startswith("ended"):
                return count

            count += 1

        return count

    def same_term_and_heartbeat(self, other: RunState) -> bool:
        """Tell whether the lease was neither renewed nor ended between the two."""
        return (self.term, self.heartbeat) == (other.term, other.heartbeat)


class RunThread:
    """The thread of one run: its lease's terms, and its events."""

    def __init__(self, cp: Checkpointer[Any], thread_id: str) -> None:
        self.thread_id = thread_id
        self.name = f"{RUNS}:{thread_id}"

        if len(self.name.encode()) > MAX_ID_BYTES:
            self.name = f"{RUNS}-of:{sha256(thread_id.encode()).hexdigest()}"

        self._cp = cp

    async def look(self) -> RunState:
        """Read the current state."""
        return state_of(await self._cp.load(self.name))

    # Events

    async def add(self, **event: JsonValue) -> int:
        """Record an event, and return its position.

        If an answer was lost it is recorded twice, which changes nothing.
        """
        event["thread_id"] = self.thread_id
        return await retry_unclear(lambda: self._cp.append(self.name, [event])) - 1

    async def start_again(self, version: int) -> bool:
        """Delete the thread, which has nothing open; return whether the store can.

        Only the holder of the lease may do this: a term would be deleted with it.
        Raises ``VersionConflict`` if another event was recorded meanwhile.
        """
        cp = self._cp

        if not isinstance(cp, ErasesThreads):
            return False

        await cp.delete_thread(self.name, expected_version=version)
        return True

    # Terms

    def new_term(self, holder: str, stale_after: float) -> ToolCall:
        """Return the call of a new term."""
        return ToolCall(
            f"lease:{uuid4().hex}",
            TERM,
            {
                "thread_id": self.thread_id,
                "holder": holder,
                "stale_after": stale_after,
            },
            sha256(f"cpkit:lease:{self.thread_id}".encode()).hexdigest(),
        )

    async def claim(self, term: ToolCall) -> CallRecord | None:
        """Try to start a term; return ``None``, or the record that holds the lease."""
        return await retry_unclear(lambda: self._cp.record_issued(self.name, term))

    async def renew(self, term: ToolCall, count: int) -> None:
        """Write a heartbeat.

        All terms share one extra key, so that extra does not grow. A lost term may
        still write it, at most once. The successor's next renewal overwrites that.
        """
        await self._cp.save_extra(self.name, {"renewed": [term.call_id, count]})

    async def take_over(self, state: RunState) -> bool:
        """End the term of a runner that fell silent, and record that its run died.

        The event comes first: if this process dies too, another one sees it. Returns
        whether this call ended the term; else another runner did, and has the event.
        """
        assert state.term is not None
        position = await self.add(wake={"why": "died"})

        if await self.end(state.term.call.call_id, TAKEN_OVER):
            log.warning("took over the lease of %r", self.thread_id)
            return True

        await self.add(ran=[position], saw=[])
        return False

    async def end(self, call_id: str, reason: str) -> bool:
        """End a term, unless it has ended; return whether this call did."""
        result: JsonValue = {"released": reason, "by": uuid4().hex}

        try:
            record = await retry_unclear(
                lambda: self._cp.record_result(
                    self.name, call_id, result, success=False
                )
            )
        except UnknownCall:
            log.debug("no term %r of %r is on record", call_id, self.thread_id)
            return False

        return bool(record.result == result)


def state_of(data: CheckpointData[Any] | None) -> RunState:
    """Return the state that the thread of a run shows."""
    if data is None:
        return RunState()

    terms = [one for one in data.pending if one.call.tool_name == TERM]
    term = terms[-1] if terms else None
    thread_id = None if term is None else term.call.args.get("thread_id")
    wakes: list[Wake] = []
    asks: dict[str, Ask] = {}

    for position, event in enumerate(data.messages):
        match event:
            case {"wake": {"why": str(why), **rest}}:
                wakes.append(_wake_of(why, rest, position))
            case {
                "asks": {
                    "request": str(request),
                    "key": str(key),
                    "number": int(number),
                    "thread_id": str(place),
                }
            }:
                asks[request] = Ask(request, key, number, place)
            case {"settled": str(request)}:
                asks.pop(request, None)
            case {"ran": list(done), "saw": list(saw)}:
                wakes = [wake for wake in wakes if wake.position not in done]
                asks = {name: ask for name, ask in asks.items() if name not in saw}

        if isinstance(event, dict):
            thread_id = event.get("thread_id", thread_id)

    return RunState(
        thread_id if isinstance(thread_id, str) else None,
        data.version,
        term,
        data.extra.get("renewed"),
        tuple(wakes),
        asks,
    )


def _wake_of(why: str, rest: dict[Any, Any], position: int) -> Wake:
    after = rest.get("after")
    return Wake(
        why,
        rest.get("event"),
        rest.get("by"),
        datetime.fromisoformat(after) if isinstance(after, str) else None,
        position,
    )


def holder_of(record: CallRecord) -> str:
    """Return the name of a term's holder."""
    return str(record.call.args.get("holder", "another"))


def stale_after_of(record: CallRecord, default: float = STALE_AFTER) -> float:
    """Return the ``stale_after`` that the holder of a term or an attempt recorded."""
    recorded = record.call.args.get("stale_after")

    # Another program can have written anything. With 0, every lease would be stale.
    if isinstance(recorded, (int, float)) and 0 < recorded < 1e9:
        return float(recorded)

    return default


# Waking


async def wake_run(cp: Checkpointer[Any], thread_id: str, wake: Wake) -> None:
    """Record that a thread needs a run, and hint it to the workers."""
    stored: dict[str, JsonValue] = {"why": wake.why, "event": wake.event, "by": wake.by}

    if wake.after is not None:
        stored["after"] = wake.after.astimezone(UTC).isoformat()

    await RunThread(cp, thread_id).add(wake=stored)
    await hint(cp, run=thread_id)


async def hint(cp: Checkpointer[Any], **fact: JsonValue) -> None:
    """Tell the workers what to look at; if that fails, they find it later."""
    try:
        version = await cp.append(HINTS, [fact])

        if version >= _MAX_HINTS and isinstance(cp, ErasesThreads):
            await cp.delete_thread(HINTS, expected_version=version)
    except VersionConflict:
        pass  # another hint came, and its writer deletes them
    except CheckpointerError:
        log.warning("could not wake the workers", exc_info=True)


async def store_time(cp: Checkpointer[Any]) -> datetime | None:
    """Return the store's time; ``None`` from a store that cannot list its threads.

    Only a write shows it, so this writes a hint.
    """
    while isinstance(cp, ListsThreads):
        await retry_unclear(lambda: cp.append(HINTS, [{}]))
        listed = await cp.list_threads(prefix=HINTS, limit=1)

        if listed and listed[0].thread_id == HINTS:
            return listed[0].updated_at

    return None


# The list


class RunList:
    """The open runs of a store, by the names of their threads.

    It remembers what it read, and reads again only what has changed. ``prefix`` limits
    it to runs of threads whose ids start so.
    """

    def __init__(self, cp: Checkpointer[Any], prefix: str = "") -> None:
        if not isinstance(cp, ListsThreads):
            raise TypeError(f"{cp!r:.80} cannot list its threads, so it has no runs")

        self.states: dict[str, RunState] = {}
        self._cp: Any = cp
        self._prefix = prefix
        self._seen: dict[str, tuple[datetime, int]] = {}
        self._damaged: set[str] = set()

    async def refresh(self) -> None:
        """Read the list, and the runs that have changed since the last time."""
        seen: dict[str, tuple[datetime, int]] = {}

        # The run of a thread with a long id is listed under its hash.
        for prefix in (f"{RUNS}:{self._prefix}", f"{RUNS}-of:"):
            async for info in self._infos(prefix):
                seen[info.thread_id] = info.updated_at, info.version

        changed = [name for name, at in seen.items() if self._seen.get(name) != at]
        states = await read_all(self._state, changed)
        self._seen = seen

        for name, state in zip(changed, states, strict=True):
            self._put(name, state)

        for name in self.states.keys() - seen.keys():
            del self.states[name]

    async def reload(self, thread_id: str) -> None:
        """Read one run again."""
        if thread_id.startswith(self._prefix):
            name = RunThread(self._cp, thread_id).name
            self._seen.pop(name, None)
            self._put(name, await self._state(name))

    def mine(self) -> dict[str, RunState]:
        """Return the states by the thread to run; those of other prefixes are left."""
        return {
            state.thread_id: state
            for state in self.states.values()
            if state.thread_id is not None and state.thread_id.startswith(self._prefix)
        }

    async def _infos(self, prefix: str) -> AsyncIterator[Any]:
        after = None

        while page := await self._cp.list_threads(
            prefix=prefix, after=after, limit=_PAGE
        ):
            for info in page:
                yield info

            after = page[-1].thread_id

    def _put(self, name: str, state: RunState | None) -> None:
        if state is None:
            self.states.pop(name, None)
        else:
            self.states[name] = state

    async def _state(self, name: str) -> RunState | None:
        try:
            data = await self._cp.load(name)
        except CorruptThread:  # a person repairs it; the other threads go on
            if name not in self._damaged:
                self._damaged.add(name)
                log.exception("cannot read the run %r", name)

            return None

        if data is None:
            return None

        state = state_of(data)
        # Nothing else names the thread after a claim whose answer was lost.
        named = name.partition(f"{RUNS}:")[2] or None
        return replace(state, thread_id=state.thread_id or named)


async def read_all(read: Callable[[T], Awaitable[R]], items: Sequence[T]) -> list[R]:
    """Return what ``read`` returns for each item; a few reads run in parallel."""
    found: list[R] = []

    for start in range(0, len(items), _AT_A_TIME):
        part = items[start : start + _AT_A_TIME]
        found += await asyncio.gather(*map(read, part))

    return found
