"""What a handle remembers of one log, so that finding a call reads only what is new."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from cpkit.driver.writes import StoredCall
from cpkit_file.lines import ADD, CALL, KINDS, At, call_line, thread_of
from cpkit_file.names import log_name

if TYPE_CHECKING:
    from cpkit_file.log import Log

__all__ = ["Calls", "LogIndex"]


class _Place(NamedTuple):
    """A call without its content, and where in the log that stands."""

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
        """Take in a ``call`` line; raises ``ValueError`` where it is none."""
        facts, start, stop = call_line(line)
        span = (offset + start, stop - start)

        try:
            if "idempotency_key" in facts:
                self._add(facts, span)
            else:
                self._resolve(facts, span)
        except (KeyError, TypeError) as exc:
            raise ValueError(f"no call: {exc!r}") from exc

    def by_id(self, log: Log, call_id: str) -> StoredCall | None:
        place = self._places.get(call_id)
        return None if place is None else _fetch(log, place)

    def by_attempt(self, log: Log, key: str, attempt: int) -> StoredCall | None:
        call_id = self._attempts.get((key, attempt))
        return None if call_id is None else _fetch(log, self._places[call_id])

    def all(self, log: Log, *, pending: bool = False) -> list[StoredCall]:
        """Return every call, or those that wait for their outcome."""
        return [
            _fetch(log, place)
            for place in list(self._places.values())
            if not pending or (place.call.status == "issued" and not place.call.erased)
        ]

    def bare(self) -> list[StoredCall]:
        """Return every call without its content."""
        return [place.call for place in self._places.values()]

    def _add(self, facts: dict[str, Any], span: tuple[int, int]) -> None:
        call = StoredCall(
            self._thread_id,
            facts["call_id"],
            facts["tool_name"],
            b"{}",
            facts["idempotency_key"],
            facts["status"],
            facts["attempt"],
            facts["issued_at"],
            None,
            facts.get("resolved_at"),
            facts.get("erased", False),
        )
        self._places[call.call_id] = _Place(call, span, None)
        self._attempts[call.idempotency_key, call.attempt] = call.call_id

    def _resolve(self, facts: dict[str, Any], span: tuple[int, int]) -> None:
        place = self._places[facts["call_id"]]
        call = place.call._replace(
            status=facts["status"], resolved_at=facts["resolved_at"]
        )
        result = None if call.erased else span
        self._places[call.call_id] = _Place(call, place.args, result)


class LogIndex:
    """The calls of one file, which its first line tells from every other file.

    That line holds the thread id and a random word, so a log that was deleted and
    begun again has another index. ``synced`` is up to where this handle knows the file
    to be on disk, and no call beyond that is in the index; ``tail`` is an end that the
    log had, and where the thread stood there. Several worker threads may use an index
    at once.

    Raises ``ValueError`` for a first line that is none, or of another thread.
    """

    def __init__(self, name: str, header: bytes) -> None:
        self.thread_id = thread_of(header)

        if log_name(self.thread_id) != name:
            raise ValueError(f"it is the log of thread {self.thread_id!r}")

        self.synced = 0
        self.tail: tuple[int, At | None] = (0, None)
        self._lock = threading.Lock()
        self._scanned = len(header)
        self._calls = Calls(self.thread_id)

    def catch_up(self, log: Log) -> Calls:
        """Return the calls, with all those that the log holds by now."""
        with self._lock:
            if self._scanned < log.end:
                log.settle()

                for offset, line in log.lines(self._scanned):
                    if line.startswith(CALL):
                        self._learn(log, offset, line)
                    elif line[: len(ADD)] not in KINDS:
                        # It may have been a call, so nothing can be said of any.
                        raise log.corrupt(offset, "the line is none of ours")

                self._scanned = log.end

        return self._calls

    def _learn(self, log: Log, offset: int, line: bytes) -> None:
        try:
            self._calls.learn(offset, line)
        except ValueError as exc:
            raise log.corrupt(offset, str(exc)) from exc


def _fetch(log: Log, place: _Place) -> StoredCall:
    call = place.call

    if call.erased:
        return call

    return call._replace(
        args=log.read(*place.args),
        result=None if place.result is None else log.read(*place.result),
    )
