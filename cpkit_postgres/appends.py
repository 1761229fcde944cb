"""Which appends of a group share a statement, and how each of them ends.

A statement takes one entry per thread: appends without an expected version, merged, or
one with an expected version. Almost always that is all there is. What is left goes into
the next statement, unless the version that its thread has reached decides it already.
"""

from __future__ import annotations

from copy import copy

from cpkit.driver.writes import Append
from cpkit.errors import BackendUnavailable, CheckpointerError, VersionConflict

__all__ = ["AppendGroup", "Entry"]

# Each holds a place in the server's lock table, which has max_locks_per_transaction
# of them (64 by default) for every connection.
_THREADS = 64


class Entry:
    """What one thread gets in one statement; ``places`` are those in the group."""

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
        self._waiting = list(range(len(appends)))
        self.outcomes: list[object] = [None] * len(appends)

    def next_entries(self) -> list[Entry]:
        """Take what goes into the next statement; nothing when all is settled."""
        entries: dict[str, Entry] = {}
        left = []

        for place in self._waiting:
            append = self._appends[place]
            expected = append.expected_version
            entry = entries.get(append.thread_id)

            if entry is None and len(entries) < _THREADS:
                entry = entries[append.thread_id] = Entry(append.thread_id, expected)
            elif entry is None or not (entry.expected is expected is None):
                left.append(place)
                continue

            entry.places.append(place)
            entry.bodies += [body.decode() for body in append.bodies]

        self._waiting = left
        return list(entries.values())

    def settle(self, entries: list[Entry], answers: list[int]) -> None:
        """Note what the statement returned for each entry.

        The thread's new version; or -1 - v where it was not at the expected version,
        but at v.
        """
        versions = {}

        for entry, answer in zip(entries, answers, strict=True):
            if answer < 0:
                answer = -1 - answer
                self._conflict(entry.places[0], answer)
            else:
                version = answer - len(entry.bodies)

                for place in entry.places:
                    version += len(self._appends[place].bodies)
                    self.outcomes[place] = version

            versions[entry.thread_id] = answer

        left, self._waiting = self._waiting, []

        for place in left:
            append = self._appends[place]
            reached = versions.get(append.thread_id)

            if reached is None or append.expected_version in (None, reached):
                self._waiting.append(place)
            else:
                self._conflict(place, reached)

    def fail(self, entries: list[Entry], error: CheckpointerError) -> None:
        """End all that is not settled with the error, which the entries met."""
        sent = [place for entry in entries for place in entry.places]
        unsent, self._waiting = self._waiting, []

        for places, was_sent in ((sent, True), (unsent, False)):
            for place in places:
                # Each caller its own, because raising it adds a traceback to it.
                own = copy(error)
                own.__cause__ = error.__cause__
                self.outcomes[place] = own

                if isinstance(own, BackendUnavailable) and not was_sent:
                    own.maybe_applied = False

    def _conflict(self, place: int, version: int) -> None:
        append = self._appends[place]
        expected = append.expected_version
        assert expected is not None
        self.outcomes[place] = VersionConflict(append.thread_id, expected, version)
