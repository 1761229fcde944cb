"""Which appends of a group share a statement, and how each of them ends.

A statement takes one entry per thread: the thread's next appends without an expected
version, merged, or its next append with one. Almost always that is all there is. What
is left of a thread after its entry goes into the next statement, unless the version
that the thread has reached already decides it.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from itertools import islice

from cpkit.errors import BackendUnavailable, CheckpointerError, VersionConflict
from cpkit.writes import Append

__all__ = ["AppendGroup", "Entry"]

# Each holds a place in the server's lock table, which has max_locks_per_transaction
# of them (64 by default) for every connection.
_THREADS = 64


class Entry:
    """What one thread gets in one statement: places in the group, and the bodies."""

    __slots__ = ("bodies", "expected", "places", "thread_id")

    def __init__(self, thread_id: str, expected: int | None) -> None:
        self.thread_id = thread_id
        self.expected = expected
        self.places: list[int] = []
        self.bodies: list[str] = []


class AppendGroup:
    """Appends on their way; ``outcomes`` has a version or an error for each."""

    def __init__(self, appends: list[Append]) -> None:
        self._appends = appends
        self._waiting: dict[str, deque[int]] = {}
        self.outcomes: list[object] = [None] * len(appends)

        for place, append in enumerate(appends):
            self._waiting.setdefault(append.thread_id, deque()).append(place)

    def next_entries(self) -> list[Entry]:
        """Take what goes into the next statement; nothing when all is settled."""
        waiting = islice(self._waiting.items(), _THREADS)
        return [self._take(thread_id, queue) for thread_id, queue in waiting]

    def settle(self, entries: list[Entry], answers: list[int]) -> None:
        """Note what the statement returned for each entry.

        The thread's new version; or -1 - v where it was not at the expected version,
        but at v.
        """
        for entry, answer in zip(entries, answers, strict=True):
            version = max(answer, -1 - answer)

            if answer >= 0:
                self._applied(entry, version)
            else:
                self._conflict(entry.places[0], version)

            queue = self._waiting[entry.thread_id]

            while queue and self._expected(queue[0]) not in (None, version):
                self._conflict(queue.popleft(), version)

            if not queue:
                del self._waiting[entry.thread_id]

    def fail(self, entries: list[Entry], error: CheckpointerError) -> None:
        """End all that is not settled with the error, which the entries met."""
        sent = [place for entry in entries for place in entry.places]
        unsent = [place for queue in self._waiting.values() for place in queue]
        self._waiting.clear()

        for place in sent + unsent:
            # Each caller its own, because raising it adds a traceback to it.
            own = copy(error)
            own.__cause__ = error.__cause__
            self.outcomes[place] = own

            if isinstance(own, BackendUnavailable) and place in unsent:
                own.maybe_applied = False

    def _take(self, thread_id: str, queue: deque[int]) -> Entry:
        entry = Entry(thread_id, self._expected(queue[0]))

        while queue:
            append = self._appends[queue[0]]
            alone = entry.expected is not None or append.expected_version is not None

            if alone and entry.places:
                break

            entry.places.append(queue.popleft())
            entry.bodies += [body.decode() for body in append.bodies]

        return entry

    def _applied(self, entry: Entry, version: int) -> None:
        version -= len(entry.bodies)

        for place in entry.places:
            version += len(self._appends[place].bodies)
            self.outcomes[place] = version

    def _conflict(self, place: int, version: int) -> None:
        append = self._appends[place]
        assert append.expected_version is not None
        self.outcomes[place] = VersionConflict(
            append.thread_id, append.expected_version, version
        )

    def _expected(self, place: int) -> int | None:
        return self._appends[place].expected_version
