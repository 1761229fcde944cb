"""Watching: markers of threads, and ``PRAGMA data_version`` on a connection of its own.

``data_version`` changes when another connection commits, of any process. It is a read
of shared memory, so it is asked every few milliseconds while a thread is watched
(sqlite.org/pragma.html#pragma_data_version).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing

from cpkit_sqlite.schema import File

__all__ = ["follow", "markers"]

# Seconds between two looks. One was measured to take 10 µs.
_PAUSE = 0.015

_THREADS = """
SELECT thread_id, number, created_at, updated_at,
    (SELECT max(key) FROM cpkit_messages
     WHERE key >= number << 32 AND key < (number + 1) << 32)
FROM cpkit_threads
"""

# A late result of an erased call does not touch the thread.
_ERASED = """
SELECT thread_id, count(*), sum(status = 'issued') FROM cpkit_calls WHERE erased
"""


def markers(
    db: sqlite3.Connection, thread_ids: Sequence[str] | None
) -> Mapping[str, Hashable]:
    """Return the markers of these threads, or of all."""
    found: dict[str, tuple[object, ...]] = {}

    if thread_ids is None:
        rows = [*db.execute(_THREADS), *db.execute(f"{_ERASED} GROUP BY thread_id")]
    else:
        rows = []

        for one in thread_ids:
            rows += db.execute(f"{_THREADS} WHERE thread_id = ?", (one,))
            rows += db.execute(f"{_ERASED} AND thread_id = ? GROUP BY 1", (one,))

    for thread_id, *values in rows:
        found[thread_id] = (*found.get(thread_id, ()), *values)

    return found


def follow(file: File, changed: Callable[[], None], stop: threading.Event) -> None:
    """Call ``changed`` after commits of other connections, until ``stop`` is set."""
    with closing(sqlite3.connect(file.uri, uri=True, isolation_level=None)) as db:
        known = None

        while True:
            (version,) = db.execute("PRAGMA data_version").fetchone()

            if version != known:
                changed()

            known = version

            if stop.wait(_PAUSE):
                return
