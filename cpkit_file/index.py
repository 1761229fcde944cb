"""What a handle remembers of its folder and of each log, so that it reads only news."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from cpkit.driver import StoredCall
from cpkit_file import lines
from cpkit_file.lines import At
from cpkit_file.schema import log_name

__all__ = ["Calls", "Folder", "LogIndex", "Tail"]

# Logs that a handle remembers, at some hundred bytes a call.
_LOGS = 512
# Ids for listing threads, at some hundred bytes each.
_IDS = 100_000

Read: TypeAlias = Callable[[int, int], bytes]
"""Returns the bytes of a log at an offset."""


class Folder:
    """Where a store lies, and what a handle remembers of it.

    Unless ``durable``, appends are not synced one by one. ``ids`` has thread ids by the
    names of their logs, which never change.
    """

    def __init__(self, path: str, *, durable: bool) -> None:
        self.path = path
        self.durable = durable
        self.threads = os.path.join(path, "threads")
        self.claims = os.path.join(path, "claims")
        self.index = lru_cache(_LOGS)(LogIndex)
        self.ids: dict[str, str] = {}

    def remember(self, thread_id: str) -> str:
        """Return the name of the thread's log, and remember whose log that is."""
        if len(self.ids) >= _IDS:
            self.ids.clear()

        name = log_name(thread_id)
        self.ids[name] = thread_id
        return name


class Tail(NamedTuple):
    """Where intact lines end, where the thread stands there, the last line's seal."""

    end: int = 0
    at: At | None = None
    seal: bytes = b""


class LogIndex:
    """What is remembered of one file: its first line has a word that no other has.

    The file is on disk up to ``synced``; ``tail`` is an end that it had. ``calls`` has
    the calls up to ``scanned``, all of them on disk; it is filled under ``lock``.
    """

    def __init__(self, name: str, header: bytes) -> None:
        self.thread_id = lines.thread_of(header)

        if log_name(self.thread_id) != name:
            raise ValueError(f"it is the log of thread {self.thread_id!r}")

        self.synced = 0
        self.tail = Tail()
        self.lock = threading.Lock()
        self.scanned = len(header)
        self.calls = Calls(self.thread_id)


class _Place(NamedTuple):
    """A call without its content, and where in the log that is."""

    call: StoredCall
    args: tuple[int, int]
    result: tuple[int, int] | None


class Calls:
    """The calls of a log, learned line by line, in the order of claims."""

    def __init__(self, thread_id: str) -> None:
        self._thread_id = thread_id
        self._places: dict[str, _Place] = {}
        self._attempts: dict[tuple[str, int], str] = {}

    def learn(self, offset: int, line: bytes) -> None:
        """Take in a ``call`` line."""
        facts, start, stop = lines.call_line(line)
        span = (offset + start, stop - start)
        call_id = facts["call_id"]

        if "idempotency_key" not in facts:
            call, args, _ = self._places[call_id]
            call = call._replace(**facts)
            self._places[call_id] = _Place(call, args, None if call.erased else span)
            return

        known = {"args": b"{}", "result": None, "resolved_at": None, "erased": False}
        call = StoredCall(thread_id=self._thread_id, **(known | facts))
        self._places[call_id] = _Place(call, span, None)
        self._attempts[call.idempotency_key, call.attempt] = call_id

    def by_id(self, read: Read, call_id: str | None) -> StoredCall | None:
        place = self._places.get(call_id or "")
        return None if place is None else _fetch(read, place)

    def by_attempt(self, read: Read, key: str, attempt: int) -> StoredCall | None:
        return self.by_id(read, self._attempts.get((key, attempt)))

    def all(self, read: Read) -> list[StoredCall]:
        return [_fetch(read, place) for place in list(self._places.values())]

    def without_content(self) -> list[StoredCall]:
        return [place.call for place in list(self._places.values())]


def _fetch(read: Read, place: _Place) -> StoredCall:
    call, args, result = place

    if call.erased:
        return call

    found = None if result is None else read(*result)
    return call._replace(args=read(*args), result=found)
