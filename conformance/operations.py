"""Every kind of write, and every read: two tables that the clauses iterate over.

A clause that says *every write* or *every read* takes it from here. A test of the suite
fails where a method of the protocols, or an option of a write, is in no row.

A write is done at a `Place`: ids that follow from one token, so that another process
needs the token only. What it leaves is compared with what the in-memory store has after
the same write.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Any, NamedTuple

from conformance.case import Store
from conformance.difference import difference
from conformance.failure import Failure
from conformance.sample_dumps import made_call, made_dump
from cpkit import (
    ErasesCalls,
    ErasesThreads,
    JsonValue,
    KeepsReceipts,
    ListsThreads,
    MemoryCheckpointer,
    MovesThreads,
    ReadsRanges,
    ThreadDump,
    ToolCall,
    TrimsThreads,
)

__all__ = [
    "LATER",
    "QUIET",
    "READS",
    "VERSION",
    "WRITES",
    "Place",
    "Read",
    "Write",
    "prepare",
    "reads_of",
    "state",
    "tell_outcome",
    "writes_of",
]

VERSION = 2
"""The version of a prepared thread."""


class Place(NamedTuple):
    """The ids that a write uses; each contains the token.

    `prepare` gives ``thread`` two messages, extra, and a failed, a completed and an
    issued call. ``gone`` is a deleted thread with an issued call, for the writes that
    need it. ``fresh`` has nothing.
    """

    token: str

    @property
    def thread(self) -> str:
        return f"thread-{self.token}"

    @property
    def fresh(self) -> str:
        return f"fresh-{self.token}"

    @property
    def gone(self) -> str:
        return f"gone-{self.token}"

    @property
    def keys(self) -> list[str]:
        """The keys of the failed, the completed, the issued and a new call."""
        return [f"{word}-{self.token}" for word in ("freed", "paid", "held", "new")]

    def call(self, key: int, attempt: int = 1) -> ToolCall:
        """Return an attempt of a key, by its number in ``keys``."""
        args: dict[str, JsonValue] = {"secret": [f"{key}.{attempt}", 1.0]}
        name = self.keys[key]
        return ToolCall(f"call-{attempt}-{name}", "pay", args, name)

    def dump(self) -> ThreadDump:
        """Return what a restore writes to ``fresh``."""
        call = self.call(3)
        record = made_call(self.fresh, "completed", key=call.idempotency_key, result=1)
        # A call id that follows from the token, so that two restores are the same.
        record = type(record)(
            self.fresh,
            call,
            "completed",
            1,
            record.issued_at,
            {"receipt": 3},
            record.resolved_at,
        )
        return made_dump(self.fresh, record, messages=[{"n": 7}], extra={"a": "dumped"})


Run = Callable[[Store, Place, int], Awaitable[Any]]
"""Does a write; the number is the version that a fenced write expects."""


@dataclass(frozen=True)
class Write:
    """A kind of write. ``at`` names the thread of the place that it changes."""

    name: str
    method: str
    options: frozenset[str]
    run: Run
    at: str = "thread"
    needs: type | None = None

    @property
    def is_fenced(self) -> bool:
        return "expected_version" in self.options

    async def do(self, cp: Store, place: Place, version: int = VERSION) -> Any:
        """Do the write once, and return its answer."""
        return await self.run(cp, place, version)


def _write(
    name: str,
    method: str,
    run: Run,
    *options: str,
    at: str = "thread",
    needs: type | None = None,
) -> Write:
    return Write(name, method, frozenset(options), run, at, needs)


MORE = [{"n": 3}, {"n": 4}]
LATER = datetime(9000, 1, 1, tzinfo=UTC)
"""After the outcome of every call."""

QUIET = {"trim", "erase_calls"}
"""Methods that are not a change by the agent: updated_at stays, and no watch yields."""

EXTRA: dict[str, JsonValue] = {"a": "changed", "b": [2]}

WRITES = [
    _write("append", "append", lambda cp, at, _: cp.append(at.thread, MORE)),
    _write(
        "append with extra",
        "append",
        lambda cp, at, _: cp.append(at.thread, MORE, extra=EXTRA),
        "extra",
    ),
    _write(
        "append at a version",
        "append",
        lambda cp, at, version: cp.append(at.thread, MORE, expected_version=version),
        "expected_version",
    ),
    _write(
        "append with extra at a version",
        "append",
        lambda cp, at, version: cp.append(
            at.thread, MORE, expected_version=version, extra=EXTRA
        ),
        "expected_version",
        "extra",
    ),
    _write(
        "append of extra alone",
        "append",
        lambda cp, at, _: cp.append(at.thread, [], extra=EXTRA),
        "extra",
    ),
    _write(
        "append of extra alone at a version",
        "append",
        lambda cp, at, version: cp.append(
            at.thread, [], expected_version=version, extra=EXTRA
        ),
        "expected_version",
        "extra",
    ),
    _write(
        "save_extra", "save_extra", lambda cp, at, _: cp.save_extra(at.thread, EXTRA)
    ),
    _write(
        "claim",
        "record_issued",
        lambda cp, at, _: cp.record_issued(at.thread, at.call(3)),
    ),
    _write(
        "claim of a freed key",
        "record_issued",
        lambda cp, at, _: cp.record_issued(at.thread, at.call(0, 2)),
    ),
    _write(
        "result",
        "record_result",
        lambda cp, at, _: cp.record_result(at.thread, at.call(2).call_id, {"paid": 2}),
    ),
    _write(
        "failed result",
        "record_result",
        lambda cp, at, _: cp.record_result(
            at.thread, at.call(2).call_id, "no", success=False
        ),
        "success",
    ),
    _write(
        "deletion",
        "delete_thread",
        lambda cp, at, _: cp.delete_thread(at.thread),
        needs=ErasesThreads,
    ),
    _write(
        "deletion at a version",
        "delete_thread",
        lambda cp, at, version: cp.delete_thread(at.thread, expected_version=version),
        "expected_version",
        needs=ErasesThreads,
    ),
    _write(
        "deletion with its keys",
        "delete_thread",
        lambda cp, at, _: cp.delete_thread(at.thread, forget_keys=True),
        "forget_keys",
        needs=ErasesThreads,
    ),
    _write(
        "deletion with its keys at a version",
        "delete_thread",
        lambda cp, at, version: cp.delete_thread(
            at.thread, expected_version=version, forget_keys=True
        ),
        "expected_version",
        "forget_keys",
        needs=ErasesThreads,
    ),
    _write("trim", "trim", lambda cp, at, _: cp.trim(at.thread, 1), needs=TrimsThreads),
    _write(
        "trim of all",
        "trim",
        lambda cp, at, _: cp.trim(at.thread, 99),
        needs=TrimsThreads,
    ),
    _write(
        "trim at a version",
        "trim",
        lambda cp, at, version: cp.trim(at.thread, 1, expected_version=version),
        "expected_version",
        needs=TrimsThreads,
    ),
    _write(
        "erasure of calls",
        "erase_calls",
        lambda cp, at, _: cp.erase_calls(at.thread, LATER),
        needs=ErasesCalls,
    ),
    _write(
        "erasure of calls at a version",
        "erase_calls",
        lambda cp, at, version: cp.erase_calls(
            at.thread, LATER, expected_version=version
        ),
        "expected_version",
        needs=ErasesCalls,
    ),
    _write(
        "restore",
        "restore_thread",
        lambda cp, at, _: cp.restore_thread(at.dump()),
        at="fresh",
        needs=MovesThreads,
    ),
    _write(
        "result of an erased call",
        "record_result",
        lambda cp, at, _: cp.record_result(at.gone, at.call(3).call_id, "late"),
        at="gone",
        needs=ErasesThreads,
    ),
]
"""Every kind of write that changes something."""


@dataclass(frozen=True)
class Read:
    """A read of a thread, or of a key."""

    name: str
    method: str
    run: Callable[[Store, str], Awaitable[Any]]
    of_key: bool = False
    needs: type | None = None


BESIDE = 12
"""Threads of a page that begins before a thread; ten differ in the last digit."""


async def _page_behind(cp: Store, thread: str) -> Any:
    """List a thread by the ids before it, and not by its prefix."""
    page = await cp.list_threads(after=thread[:-1], limit=BESIDE)
    return [one for one in page if one.thread_id == thread]


READS = [
    Read("load", "load", lambda cp, one: cp.load(one)),
    Read("an append of nothing", "append", lambda cp, one: cp.append(one, [])),
    Read("read", "read", lambda cp, one: cp.read(one), needs=ReadsRanges),
    Read("read(-1)", "read", lambda cp, one: cp.read(one, -1), needs=ReadsRanges),
    Read(
        "load_range",
        "load_range",
        lambda cp, one: cp.load_range(one),
        needs=ReadsRanges,
    ),
    Read(
        "load_range(-1)",
        "load_range",
        lambda cp, one: cp.load_range(one, -1),
        needs=ReadsRanges,
    ),
    Read(
        "load_range(0, 1)",
        "load_range",
        lambda cp, one: cp.load_range(one, 0, 1),
        needs=ReadsRanges,
    ),
    Read(
        "load_range(stop=0)",
        "load_range",
        lambda cp, one: cp.load_range(one, stop=0),
        needs=ReadsRanges,
    ),
    Read(
        "list_calls",
        "list_calls",
        lambda cp, one: cp.list_calls(one),
        needs=KeepsReceipts,
    ),
    Read(
        "list_threads(prefix)",
        "list_threads",
        lambda cp, one: cp.list_threads(prefix=one),
        needs=ListsThreads,
    ),
    Read(
        "list_threads(prefix, erased)",
        "list_threads",
        lambda cp, one: cp.list_threads(prefix=one, erased=True),
        needs=ListsThreads,
    ),
    Read("list_threads(after)", "list_threads", _page_behind, needs=ListsThreads),
    Read(
        "dump_thread",
        "dump_thread",
        lambda cp, one: cp.dump_thread(one),
        needs=MovesThreads,
    ),
    Read(
        "find_completed", "find_completed", lambda cp, one: cp.find_completed(one), True
    ),
    Read(
        "find_call", "find_call", lambda cp, one: cp.find_call(one), True, KeepsReceipts
    ),
]
"""Every read. The version that an append of nothing returns is one too."""


def writes_of(cp: object) -> list[Write]:
    """Return the kinds of writes that a store has."""
    return [one for one in WRITES if one.needs is None or isinstance(cp, one.needs)]


def reads_of(cp: object) -> list[Read]:
    """Return the reads that a store has."""
    return [one for one in READS if one.needs is None or isinstance(cp, one.needs)]


async def prepare(cp: Store, place: Place, write: Write | None = None) -> Place:
    """Write what a write needs: all of it, or what is `Place.gone` for that one."""
    if write is not None and write.at == "gone":
        await cp.append(place.gone, [{"n": 1}])
        await cp.record_issued(place.gone, place.call(3))
        await cp.delete_thread(place.gone)
        return place

    await cp.append(place.thread, [{"n": 1}, {"n": 2}], extra={"a": 1, "kept": 1})

    for key in range(3):
        await cp.record_issued(place.thread, place.call(key))

    failed, done = place.call(0).call_id, place.call(1).call_id
    await cp.record_result(place.thread, failed, "refused", success=False)
    await cp.record_result(place.thread, done, {"receipt": 1})
    return place


def _looks(
    cp: Store, place: Place, at: str
) -> list[tuple[str, Callable[[], Awaitable[Any]]]]:
    """Return each read of a thread of the place, and of each key, by name."""
    found: list[tuple[str, Callable[[], Awaitable[Any]]]] = []

    for read in reads_of(cp):
        for one in place.keys if read.of_key else [getattr(place, at)]:
            name = f"{read.name} of {one.partition('-')[0]!r}"
            found.append((name, partial(read.run, cp, one)))

    return found


async def state(
    cp: Store, place: Place, at: str = "thread", random: Random | None = None
) -> dict[str, Any]:
    """Return the answer of every read as JSON values, without the token.

    The reads are begun at once. With ``random`` they are done one after another in any
    order, half of the time.
    """
    looks = _looks(cp, place, at)

    if random is None or random.random() < 0.5:
        answers = await asyncio.gather(*(look() for _, look in looks))
        found = dict(zip((name for name, _ in looks), answers, strict=True))
    else:
        random.shuffle(looks)
        found = {name: await look() for name, look in looks}

    told: dict[str, Any] = json.loads(
        json.dumps(_plain(found)).replace(place.token, "-")
    )
    return told


def _plain(value: Any) -> Any:
    """Return JSON values; a time is a text."""
    if value is None or isinstance(value, (str, int, float)):  # most values
        return value

    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}

    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]

    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}

    return value.isoformat() if isinstance(value, datetime) else value


def timeless(found: Any) -> Any:
    """Return a state without its times."""
    if isinstance(found, dict):
        return {
            name: one is not None if name.endswith("_at") else timeless(one)
            for name, one in found.items()
        }

    return [timeless(one) for one in found] if isinstance(found, list) else found


_EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}


async def _expected(write: Write) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states before and after a write, as the in-memory store has them."""
    if write.name not in _EXPECTED:
        async with MemoryCheckpointer[Any]() as opened:
            memory: Any = opened
            place = await prepare(memory, Place("expected"), write)
            before = timeless(await state(memory, place, write.at))
            await write.do(memory, place)
            after = timeless(await state(memory, place, write.at))
            _EXPECTED[write.name] = before, after

    return _EXPECTED[write.name]


async def tell_outcome(write: Write, found: dict[str, Any], where: str) -> bool:
    """Return whether a state is the one after the write, and not the one before.

    Raises `Failure` for any other state: a part of the write, or the write twice.
    """
    before, after = await _expected(write)
    seen = timeless(found)

    if not _unlike(seen, after):
        return True

    if not _unlike(seen, before):
        return False

    expected = min((before, after), key=lambda one: len(_unlike(seen, one)))
    name = _unlike(seen, expected)[0]
    place, one, other = difference(seen[name], expected[name]) or ("", "", "")
    which = "after" if expected is after else "before"
    raise Failure(
        f"the state before or after the write as a whole; {which} it, {name} has "
        f"{place}: {other}",
        f"{place}: {one}",
        f"{write.name}, {where}",
    )


def _unlike(seen: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of the reads that differ; a store may lack some of them."""
    return [name for name, answer in seen.items() if answer != expected[name]]
